"""Fixtures of the tests that are right on any number of ranks: `python -m pytest tests/ranks`, or under `mpirun`.

All ranks run the same tests in the same order. A test that fails on one rank ends the job (`pytest -x`), because the
others would wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LAUNCHED_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark as slow what the suite does not run on three ranks; leave all out where jobs of this session run them."""
    from tests.mpi import several

    folder = Path(__file__).parent
    numbers = {path: several.numbers(path) for path in {item.path for item in items} if path.parent == folder}
    for item in items:
        if 3 not in numbers.get(item.path, (3,)):
            item.add_marker(pytest.mark.slow)
    yield  # what -m and -k leave out is gone now
    if several.runs_in(items):
        left_out = [item for item in items if item.path in numbers]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def two_uneven_hosts(size: int) -> str:
    """Describe a cluster of two hosts in YAML: the first has one rank more than the second, or two more.

    Args:
        size: the number of ranks, at least 3.

    Returns:
        The text of a topology file.
    """
    first = size // 2 + 1
    hosts = [list(range(first)), list(range(first, size))]
    lines = ["name: cluster", "link: {alpha_s: 30.0e-6, gbit_per_s: 10}", "children:"]
    for index, ranks in enumerate(hosts):
        lines += [f"  - name: host{index}", "    link: {alpha_s: 5.0e-6, gbit_per_s: 40}", f"    ranks: {ranks}"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session", autouse=True)
def hvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package, initialized for the whole session; with more than two ranks on two uneven virtual hosts."""
    import hvd_ext

    if LAUNCHED_SIZE > 2 and "HVD_EXT_TOPOLOGY" not in os.environ:
        path: Path = tmp_path_factory.mktemp("topology") / f"rank{os.environ['OMPI_COMM_WORLD_RANK']}.yaml"
        path.write_text(two_uneven_hosts(LAUNCHED_SIZE), encoding="utf-8")
        os.environ["HVD_EXT_TOPOLOGY"] = str(path)
    # A test that leaves ranks waiting must fail in the end, with words.
    os.environ.setdefault("HVD_EXT_STALL_FATAL_S", "120")
    hvd_ext.init()
    yield hvd_ext
    hvd_ext.shutdown()


@pytest.fixture(autouse=True)
def running(hvd: ModuleType) -> None:
    """Each test finds hvd_ext running, also after a test that has shut it down."""
    hvd.init()


@pytest.fixture
def shared(hvd: ModuleType, tmp_path: Path) -> Path:
    """One folder for all ranks: that of rank 0."""
    return Path(hvd.broadcast_object(str(tmp_path)))


@pytest.fixture
def rank(hvd: ModuleType) -> int:
    """This process's rank."""
    return int(hvd.rank())


@pytest.fixture
def size(hvd: ModuleType) -> int:
    """The number of ranks."""
    return int(hvd.size())


@pytest.fixture(scope="module")
def evens(hvd: ModuleType) -> Iterator[Any]:
    """The process set of the ranks 0, 2, 4, ...; of two ranks rank 0 alone. One rank has none but the global set."""
    if hvd.size() == 1:
        yield hvd.global_process_set
        return
    added = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    yield added
    hvd.remove_process_set(added)


@pytest.fixture
def apart(hvd: ModuleType) -> Iterator[None]:
    """Begin anew on two hosts that are far apart; a job of one rank has one."""
    from tests.ranks.topk_jobs import as_launched, hosts_of, restart

    restart(hosts_of(hvd.size()))
    yield
    as_launched()
