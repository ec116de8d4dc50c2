"""One rank that measures LARS: `LAUNCHER python -m benchmarks.studies.lars.worker TASK`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_ext.bench.sampling import EVENTS, Argument, emit
from hvd_ext.planning.models import convolutional, transformers

MODELS = {"resnet50": convolutional.resnet50, "transformer": transformers.bert_base}
# The parts of the benchmark and what is measured in each, in the order in which it is shown.
NORMS, UPDATE, LAMB, PTO = "norms", "update", "lamb", "pto"
CONTESTANTS = {
    NORMS: ("read", "ours", "l2_loss", "norm"),
    UPDATE: ("ours", "ops", "sgd"),
    LAMB: ("ours", "ops", "keras"),
    PTO: ("alone", "together", "auto"),
}
# Calls before the first sample; a trial of both ways ends with its tenth.
WARM, WARM_AUTO = 3, 12


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What the ranks of a job are told.

    Attributes:
        folder: where rank 0 writes the events.
        models: keys of `MODELS`.
        parts: keys of `CONTESTANTS`; the norms and the update are measured on all ranks at once.
        repetitions: samples of each row, in turns.
        calls: calls of a sample.
        threads: of each rank.
    """

    folder: str
    models: tuple[str, ...]
    parts: tuple[str, ...]
    repetitions: int
    calls: int
    threads: int


class Bench:
    """The tensors of a model, equal on all ranks, and what is done with them."""

    def __init__(self, model: str, threads: int) -> None:
        """Make weights and gradients.

        Args:
            model: a key of `MODELS`.
            threads: of the reading pass.
        """
        import keras
        import tensorflow as tf

        named = [tensor for layer in MODELS[model]() for tensor in layer.tensors]
        random = np.random.default_rng(0)
        self._threads = threads
        self.elements = sum(elements for _, elements in named)
        self.tensors = len(named)
        self._weights = [
            keras.Variable(0.05 * random.standard_normal(elements, np.float32), name=name.replace("/", "_"))
            for name, elements in named
        ]
        self._gradients = [tf.constant(0.01 * random.standard_normal(elements, np.float32)) for _, elements in named]
        self._bytes = np.ones(2 * self.elements, np.float32)  # as many as weights and gradients have

    def calls(self, part: str) -> dict[str, Callable[[], Any]]:
        """Give what is measured in a part, by name."""
        return {name: getattr(self, f"_{part}_{name}")() for name in CONTESTANTS[part]}

    def _both(self) -> list[Any]:
        import tensorflow as tf

        return [*(tf.convert_to_tensor(one) for one in self._weights), *self._gradients]

    def _norms_read(self) -> Callable[[], Any]:
        from benchmarks.studies.topk.functions import read_pass

        return lambda: read_pass(self._bytes, self._threads)

    def _norms_ours(self) -> Callable[[], Any]:
        from hvd_ext.tensorflow import norms

        return _traced(lambda: norms.squares(self._both()))

    def _norms_l2_loss(self) -> Callable[[], Any]:
        import tensorflow as tf

        return _traced(lambda: tf.stack([tf.nn.l2_loss(one) for one in self._both()]))

    def _norms_norm(self) -> Callable[[], Any]:
        import tensorflow as tf

        return _traced(lambda: tf.stack([tf.norm(one) for one in self._both()]))

    def _update_ours(self) -> Callable[[], Any]:
        import hvd_ext as hvd

        return self._update(hvd.optimizers.LARS(0.1, weight_decay=1e-4))

    def _update_ops(self) -> Callable[[], Any]:
        import hvd_ext as hvd

        return self._in_operations(hvd.optimizers.LARS(0.1, weight_decay=1e-4))

    def _lamb_ours(self) -> Callable[[], Any]:
        import hvd_ext as hvd

        return self._update(hvd.optimizers.LAMB(1e-3, weight_decay=1e-2))

    def _lamb_ops(self) -> Callable[[], Any]:
        import hvd_ext as hvd

        return self._in_operations(hvd.optimizers.LAMB(1e-3, weight_decay=1e-2))

    def _lamb_keras(self) -> Callable[[], Any]:
        import keras

        return self._update(keras.optimizers.Lamb(1e-3, weight_decay=1e-2))

    def _in_operations(self, optimizer: Any) -> Callable[[], Any]:
        from hvd_ext.tensorflow import norms

        found, norms.device_of = norms.device_of, lambda variables: None
        try:
            return self._update(optimizer)
        finally:
            norms.device_of = found

    def _update_sgd(self) -> Callable[[], Any]:
        import keras

        return self._update(keras.optimizers.SGD(1e-3, momentum=0.9))

    def _update(self, optimizer: Any) -> Callable[[], Any]:
        optimizer.build(self._weights)
        call = _traced(lambda: optimizer.apply(self._gradients, self._weights))
        call()
        return call

    def _pto_alone(self) -> Callable[[], Any]:
        return self._norms_ours()

    def _pto_together(self) -> Callable[[], Any]:
        import tensorflow as tf

        from hvd_ext.job import runtime
        from hvd_ext.tensorflow import norms

        def call() -> Any:
            graph = tf.compat.v1.get_default_graph()
            tensors = [tensor if tf.is_symbolic_tensor(tensor) else graph.capture(tensor) for tensor in self._both()]
            squares = norms.divided_squares(tensors, runtime.current(), "bench: together")
            with tf.control_dependencies(tensors):  # all are inputs, as in the other ways and in an update
                return tf.identity(squares)

        return _traced(call)

    def _pto_auto(self) -> Callable[[], Any]:
        from hvd_ext.job import runtime
        from hvd_ext.tensorflow import norms, sharing

        self.trial = sharing.Trial()

        def call() -> Any:
            job, both = runtime.current(), self._both()
            return self.trial.run(
                both,
                lambda divided: norms.divided_squares(both, job, "bench: auto", divided=divided),
                lambda times: sharing.maximum(job, "bench: times", times),
            )

        return _traced(call)


