"""What ends a job on several hosts: a host that is cut off, ranks that are killed or never start, a stuck daemon.

Each job ends by itself with words that name who is missing, and nothing of it is left.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_ext.cluster import launch
from hvd_ext.cluster.spec import Spec
from tests.mpi.faulty import Faulty, running

pytestmark = pytest.mark.cluster

Waiting = dict[Callable[[Path], None], Future[None]]

# Where mpirun ends by itself, nothing else may end it before; a busy machine makes it wait.
LONG_S = 200.0


def fails_by_itself(job: Faulty, rank: int) -> bool:
    return "CommunicationError: " in job.said(rank)


def a_host_is_cut_off(folder: Path, transport: str = "tcp") -> None:
    limits = {"HVD_EXT_STALL_WARN_S": "1", "HVD_EXT_STALL_FATAL_S": "12", "HVD_EXT_TRANSPORT": transport}
    with running(folder, Spec((2, 1, 1), rate="100mbit"), **limits) as job:
        job.wait_for_steps(3)
        job.cluster.cut("h2")
        job.must_fail()
        assert "2 (it does not answer)" in job.said(0), job.text()
        assert "rank 0, which finds out who is missing, does not answer" in job.said(2), job.text()
        # The first that fails may end those that it can reach before they have said so too.
        assert any(fails_by_itself(job, rank) for rank in (0, 1, 3)), job.text()
        assert fails_by_itself(job, 2), job.text()
        assert "longer than the limit (12 s, HVD_EXT_STALL_FATAL_S)" in job.said(2), job.text()
        # Here mpirun alone would wait on; where the host comes back before, it ends by itself.
        assert job.status or "mpirun waits for a host that does not answer" in job.error, job.text()


def a_host_is_cut_off_from_mpi(folder: Path) -> None:
    a_host_is_cut_off(folder, "mpi")


def a_host_is_cut_off_in_training(folder: Path) -> None:
    fit = """
    import os, time
    from pathlib import Path
    import keras
    import numpy as np
    import hvd_ext as hvd

    # ranks import Keras seconds apart, which the limit for a peer that stays away must not count
    folder = Path(os.environ["HVD_EXT_TEST_OUTPUT"])
    (folder / f"{os.environ['OMPI_COMM_WORLD_RANK']}.arrived").touch()
    while len(list(folder.glob("*.arrived"))) < 3:
        time.sleep(0.1)
    hvd.init()
    x = np.random.default_rng(hvd.rank()).normal(size=(6400, 20)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(100, "relu"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", batch, flush=True))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x[:, :1], batch_size=32, epochs=1000, verbose=0, callbacks=[start, told])
    """
    # the cut must not come while they plan their buckets again
    limits = {"HVD_EXT_STALL_WARN_S": "5", "HVD_EXT_STALL_FATAL_S": "20", "HVD_EXT_REPLAN_EVERY": "0"}
    with running(folder, Spec((2, 1), rate="100mbit"), fit, **limits) as job:
        job.wait_for_steps(3)
        job.cluster.cut("h2")
        job.must_fail()
        assert "2 (it does not answer)" in job.said(0), job.text()
        assert "rank 0, which finds out who is missing, does not answer" in job.said(2), job.text()
        assert "longer than the limit (20 s, HVD_EXT_STALL_FATAL_S)" in job.said(2), job.text()


def a_rank_never_starts(folder: Path) -> None:
    never = """
    import os, time
    from hvd_ext.job import process

    if os.environ["OMPI_COMM_WORLD_RANK"] == "3":
        print("is here", flush=True)
        time.sleep(3600)
    process.init()
    """
    limits = {"HVD_EXT_STALL_WARN_S": "1", "HVD_EXT_STALL_FATAL_S": "10"}
    with running(folder, Spec((2, 2), rate="100mbit"), never, **limits) as job:
        job.must_fail()
        said = "".join(job.said(rank) for rank in (0, 1, 2))
        assert "rank 3 (local rank 1) of host h2 has not called init()" in said, job.text()
        assert "all 2 ranks of host h1 have called init(): a rank of another host has not" in said, job.text()
        assert "longer than the limit (10 s, HVD_EXT_STALL_FATAL_S)" in said, job.text()


WAITS = (a_host_is_cut_off, a_host_is_cut_off_from_mpi, a_host_is_cut_off_in_training, a_rank_never_starts)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """Starts at the same time what does little but wait for many seconds, each in a cluster of its own."""
    with pytest.MonkeyPatch.context() as change, ThreadPoolExecutor(len(WAITS)) as pool:
        change.setattr(launch, "PATIENCE_S", 3.0)
        yield {wait: pool.submit(wait, tmp_path_factory.mktemp(wait.__name__)) for wait in WAITS}


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_all_ranks_end_themselves_and_name_the_missing_ones(wait: Callable[[Path], None], waiting: Waiting) -> None:
    waiting[wait].result()


def test_mpirun_itself_names_a_host_that_is_cut_off_where_it_looks_often_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", LONG_S)
    often = {"oob_tcp_keepalive_time": "2", "oob_tcp_keepalive_intvl": "1", "oob_tcp_keepalive_probes": "2"}
    with running(tmp_path, Spec((2, 2), rate="100mbit", mca=often)) as job:
        job.wait_for_steps(3)
        job.cluster.cut("h2")
        job.must_fail()
        assert job.status, job.text()
        assert "on node h2" in job.text(), job.text()


@pytest.mark.parametrize("killed", [(3,), (1, 3)], ids=["one", "one on each host"])
def test_ranks_that_are_killed_end_the_job(
    killed: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", LONG_S)
    with running(tmp_path, Spec((2, 2), rate="100mbit")) as job:
        job.wait_for_steps(3)
        ranks = job.pids()
        for rank in killed:
            ranks[rank].send_signal(signal.SIGKILL)
        begun_s = time.monotonic()
        job.must_fail()
        assert job.status, job.text()
        # A survivor that finds its peer gone may end the job before mpirun has seen who was killed.
        words = ("exited on signal 9", "MPI_ABORT", "CommunicationError", "exiting improperly")
        assert any(word in job.text() for word in words), job.text()
        print(f"mpirun ended {job.ended_s - begun_s:.1f} s after the kill")


def test_a_rank_ends_also_where_the_daemon_that_should_end_it_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", LONG_S)
    with running(tmp_path, Spec((1, 2), rate="100mbit")) as job:
        job.wait_for_steps(3)
        failing = job.pids()[2]
        daemon = failing.parent()
        assert daemon.name() == "orted"
        daemon.suspend()
        (tmp_path / "raise2").touch()
        job.wait(lambda: "told to fail" in job.said(2), "rank 2 fails")
        job.wait(lambda: not failing.is_running() or failing.status() == "zombie", "rank 2 ends")
        daemon.resume()
        job.must_fail()
        assert job.status, job.text()
