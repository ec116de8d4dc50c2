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

# Files whose tests do not depend on how many other ranks there are: the suite runs them on one and on two, and `make
# check` not at all. Two cores need minutes for them on more.
SAME_ON_ANY_NUMBER = (
    "test_bench_data.py",
    "test_optimizer.py",
    "test_callbacks.py",
    "test_mismatch_table.py",
    "test_names.py",
    "test_accumulation.py",
    "test_layers.py",
    "test_loss_scale.py",
    "test_optimizer_gradients.py",
    "test_optimizer_options.py",
    "test_pairs.py",
    "test_callbacks_keras2.py",
    "test_callbacks_learning_rate.py",
    "test_callbacks_together.py",
    "test_hangs.py",
    "test_sync_batch_norm.py",
    "test_data_page.py",
    "test_training_page.py",
    "test_readme.py",
    "test_gpu_machines.py",
    "test_xla.py",
    "test_keras2.py",
    "test_migration.py",
    "test_pattern_options.py",
    "test_patterns.py",
    "test_tape.py",
    "test_saving.py",
    "test_checkpoint.py",
    "test_checkpoint_models.py",
    "test_checkpoint_phases.py",
    "test_refusals_keras.py",
    "test_registration_keras.py",
    "test_session.py",
    "test_same_start.py",
    "test_stragglers_page.py",
    "test_stragglers_state.py",
    "test_topk_state.py",
    "test_topk_kept.py",
    "test_topk_lars.py",
    "test_topk_momentum.py",
    "test_topk_until.py",
    "test_optimizers_page.py",
    "test_topk_page.py",
)

# Of these the files that also run as users of Keras 2 run their scripts, with TF_USE_LEGACY_KERAS=1: in a job of their
# own, and not in the other one.
KERAS_2 = ("test_keras2.py", "test_callbacks_keras2.py")

# Files that train models of all ranks: the suite runs them on one, two and three ranks, which are two uneven hosts. On
# more the sums are those of the other files, and test_optimizer_sets.py trains.
UP_TO_THREE = (
    "test_data_cache.py",
    "test_data_going_on.py",
    "test_layerwise.py",
    "test_refusals_tape.py",
    "test_steps_in_graphs.py",
    "test_stragglers.py",
    "test_topk.py",
    "test_training.py",
)

# Files that train and plan anew on four ranks as on eight, on two uneven hosts in both: each rank takes long.
UP_TO_FOUR = ("test_compression.py", "test_data.py", "test_replanning.py", "test_trace.py")

# Of the files that are the same on any number of ranks those that take longest and ask what happens between ranks:
# where the session has them run on two ranks, it does not run them on one. Alone, a rank trains, saves and goes on in
# the other files and in tests/mpi.
ON_TWO = (
    "test_bench_data.py",
    "test_callbacks_together.py",
    "test_checkpoint.py",
    "test_checkpoint_models.py",
    "test_checkpoint_phases.py",
    "test_hangs.py",
    "test_keras2.py",
    "test_stragglers_state.py",
    "test_sync_batch_norm.py",
    "test_topk_kept.py",
    "test_topk_lars.py",
    "test_topk_momentum.py",
    "test_topk_state.py",
    "test_topk_until.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that are the same on any number of ranks as slow; leave out what a job of two ranks runs."""
    from tests.mpi import several

    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in SAME_ON_ANY_NUMBER:
            item.add_marker(pytest.mark.slow)
    yield  # what -m and -k leave out is gone now
    if several.SAME in several.wanted(items):
        left_out = [item for item in items if item.path.parent == Path(__file__).parent and item.path.name in ON_TWO]
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
