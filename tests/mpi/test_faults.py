"""A rank that fails, dies, leaves or stays away: the others never hang, and the job's exit code says it.

The limits here are long: what they tell apart is a job that ends by itself from one that waits for ever.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import jobs

# Rank 1 goes down; the others wait in a call that it never makes, and say so if they get out of it in any way.
ONE_GOES = """
    import os, signal, sys
    import hvd_ext as hvd

    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    if hvd.rank() == 1:
        HOW
    hvd.allgather_object("rank 1 never sends this")
    print("went on", flush=True)
"""

WAYS = {
    "an exception": "raise ValueError('told to fail')",
    "an exit code": "sys.exit(3)",
    "an early end": "sys.exit(0)",
    "an early end after shutdown": "hvd.shutdown(); sys.exit(0)",
    "an end without clean-up": "os._exit(0)",
    "a kill": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_goes_down_alone_ends_the_job_with_an_error(way: str, tmp_path: Path) -> None:
    job = jobs.run(tmp_path, ONE_GOES.replace("HOW", WAYS[way]), ranks=3).must_fail()
    assert not any(job.says(rank, "went on") for rank in range(3)), job.text()
    if way == "an exception":
        said = job.outputs[1].splitlines()
        assert "hvd_ext: [rank 1] Traceback (most recent call last):" in said, job.text()
        assert said[-1] == "hvd_ext: [rank 1] ended by ValueError: told to fail", job.text()


def test_an_exception_while_others_are_inside_tensorflow_ends_the_job(tmp_path: Path) -> None:
    program = """
    import tensorflow as tf
    import hvd_ext as hvd

    hvd.init()
    step = tf.function(lambda x: hvd.allreduce(x))
    step(tf.zeros(3))
    if hvd.rank() == 1:
        raise ValueError("told to fail")
    step(tf.zeros(3))
    print("went on", flush=True)
    """
    job = jobs.run(tmp_path, program).must_fail()
    assert "ValueError: told to fail" in job.outputs[1], job.text()
    assert not job.says(0, "went on"), job.text()


def test_an_exception_on_all_ranks_ends_the_job(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, "import hvd_ext as hvd; hvd.init(); raise ValueError(f'rank {hvd.rank()}')").must_fail()
    # The first rank to fail may end the other before it has printed its own words.
    assert any(f"ValueError: rank {rank}" in job.outputs[rank] for rank in range(2)), job.text()


def test_a_rank_that_has_left_is_an_error_in_words_for_those_that_need_it(tmp_path: Path) -> None:
    program = """
    import os, time
    import hvd_ext as hvd
    from hvd_ext.errors import CommunicationError

    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()
        while not os.path.exists("caught"):
            time.sleep(0.05)
    else:
        try:
            hvd.allgather_object("needs rank 1")
        except CommunicationError as error:
            print("caught:", error, flush=True)
        open("caught", "w").close()
        hvd.shutdown()
    """
    job = jobs.run(tmp_path, program)
    assert not job.timed_out, job.text()
    assert "caught: " in job.outputs[0], job.text()
    assert "rank 1 has shut down" in job.outputs[0], job.text()


def test_a_missing_rank_is_named_and_nothing_else_happens(tmp_path: Path) -> None:
    program = """
    import os, pathlib, time
    import hvd_ext as hvd

    hvd.init()
    if hvd.rank() == 1:
        path = pathlib.Path(os.environ["HVD_EXT_TEST_OUTPUT"]) / "rank0.txt"
        while "for rank 1 (" not in path.read_text():
            time.sleep(0.05)
        time.sleep(3)  # two more warnings would be due
    assert hvd.allgather_object(hvd.rank(), name="late one") == [0, 1, 2]
    print("done", flush=True)
    """
    job = jobs.run(tmp_path, program, ranks=3, changes={"HVD_EXT_STALL_WARN_S": "1"}).must_succeed("done")
    # Rank 0 says it, once; an earlier line may name a rank that came a second late, too.
    said = [[line for line in text.splitlines() if "'late one'" in line and "rank 1 (" in line] for text in job.outputs]
    assert [len(lines) for lines in said] == [1, 0, 0], job.text()
    assert said[0][0].startswith("hvd_ext: [rank 0] exchange 'late one' has waited "), job.text()


@pytest.mark.slow
def test_a_rank_may_go_on_alone_long_after_the_others_have_ended(tmp_path: Path) -> None:
    last = """
    import time
    import hvd_ext as hvd

    hvd.init()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    if hvd.rank() == 0:
        time.sleep(5)  # it saves the model: longer than the others wait for the shutdown handshake
        print("saved", flush=True)
    """
    assert jobs.run(tmp_path, last).must_succeed().says(0, "saved")


def test_a_forked_child_cannot_take_part_and_leaves_its_parents_job_alone(tmp_path: Path) -> None:
    program = """
    import os, sys
    import numpy as np
    import hvd_ext as hvd
    from hvd_ext.job import runtime
    from hvd_ext.errors import HvdExtError
    from hvd_ext.planning.layout import layout
    from hvd_ext.planning.tensors import Tensor

    hvd.init()
    job = runtime.current()
    channel = job.open("fork", layout(job.tree, [Tensor("x", (1000,), "float32")], hvd.Sum))
    data = np.full(1000, hvd.rank() + 1, np.float32)
    job.engine.reduce(channel, [data], [data])
    child = os.fork()
    if child == 0:
        code = 7
        try:
            job.engine.reduce(channel, [data], [data])
        except HvdExtError as error:
            code = 0 if "forked from a rank" in str(error) else 8
        sys.exit(code)  # what runs at a child's exit leaves its parent's job alone, too
    assert os.waitpid(child, 0)[1] == 0
    data = np.full(1000, hvd.rank() + 1, np.float32)
    job.engine.reduce(channel, [data], [data])
    np.testing.assert_array_equal(data, np.full(1000, 3, np.float32))
    """
    jobs.run(tmp_path, program).must_succeed()
