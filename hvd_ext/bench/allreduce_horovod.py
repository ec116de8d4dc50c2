"""One rank that measures Horovod: `LAUNCHER python -m hvd_ext.bench.allreduce_horovod FOLDER TASK`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvd_ext.bench.sampling import Contestant, Task, serve, values_of


def contestants(elements: int, hows: Sequence[str]) -> list[Contestant]:
    """Prepare Horovod's ways to sum one float32 buffer: "graph" (inside `tf.function`, as in training) and "eager"."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.constant(values_of(hvd.rank(), elements))
    name = f"bench.{elements}"
    step = tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum, name=name), autograph=False)
    traced = step.get_concrete_function(tensor)
    calls = {"graph": lambda: traced(tensor), "eager": lambda: hvd.allreduce(tensor, op=hvd.Sum, name=name)}
    return [Contestant("horovod", how, calls[how]) for how in hows]


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task."""
    import horovod.tensorflow as hvd

    task = Task.read(text)
    hvd.init()
    serve(lambda elements, _: contestants(elements, task.hows), folder, task.check)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
