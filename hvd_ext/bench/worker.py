"""One rank that measures hvd_ext and MPI_Allreduce: `mpirun ... python -m hvd_ext.bench.worker TASK.json`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvd_ext.bench.sampling import Contestant, Task, read_task, run, values_of

_open: list[Any] = []


def contestants(elements: int, task: Task) -> list[Contestant]:
    """Prepare the ways to sum one float32 buffer; all ranks call it together.

    Args:
        elements: length of the buffer.
        task: the algorithms.

    Returns:
        A no-op, MPI_Allreduce, and for each algorithm a channel, as the optimizer uses it inside `tf.function`; and the
        eager call with the first algorithm.
    """
    import tensorflow as tf
    from mpi4py import MPI

    import hvd_ext as hvd
    from hvd_ext.tensorflow import registration

    buffer = values_of(hvd.rank(), elements)
    tensor = tf.constant(buffer)
    received = np.empty_like(buffer)

    def mpi() -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(buffer, received, op=MPI.SUM)
        return received

    noop = tf.function(tf.identity).get_concrete_function(tf.TensorSpec([elements], tf.float32))
    found = [Contestant("noop", lambda: noop(tensor), sums=False), Contestant("mpi", mpi)]
    for algorithm in task.algorithms:
        options = hvd.Options(algorithm=algorithm, op=hvd.Sum)
        specs = [registration.GradientSpec("buffer", (elements,), "float32")]
        channel = registration.open(f"bench {algorithm}", specs, options)
        _open.append(channel)
        chosen = channel.chosen.algorithm if channel.chosen else ""
        found.append(Contestant("channel", _reduction(channel, tensor), algorithm, chosen))
    first, name = task.algorithms[0], f"bench.{elements}"
    eager = Contestant("eager", lambda: hvd.allreduce(tensor, op=hvd.Sum, name=name, algorithm=first), first)
    return [*found, eager]


def _reduction(channel: Any, tensor: Any) -> Any:
    import tensorflow as tf

    step = tf.function(lambda gradient: channel.reduce([gradient])[0], autograph=False)
    return lambda: step(tensor)


def _release() -> None:
    while _open:
        _open.pop().close()


def main(path: str) -> None:
    """Measure a task.

    Args:
        path: the task, JSON.
    """
    import hvd_ext as hvd

    hvd.init()
    run(contestants, read_task(path), _release)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
