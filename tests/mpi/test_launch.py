"""Every way to start a job: by mpirun, by horovodrun, without a launcher, beside mpi4py and Horovod; and wrong ways."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import hvd_ext
from tests.mpi import jobs

# What is tested is a rank as the launcher starts it.
run = functools.partial(jobs.run, forked=False)

TWO_LIVES = """
    import hvd_ext as hvd

    for life in range(2):
        hvd.init()
        assert hvd.is_initialized()
        ranks = hvd.allgather_object((hvd.rank(), life))
        assert ranks == [(rank, life) for rank in range(hvd.size())], ranks
        assert hvd.broadcast_object(f"from {hvd.rank()}", root_rank=hvd.size() - 1) == f"from {hvd.size() - 1}"
        print("life", life, "rank", hvd.rank(), "of", hvd.size(), "mpi", hvd.mpi_enabled(), flush=True)
        if life == 0 or STOP:
            hvd.shutdown()
            assert not hvd.is_initialized()
"""

WITH_TENSORFLOW = """
    FIRST
    import tensorflow as tf
    import hvd_ext as hvd

    hvd.init()
    x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)
    total = sum(range(1, hvd.size() + 1))
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for _ in range(3):
        assert hvd.allreduce(x, op=hvd.Sum).numpy().tolist() == [total, 2 * total]
        assert step(x).numpy().tolist() == [total, 2 * total]
    LAST
    print("done", flush=True)
"""


@pytest.mark.parametrize(("ranks", "stop"), [(1, True), (2, True), (2, False), (5, False)])
def test_mpirun_starts_a_job_that_lives_twice(ranks: int, stop: bool, tmp_path: Path) -> None:
    job = run(tmp_path, TWO_LIVES.replace("STOP", str(stop)), ranks=ranks).must_succeed()
    for rank in range(ranks):
        for life in range(2):
            assert job.says(rank, f"life {life} rank {rank} of {ranks} mpi True"), job.text()
        # Rank 0 of several says at the start what runs, and no second time.
        line = f"hvd_ext: [rank 0] version {hvd_ext.__version__}, {ranks} ranks on 1 host: "
        assert job.outputs[rank].count(line) == (rank == 0 and ranks > 1), job.text()


@pytest.mark.parametrize("stop", [True, False], ids=["shutdown", "no shutdown"])
def test_without_a_launcher_the_job_has_one_rank(stop: bool, tmp_path: Path) -> None:
    job = run(tmp_path, TWO_LIVES.replace("STOP", str(stop)), ranks=1, launcher=[]).must_succeed()
    assert job.says(0, "life 1 rank 0 of 1 mpi False"), job.text()


GLOO = "InvalidError: launcher (horovodrun with Gloo", "horovodrun --mpi"
# As a launcher of another MPI does it: processes that say they are 3, in which our MPI sees one.
OF_3 = "started 3 processes", "sees 1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, GLOO),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, GLOO),
        ({"HOROVOD_ELASTIC": "1"}, ("InvalidError: launcher (HOROVOD_ELASTIC=1)",)),
        ({"PMI_SIZE": "3"}, (*OF_3, "use the mpirun that belongs to the MPI of the build")),
        ({"SLURM_STEP_NUM_TASKS": "3"}, (*OF_3, "srun --mpi=pmix")),
    ],
    ids=["Gloo's rendezvous", "Gloo's rank", "elastic", "another MPI", "srun"],
)
def test_a_launch_that_is_no_job_of_our_mpi_is_refused_in_words(
    changes: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    program = "import hvd_ext as hvd; hvd.init(); print('trains alone', flush=True)"
    job = run(tmp_path, program, ranks=1, launcher=[], changes=changes).must_fail()
    assert all(word in job.outputs[0] for word in words), job.text()
    assert not job.says(0, "trains alone"), job.text()


def test_horovods_variables_are_heeded_or_named_by_rank_0_once(tmp_path: Path) -> None:
    program = """
    import hvd_ext as hvd
    from hvd_ext.job import runtime

    for life in range(2):
        hvd.init()
        print("bucket", runtime.current().options.bucket_nbytes, flush=True)
        hvd.shutdown()
    """
    changes = {"HOROVOD_FUSION_THRESHOLD": "4096", "HOROVOD_CYCLE_TIME": "3", "HVD_EXT_QUIET": "1"}
    job = run(tmp_path, program, changes=changes).must_succeed("bucket 4096")
    warned = [text.count("HOROVOD_CYCLE_TIME=3 has no effect in hvd_ext") for text in job.outputs]
    assert warned == [1, 0], job.text()
    assert "hvd_ext: [rank 0] environment variable HOROVOD_CYCLE_TIME=3 has" in job.outputs[0], job.text()
    assert "version" not in job.outputs[0], job.text()  # it was asked to be quiet, but for warnings


@pytest.mark.parametrize("first", ["mpi4py", "hvd_ext"])
def test_mpi_that_mpi4py_uses_is_shared(first: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: python -m pip install mpi4py")
    ours, theirs = "import hvd_ext as hvd; hvd.init()", "from mpi4py import MPI; world = MPI.COMM_WORLD"
    program = f"""
    {theirs if first == "mpi4py" else ours}
    {ours if first == "mpi4py" else theirs}
    assert hvd.rank() == world.rank and hvd.size() == world.size == 2
    for turn in range(3):
        assert world.allreduce(world.rank) == 1
        assert hvd.allgather_object(turn + hvd.rank()) == [turn, turn + 1]
    hvd.shutdown()
    assert world.allreduce(1) == 2
    hvd.init()
    assert hvd.size() == 2
    print("done", flush=True)
    """
    run(tmp_path, program).must_succeed("done")


@jobs.NEEDS_HOROVOD
@pytest.mark.parametrize("first", ["horovod", "hvd_ext"])
def test_mpi_that_horovod_uses_is_shared_whichever_of_its_launchers_started_the_job(first: str, tmp_path: Path) -> None:
    start = "import horovod.tensorflow as horovod; horovod.init()"
    check = "assert horovod.allreduce(x, op=horovod.Sum, name='x').numpy().tolist() == [total, 2 * total]"
    before, after = (start, check) if first == "horovod" else ("", f"{start}; {check}")
    program = WITH_TENSORFLOW.replace("FIRST", before).replace("LAST", after)
    launcher = jobs.MPIRUN if first == "horovod" else jobs.HORVODRUN
    run(tmp_path, program, launcher=launcher).must_succeed("done")
