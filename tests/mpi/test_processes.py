"""Children of ranks, and signals to ranks that wait: refused and ended in words, and never for ever."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.mpi import jobs

# What is tested is a rank as the launcher starts it, and what it starts.
run = functools.partial(jobs.run, forked=False)

# Replaces itself before init(), which is right, and then starts children of all kinds.
CHILDREN = """
    import multiprocessing, os, subprocess, sys

    if "AGAIN" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})
    if "child" in sys.argv:
        os.environ.pop("HVD_EXT_RANK_PROCESS", None)  # as if it were started before init()

    import hvd_ext as hvd
    from hvd_ext.runner import launcher

    def work():
        for call in (hvd.init, hvd.shutdown, lambda: hvd.allgather_object(0)):
            try:
                call()
                print("took part", flush=True)
            except Exception as error:
                print("forked:", error, flush=True)
        print("forked from rank", hvd.rank(), "of", hvd.size(), flush=True)

    hvd.init()
    clean = launcher.job_environment()
    alone = subprocess.run([sys.executable, "-c", "import hvd_ext as h; h.init(); print('alone', h.size())"], env=clean)
    for arguments in (sys.argv, [*sys.argv, "child"]):
        print("subprocess", subprocess.run([sys.executable, *arguments]).returncode, flush=True)
    for method in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
        child.join()
        print(method, child.exitcode, flush=True)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    print("before the pool", flush=True)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(work, range(2))
    print("after the pool", flush=True)
"""

# Rank 0 is interrupted in each wait. Rank 1 makes a call only after that, so that a wait that does not end is a hang.
WAITS = """
    import os, pathlib, signal, sys, threading, time
    import numpy as np, tensorflow as tf, keras
    import hvd_ext as hvd

    hvd.init()
    folder = pathlib.Path(os.environ["HVD_EXT_TEST_OUTPUT"])
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24 + hvd.rank()
    def fit():
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
    fit()
    in_a_function = tf.function(lambda: hvd.allreduce(x[0], name="in a function"))
    class Ended(Exception):
        pass
    def ends(number, frame):
        raise Ended
    noted = []
    WAITS = {
        "object": (lambda: hvd.broadcast_object("x", 0), signal.SIGINT, KeyboardInterrupt),
        "eager": (lambda: hvd.allreduce(x[0], name="eager"), signal.SIGINT, KeyboardInterrupt),
        "barrier": (hvd.barrier, signal.SIGINT, KeyboardInterrupt),
        "raising": (lambda: hvd.allreduce(x[0], name="raising"), signal.SIGTERM, Ended),
        "noting": (lambda: hvd.allreduce(x[0], name="noting"), signal.SIGUSR1, None),
        "function": (in_a_function, signal.SIGINT, KeyboardInterrupt),
        "last": (fit, signal.SIGINT, None),
    }
    signal.signal(signal.SIGTERM, ends)
    signal.signal(signal.SIGUSR1, lambda number, frame: noted.append(number))
    for name, (call, number, error) in WAITS.items():
        if hvd.rank() == 1:
            while not (folder / name).exists():
                time.sleep(0.02)
            call()
            continue
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        if name == "noting":
            threading.Timer(1.5, (folder / name).touch).start()
        try:
            call()
            print("ended:", name, len(noted), flush=True)
        except BaseException as raised:
            if error is None or type(raised) is not error:
                raise
            print("interrupted:", name, raised.__context__, flush=True)
            (folder / name).touch()
"""

START = """
    import os, signal, threading, time
    import hvd_ext as hvd

    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(600)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    hvd.init()
"""


def test_children_of_a_rank_are_refused_in_words_and_the_job_goes_on(tmp_path: Path) -> None:
    job = run(tmp_path, CHILDREN, limit_s=120).must_fail()
    for rank, said in enumerate(job.outputs):
        assert job.says(rank, "alone 1"), job.text()
        assert said.count("subprocess 1") == 2 and said.count("do not call init() in a child of the rank") == 2, (
            job.text()
        )
        assert job.says(rank, "spawn 1") and job.says(rank, "forkserver 1"), job.text()
        assert job.says(rank, "fork 0") and job.says(rank, f"forked from rank {rank} of 2"), job.text()
        assert said.count("forked:") == 3 and "took part" not in said, job.text()
        assert job.says(rank, "before the pool") and "after the pool" not in said, job.text()
        assert 'put init() below `if __name__ == "__main__":`' in said, job.text()
    assert any("ended by KeyboardInterrupt" in said for said in job.outputs), job.text()


def test_signals_take_effect_in_each_wait_and_calls_go_on_after_it(tmp_path: Path) -> None:
    job = run(tmp_path, WAITS, limit_s=150).must_fail()
    for name in ("object", "eager", "barrier", "raising", "function"):
        assert job.says(0, f"interrupted: {name} None"), job.text()
    assert job.says(0, "ended: noting 1"), job.text()
    assert "[rank 0] ended by KeyboardInterrupt" in job.outputs[0], job.text()
    assert "pybind11" not in job.text(), job.text()


def test_ctrl_c_ends_init_while_another_rank_is_missing(tmp_path: Path) -> None:
    job = run(tmp_path, START, limit_s=60).must_fail()
    assert "init() was interrupted (SIGINT) while it waited for the other ranks" in job.outputs[0], job.text()
    assert "rank 1 (local rank 1)" in job.outputs[0], job.text()
