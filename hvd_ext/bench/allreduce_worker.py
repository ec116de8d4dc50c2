"""One rank that measures all but Horovod: `LAUNCHER python -m hvd_ext.bench.allreduce_worker FOLDER TASK`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ext.bench.results import BASELINES
from hvd_ext.bench.sampling import Contestant, Task, serve, values_of


class Buffers:
    """The ways to sum one float32 buffer, and the channels that they have opened; all ranks use it alike."""

    def __init__(self, hows: Sequence[str]) -> None:
        """Take the ways to call our algorithms.

        They are "graph" (inside `tf.function`, as in training), "engine" (NumPy arrays in and out, no TensorFlow) and
        "eager".
        """
        self._hows = hows
        self._open = ExitStack()

    def contestants(self, elements: int, algorithms: Sequence[str]) -> list[Contestant]:
        """Prepare the contestants for buffers of a length: a no-op for "graph", then each algorithm in each way."""
        from hvd_ext.job import process

        buffer = values_of(process.rank(), elements)
        result = np.empty_like(buffer)  # shared by all contestants, because memory may not hold ten large ones
        contestants: list[Contestant] = []
        tensor: Any = None
        if set(algorithms) - set(BASELINES) and {"graph", "eager"} & set(self._hows):
            import tensorflow as tf

            tensor = tf.constant(buffer)
            contestants += [_noop(tensor)] if "graph" in self._hows else []
        baselines = {"mpi": _mpi, "tcp": self._tcp, "memory": _memory}
        ways: dict[str, Callable[[str], Contestant]] = {
            "graph": lambda algorithm: self._graph(tensor, algorithm),
            "engine": lambda algorithm: self._engine(buffer, result, algorithm),
            "eager": lambda algorithm: _eager(tensor, algorithm),
        }
        for algorithm in algorithms:
            if algorithm in baselines:
                contestants.append(baselines[algorithm](buffer, result))
            else:
                contestants += [ways[how](algorithm) for how in self._hows]
        return contestants

    def release(self) -> None:
        """Close the channels that were opened."""
        self._open.close()

    def _engine(self, buffer: NDArray[np.float32], result: NDArray[np.float32], algorithm: str) -> Contestant:
        from hvd_ext.job import runtime
        from hvd_ext.options import Sum
        from hvd_ext.planning.layout import layout
        from hvd_ext.planning.tensors import Tensor

        job = runtime.current()
        laid_out = layout(job.tree, [Tensor("buffer", (buffer.size,), "float32")], Sum, algorithm=algorithm)
        (bucket,) = laid_out.buckets
        channel = job.open(f"bench {algorithm}", laid_out)
        self._open.callback(job.engine.close_channel, channel)
        step = job.engine.prepare(channel, [buffer], [result])

        def call() -> NDArray[np.float32]:
            step()
            return result

        chosen = (bucket.plan.algorithm, bucket.segment_nbytes)
        return Contestant(algorithm, "engine", call, *chosen, reset=lambda: result.fill(np.nan))

    def _graph(self, tensor: Any, algorithm: str) -> Contestant:
        import tensorflow as tf

        import hvd_ext as hvd
        from hvd_ext.planning.tensors import Tensor
        from hvd_ext.tensorflow.gradients import registration

        elements = int(tensor.shape[0])
        options = hvd.Options(algorithm=algorithm, op=hvd.Sum)
        channel = registration.open_channel(f"bench {algorithm}", [Tensor("buffer", (elements,), "float32")], options)
        self._open.callback(channel.close)
        step = tf.function(lambda gradient: channel.reduce([gradient])[0], autograph=False)
        traced = step.get_concrete_function(tensor)
        (bucket,) = channel.layout.buckets
        return Contestant(algorithm, "graph", lambda: traced(tensor), bucket.plan.algorithm, bucket.segment_nbytes)

    def _tcp(self, buffer: NDArray[np.float32], result: NDArray[np.float32]) -> Contestant:
        from mpi4py import MPI

        from hvd_ext.bench import allreduce_tcp
        from hvd_ext.engine import engine
        from hvd_ext.job import runtime

        addresses = allreduce_tcp.addresses_of(engine.interfaces(runtime.current().options))
        ring, before = allreduce_tcp.connect(MPI.COMM_WORLD, platform.node(), addresses)
        if ring is None:
            return Contestant("tcp", "engine", lambda: buffer, copy_of=before)
        self._open.callback(ring.close)

        def call() -> NDArray[np.float32]:
            ring.exchange(buffer, result)
            return result

        return Contestant("tcp", "engine", call, copy_of=before, reset=lambda: result.fill(np.nan))


def _noop(tensor: Any) -> Contestant:
    import tensorflow as tf

    from hvd_ext.job import process

    traced = tf.function(tf.identity).get_concrete_function(tf.TensorSpec(tensor.shape, tf.float32))
    return Contestant("noop", "graph", lambda: traced(tensor), copy_of=process.rank())


def _mpi(buffer: NDArray[np.float32], result: NDArray[np.float32]) -> Contestant:
    from mpi4py import MPI

    def call() -> NDArray[np.float32]:
        MPI.COMM_WORLD.Allreduce(buffer, result, op=MPI.SUM)
        return result

    return Contestant("mpi", "engine", call, reset=lambda: result.fill(np.nan))


def _memory(buffer: NDArray[np.float32], _: NDArray[np.float32]) -> Contestant:
    from mpi4py import MPI

    from hvd_ext.bench.allreduce_memory import Passes

    passes = Passes(MPI.COMM_WORLD, buffer)
    return Contestant("memory", "engine", passes.call, reset=passes.spoil)


def _eager(tensor: Any, algorithm: str) -> Contestant:
    import hvd_ext as hvd
    from hvd_ext.job import runtime

    nbytes = 4 * int(tensor.shape[0])
    # an eager call takes the plan of its class of sizes
    limit = next((most for most in runtime.SIZE_CLASSES if nbytes <= most), runtime.SIZE_CLASSES[-1])
    prepared = runtime.current().allreduce(limit, algorithm)
    name = f"bench.{algorithm}.{nbytes}"  # the ranks' calls are matched by it

    def call() -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, algorithm=algorithm)

    return Contestant(algorithm, "eager", call, prepared.algorithm, prepared.segment_nbytes)


def _measured() -> str:
    """Give the YAML text of the links that the ranks have measured; empty if they are assumed."""
    from hvd_ext.job import network, runtime
    from hvd_ext.topology import write

    links = runtime.current().network
    return "" if links is None or links.source == network.ASSUMED else write.text(links.tree)


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task."""
    from hvd_ext.job import process

    task = Task.read(text)
    process.init()
    buffers = Buffers(task.hows)
    serve(buffers.contestants, folder, task.check, buffers.release, _measured())
    process.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
