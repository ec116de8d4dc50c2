"""The jobs that run the tests of tests/ranks on several ranks.

They run one after the other beside all other tests, which leave cores idle where they wait and where they are one
process: they begin with the session; tests/conftest.py puts the tests that wait for their end (marked `beside`) last.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import timing
from tests.mpi import jobs

FOLDER = jobs.ROOT / "tests" / "ranks"
TESTS = Path(__file__).resolve().with_name("test_ranks.py")
# The mark of a file of tests/ranks: on how many ranks the suite runs it.
MARK = re.compile(r"pytest\.mark\.ranks\(([\d, ]+)\)")
WITHOUT_MARK = (1, 2, 3)
# The files that also run as users of Keras 2 run their scripts, with TF_USE_LEGACY_KERAS=1: in a job of their own.
LEGACY = "2, Keras 2"
# Jobs that other tests hold up, on a slow machine, end in this time all the same.
LIMIT_S = 3600

_thread = ThreadPoolExecutor(1, thread_name_prefix=timing.BESIDE)
_jobs: dict[str, Future[jobs.Job]] = {}


def numbers(file: Path) -> tuple[int, ...]:
    """Gives the numbers of ranks on which the suite runs the tests of a file of tests/ranks."""
    mark = MARK.search(file.read_text(encoding="utf-8"))
    return tuple(int(number) for number in mark.group(1).split(",")) if mark else WITHOUT_MARK


def files(name: str) -> list[Path]:
    """Gives the files that a job runs."""
    legacy = sorted(FOLDER.glob("test_*keras2.py"))
    if name == LEGACY:
        return legacy
    return [file for file in sorted(FOLDER.glob("test_*.py")) if file not in legacy and int(name) in numbers(file)]


def begin(name: str, config: pytest.Config, folders: pytest.TempPathFactory) -> Future[jobs.Job]:
    """Has a job run behind those that were asked for before, if it has not begun yet.

    Args:
        name: the number of ranks; or `LEGACY`.
        config: of this session; what its marks leave out (`-m`), the job leaves out too.
        folders: where its files go.

    Returns:
        How it ends.
    """
    if name not in _jobs:
        _jobs[name] = _thread.submit(_run, name, config.option.markexpr, folders.mktemp(f"ranks_{name[0]}"))
    return _jobs[name]


def wanted(items: list[pytest.Item]) -> list[str]:
    """Gives the names of the jobs for which some of these tests wait; without mpirun these tests are skipped."""
    return [item.callspec.params["job"] for item in items if item.path == TESTS and shutil.which("mpirun")]


def begin_beside(session: pytest.Session, folders: pytest.TempPathFactory) -> None:
    """Begins the jobs for which this session's tests wait."""
    for name in wanted(session.items):
        begin(name, session.config, folders)


def stop() -> None:
    """Begins nothing more, and ends what runs."""
    _thread.shutdown(wait=False, cancel_futures=True)
    jobs.stop()


def _run(name: str, marks: str, folder: Path) -> jobs.Job:
    ranks = int(name[0])
    # The temporary folders of the ranks stay in the job's.
    own = {"PYTEST_DEBUG_TEMPROOT": str(folder)}
    if name == LEGACY:
        own["TF_USE_LEGACY_KERAS"] = "1"
    options = ["-m", "pytest", "-m", marks, "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT)]
    launcher = [*jobs.patient(5), *jobs.MPIRUN] if ranks > 1 else []
    return jobs.run(
        folder, [*options, *map(str, files(name))], ranks=ranks, launcher=launcher, changes=own, limit_s=LIMIT_S
    )