def measured(task: Task) -> Iterator[dict[str, Any]]:
    """Measure; all ranks do so in step.

    Yields:
        A row for each contestant: seconds_samples of the slowest rank, and cpu_samples of all ranks together, for one
        call.
    """
    import hvd_ext as hvd
    from hvd_ext.job import runtime

    hosts = runtime.current().hosts
    place = {
        "ranks": hvd.size(),
        "ranks_per_host": [hosts.count(host) for host in dict.fromkeys(hosts)],
        "threads": task.threads,
    }
    for model in task.models:
        bench = Bench(model, task.threads)
        for part in task.parts:
            if part == LAMB and hvd.size() > 1:
                continue  # each rank would do the same, with six arrays of the size of the model
            calls = bench.calls(part)
            for name, call in calls.items():
                for _ in range(WARM_AUTO if name == "auto" else WARM):
                    call()
            samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for turn in range(task.repetitions):
                names = list(calls)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    hvd.barrier()
                    begin, cpu = time.perf_counter(), time.process_time()
                    for _ in range(task.calls):
                        calls[name]()
                    own = (time.perf_counter() - begin, time.process_time() - cpu)
                    every = hvd.allgather_object(own)
                    slowest, together = max(one[0] for one in every), sum(one[1] for one in every)
                    samples[name].append((slowest / task.calls, together / task.calls))
            for name, found in samples.items():
                yield {
                    **place,
                    "model": model,
                    "tensors": bench.tensors,
                    "elements": bench.elements,
                    "part": part,
                    "contestant": name,
                    "chosen": ("alone", "together")[int(bench.trial.chosen)] if name == "auto" else None,
                    "seconds_samples": [one[0] for one in found],
                    "cpu_samples": [one[1] for one in found],
                }
            del calls  # and the slots of its optimizers


def _traced(function: Callable[[], Any]) -> Callable[[], Any]:
    import tensorflow as tf

    traced = tf.function(function, autograph=False)

    def call() -> Any:
        result = traced()
        return None if result is None else result.numpy()  # a result is there when its function has ended

    return call


def main(text: str) -> None:
    """Measure what the parent has written, and tell it the rows."""
    task = Task.read(text)
    import hvd_ext as hvd

    hvd.init()
    for row in measured(task):
        if hvd.rank() == 0:
            emit(Path(task.folder) / EVENTS, "row", row=row)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
