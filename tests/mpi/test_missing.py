"""A rank that stays away or ends early: the others say who it is, and end when they have waited too long."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_ext.job.startup_watch import Arrivals
from tests.mpi import jobs

NEVER = """
    import os, pathlib, time
    import hvd_ext as hvd

    if os.environ["OMPI_COMM_WORLD_RANK"] == "MISSING":
        time.sleep(3600)
    hvd.init()
    print("went on", flush=True)
"""

# Rank 1 stops after a few epochs, all by itself: early stopping without averaged metrics.
LEAVES = """
    import keras, numpy as np
    import hvd_ext as hvd

    hvd.init()
    keras.utils.set_random_seed(1)  # equal weights
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24 + hvd.rank()
    # the loss becomes smaller in every epoch: what it must reach is more than that
    stop = [keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=2)] if hvd.rank() == 1 else []
    try:
        history = model.fit(x, x[:, :1], batch_size=4, epochs=50, verbose=0, callbacks=stop)
    except Exception as error:
        print("told:", " ".join(str(error).split()), flush=True)
        raise
    print("ended after", len(history.epoch), "epochs", flush=True)
"""


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts_is_named_and_ends_the_job(missing: int, tmp_path: Path) -> None:
    # The limit is long enough for slow ranks to come to init() together.
    limits = {"HVD_EXT_STALL_WARN_S": "1", "HVD_EXT_STALL_FATAL_S": "8"}
    job = jobs.run(tmp_path, NEVER.replace("MISSING", str(missing)), ranks=3, changes=limits).must_fail()
    others = [job.outputs[rank] for rank in range(3) if rank != missing]
    assert f"rank {missing} (local rank {missing})" in "".join(others), job.text()
    assert any("longer than the limit (8 s, HVD_EXT_STALL_FATAL_S)" in text for text in others), job.text()
    # Each second there would be a warning, but the same words are said once.
    lines = [line for text in others for line in text.splitlines() if "has waited" in line and "the limit" not in line]
    said = [line.split("other ranks: ")[1] for line in lines]
    assert said and len(said) == len(set(said)), job.text()
    assert not any("went on" in text for text in others), job.text()


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    program = """
    import os, time
    import hvd_ext as hvd

    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(2)
    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    hvd.shutdown()
    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    """
    jobs.run(tmp_path, program, changes={"HVD_EXT_STALL_FATAL_S": "100"}).must_succeed()


def test_a_rank_that_ends_fit_early_is_named_to_those_that_train_on(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, LEAVES).must_fail()
    assert "ended after" in job.outputs[1] and "told:" not in job.outputs[1], job.text()
    told = [line for line in job.outputs[0].splitlines() if line.startswith("told:")]
    assert len(told) == 1 and "rank 1" in told[0], job.text()
    assert "DistributedOptimizer" in told[0] or "SGD" in told[0], job.text()


def environment(folder: Path, place: int, size: int, rank: int) -> dict[str, str]:
    return {
        "PMIX_SERVER_TMPDIR": str(folder),
        "PMIX_NAMESPACE": "123/4",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(place),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


def test_the_marks_of_a_host_say_who_is_missing(tmp_path: Path) -> None:
    third = Arrivals(environment(tmp_path, 2, 4, 6))
    third.mark()
    assert third.speaks()
    assert third.words().startswith("rank 4 (local rank 0), rank 5 (local rank 1), rank 7 (local rank 3) of host")
    for place in (0, 1, 3):
        Arrivals(environment(tmp_path, place, 4, 4 + place)).mark()
    assert not third.speaks()
    assert "all 4 ranks of host" in third.words() and "another host" in third.words()


def test_where_ranks_do_not_follow_the_hosts_only_the_place_is_named(tmp_path: Path) -> None:
    Arrivals(environment(tmp_path, 0, 3, 0)).mark()
    second = Arrivals(environment(tmp_path, 1, 3, 2))
    second.mark()
    assert second.words().startswith("local rank 2 of host")


def test_the_marks_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    Arrivals(environment(tmp_path, 0, 2, 0), start=1).mark()
    second = Arrivals(environment(tmp_path, 1, 2, 1), start=2)
    second.mark()
    assert second.here() == {1: "1"}


@pytest.mark.parametrize("broken", [{}, {"PMIX_SERVER_TMPDIR": "/nowhere"}])
def test_a_launcher_that_tells_nothing_gives_words_all_the_same(broken: dict[str, str], tmp_path: Path) -> None:
    alone = Arrivals({"OMPI_COMM_WORLD_RANK": "1", **broken})
    alone.mark()
    assert alone.speaks()
    assert alone.words() == "rank 1 has called init(); under this launcher the missing ranks cannot be named"


def nothing(folder: Path) -> None:
    """Leaves the name of a mark free."""


def link(folder: Path) -> None:
    """Leads a mark elsewhere."""
    (folder / "hvd_ext-123-4-1-0").symlink_to(folder.parent / "elsewhere")


def fifo(folder: Path) -> None:
    """Blocks whoever opens a mark."""
    os.mkfifo(folder / "hvd_ext-123-4-1-0")


@pytest.mark.parametrize(("mode", "planted"), [(0o777, nothing), (0o700, link), (0o700, fifo)])
def test_a_mark_is_neither_written_nor_read_where_others_may_have_been(
    mode: int, planted: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "launcher"
    folder.mkdir()
    planted(folder)
    folder.chmod(mode)
    first = Arrivals(environment(folder, 0, 2, 0))
    before = sorted(folder.iterdir())
    assert first.here() == {}
    first.mark()
    assert first.words() == "rank 0 has called init(); under this launcher the missing ranks cannot be named"
    assert sorted(folder.iterdir()) == before
    assert not (tmp_path / "elsewhere").exists()
