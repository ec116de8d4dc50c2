"""Measures Horovod beside sparse sums on a rank: `LAUNCHER python -m benchmarks.studies.hitopk.horovod FOLDER TASK`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.studies.hitopk.names import Name
from benchmarks.studies.hitopk.sampling import Gradient, Mass, MassSampler, Watched
from hvd_ext.bench.sampling import Contestant, serve


def contestants(elements: int, names: Sequence[str]) -> list[Contestant]:
    """Prepare a contestant for each name, of "horovod" and "horovod:fp16" (half precision on the wire).

    Gradients of so many elements are summed inside `tf.function`, as in training.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    gradient = Gradient(hvd.rank(), elements)
    tensor = tf.constant(gradient.values)
    found: list[Contestant] = []
    for text in names:
        name = Name.read(text)
        compression = hvd.Compression.fp16 if name.wire else hvd.Compression.none
        label = f"bench.{elements}.{name.wire or 'fp32'}"

        def summed(value: tf.Tensor, label: str = label, compression: object = compression) -> tf.Tensor:
            return hvd.allreduce(value, op=hvd.Sum, name=label, compression=compression)

        traced = tf.function(summed, autograph=False).get_concrete_function(tensor)
        mass = Mass(gradient, exact=not name.wire)
        found.append(Watched(text, "graph", lambda traced=traced: traced(tensor), mass=mass))
    return found


def main(folder: str, _: str) -> None:
    """Serve the parent, which has written the task."""
    import horovod.tensorflow as hvd

    hvd.init()
    serve(contestants, folder, kind=MassSampler)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
