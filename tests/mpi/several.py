"""The jobs that run the tests of tests/ranks on several ranks.

Those that a test marked `beside` asks for run beside the tests of one process, which leave a core idle: they begin with
the first of tests/ranks (its conftest.py), and tests/conftest.py puts the tests that wait for their end last.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mpi import jobs
from tests.ranks.conftest import SAME_ON_ANY_NUMBER, UP_TO_THREE

FOLDER = jobs.ROOT / "tests" / "ranks"
SAME = "2, the same on any number"

_thread = ThreadPoolExecutor(1)
_jobs: dict[str, Future[jobs.Job]] = {}


def begin(name: str, folders: pytest.TempPathFactory) -> Future[jobs.Job]:
    """Has a job run behind those that were asked for before, if it has not begun yet.

    Args:
        name: the number of ranks, for all files that depend on it; or `SAME`, for the others.
        folders: where its files go.

    Returns:
        How it ends.
    """
    if name not in _jobs:
        _jobs[name] = _thread.submit(_run, name, folders.mktemp(f"ranks_{name[0]}"))
    return _jobs[name]


def begin_beside(session: pytest.Session, folders: pytest.TempPathFactory) -> None:
    """Begins the jobs that this session's tests marked `beside` wait for."""
    for item in session.items:
        if item.get_closest_marker("beside"):
            begin(item.callspec.params["job"], folders)


def stop() -> None:
    """Begins nothing more, and ends what runs."""
    _thread.shutdown(wait=False, cancel_futures=True)
    jobs.stop()


def _run(name: str, folder: Path) -> jobs.Job:
    ranks = int(name[0])
    if name == SAME:
        files = [str(FOLDER / file) for file in SAME_ON_ANY_NUMBER]
    else:
        others = (*SAME_ON_ANY_NUMBER, *UP_TO_THREE) if ranks > 3 else SAME_ON_ANY_NUMBER
        files = [*(f"--ignore={FOLDER / file}" for file in others), str(FOLDER)]
    # The temporary folders of the ranks stay in the job's.
    own = {"PYTEST_DEBUG_TEMPROOT": str(folder)}
    options = ["-m", "pytest", "-x", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(jobs.ROOT)]
    return jobs.run(folder, [*options, *files], ranks=ranks, changes=own, limit_s=600 + 300 * ranks)
