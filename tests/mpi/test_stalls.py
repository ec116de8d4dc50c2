"""Every kind of call that waits for a rank is named, with its name and the ranks that are missing."""

from __future__ import annotations

from pathlib import Path

from tests.mpi import jobs

PROGRAM = """
    import os, pathlib, threading, time
    import tensorflow as tf
    import hvd_ext as hvd

    folder = pathlib.Path(os.environ["HVD_EXT_TEST_OUTPUT"])

    def wait_for(words):
        while not all(word in (folder / "rank0.txt").read_text() for word in words):
            time.sleep(0.05)

    hvd.init()
    hvd.allgather_object("all are here")
    x = tf.ones((4, 2))
    rows = tf.IndexedSlices(x, tf.range(4), tf.constant([9, 2], tf.int64))
    v = tf.Variable(1.0)
    traced = tf.function(lambda t: hvd.allreduce(t, name="in a function"))
    calls = {
        "allreduce 'a'": lambda: hvd.allreduce(x, name="a"),
        "allreduce 'in a function'": lambda: traced(x),
        "allreduce of IndexedSlices 'b'": lambda: hvd.allreduce(rows, name="b"),
        "allgather 'c'": lambda: hvd.allgather(x, name="c"),
        "broadcast 'd'": lambda: hvd.broadcast(x, 1, name="d"),
        "reducescatter 'e'": lambda: hvd.reducescatter(x, name="e"),
        "alltoall 'f'": lambda: hvd.alltoall(x, splits=[1, 1, 2], name="f"),
        "barrier 'g'": lambda: hvd.barrier(name="g"),
        "grouped_allreduce 'h'": lambda: hvd.grouped_allreduce([x, rows], name="h"),
        "grouped_allgather 'i'": lambda: hvd.grouped_allgather([x], name="i"),
        "grouped_reducescatter 'j'": lambda: hvd.grouped_reducescatter([x], name="j"),
        "exchange 'k'": lambda: hvd.broadcast_object(1, name="k"),
        "exchange 'l'": lambda: hvd.allgather_object(1, name="l"),
        "exchange 'broadcast_variables'": lambda: hvd.broadcast_variables([v], 0),
        "exchange 'broadcast_ m'": lambda: hvd.broadcast_([v], 0, name="m"),
    }
    for what, call in calls.items():
        if hvd.rank() == 1:
            wait_for([f"{what} has waited", f"for rank 1 (it has not called it)"])
        call()

    # One name in a set on rank 0, in the job on rank 1.
    both = hvd.add_process_set([0, 1])
    in_set = lambda: hvd.allreduce(x, name="one name", process_set=both)
    in_job = lambda: hvd.allreduce(x, name="one name")
    words = [
        "allreduce 'one name' in the process set of ranks 0, 1 has waited",
        "allreduce 'one name' has waited",
        "for ranks 0, 2 (they have not called it)",
    ]
    if hvd.rank() == 0:
        in_set()
        in_job()
    elif hvd.rank() == 1:
        thread = threading.Thread(target=in_job)
        thread.start()
        wait_for(words)
        in_set()
        thread.join()
    else:
        wait_for(words[:1])
        in_job()
    print("done", flush=True)
"""


def test_every_kind_of_call_that_waits_is_named_with_the_missing_rank(tmp_path: Path) -> None:
    job = jobs.run(tmp_path, PROGRAM, ranks=3, changes={"HVD_EXT_STALL_WARN_S": "0.3"}).must_succeed("done")
    waiting = [line for line in job.outputs[0].splitlines() if "in the process set of ranks 0, 1 has waited" in line]
    assert any("for rank 1 (it has not called it)" in line for line in waiting), job.text()
    # Rank 0 has said it for all; a rank that starts much earlier than another says so for itself.
    others = (job.outputs[1] + job.outputs[2]).splitlines()
    assert not [line for line in others if "has waited" in line and "init() has waited" not in line], job.text()


OPPOSITE = """
    import threading, time
    import tensorflow as tf
    import hvd_ext as hvd
    from hvd_ext.planning.tensors import Tensor
    from hvd_ext.tensorflow.gradients import registration

    hvd.init()
    x = tf.ones(8)
    names = ("first", "second")
    channels = [registration.open_channel(name, [Tensor("g", (8,), "float32")]) for name in names]
    steps = [tf.function(lambda g, c=channel: c.reduce([g])[0], autograph=False) for channel in channels]
    for step in steps:
        step(x)
    for turn in range(3):
        threads = [threading.Thread(target=step, args=(x,)) for step in steps]
        for thread in threads if hvd.rank() else reversed(threads):
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join()
    print("done", flush=True)
"""


def test_two_small_steps_in_opposite_order_end_on_one_thread_of_tensorflow(tmp_path: Path) -> None:
    changes = {"TF_NUM_INTEROP_THREADS": "1", "HVD_EXT_STALL_FATAL_S": "10"}
    jobs.run(tmp_path, OPPOSITE, ranks=2, changes=changes).must_succeed("done")
