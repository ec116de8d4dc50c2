"""One rank that measures Horovod: `mpirun ... python -m hvd_ext.bench.horovod_worker TASK.json`."""

from __future__ import annotations

import sys

from hvd_ext.bench.sampling import Contestant, Task, read_task, run, values_of


def contestants(elements: int, task: Task) -> list[Contestant]:
    """Prepare Horovod's ways to sum one float32 buffer: inside `tf.function`, as in training, and eager."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.constant(values_of(hvd.rank(), elements))
    name = f"bench.{elements}"
    step = tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum, name=name), autograph=False)
    return [
        Contestant("horovod graph", lambda: step(tensor)),
        Contestant("horovod eager", lambda: hvd.allreduce(tensor, op=hvd.Sum, name=name)),
    ]


def main(path: str) -> None:
    """Measure a task.

    Args:
        path: the task, JSON.
    """
    import horovod.tensorflow as hvd

    hvd.init()
    run(contestants, read_task(path))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
