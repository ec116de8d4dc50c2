"""One late rank that trains with Horovod: `LAUNCHER python -m benchmarks.studies.stragglers.horovod FOLDER TASK`."""

from __future__ import annotations

import functools
import sys

from benchmarks.studies.stragglers.worker import Contestant, Hyperplane, Learner, Task, serve


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task."""
    task = Task.read(text)
    task.set_environment()
    import horovod.tensorflow as hvd

    from hvd_ext.bench.training_horovod import reduced

    hvd.init()

    def make(_: str, data: Hyperplane) -> Contestant:
        return Contestant(Learner(data, reduce=functools.partial(reduced, way="grouped")))

    serve(folder, task, make)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
