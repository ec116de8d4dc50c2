"""One rank that trains with Horovod: `LAUNCHER python -m hvd_ext.bench.training_horovod FOLDER TASK`.

Horovod's own DistributedOptimizer does not synchronise under Keras 3. So a training step of our own reduces the
gradients, in both ways that Horovod has: all in one group, or each as it becomes ready, so that Horovod's tensor fusion
collects them. The ranks try which way is faster, and that one is measured.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.bench.training_worker import COMPUTE, Task, serve

WAYS = ("separate", "grouped")


def reduced(gradients: Sequence[tf.Tensor], way: str) -> list[tf.Tensor]:
    """Average the gradients of a step over the ranks with Horovod, by "separate" or "grouped" calls."""
    import horovod.tensorflow as hvd

    if way == "grouped":
        return list(hvd.grouped_allreduce(list(gradients), op=hvd.Average, name="grouped"))
    return [
        hvd.allreduce(gradient, op=hvd.Average, name=f"separate.{index}") for index, gradient in enumerate(gradients)
    ]


class HorovodStep:
    """The training step of Keras, for a `keras.Model`; but it averages the gradients before the update."""

    way: str

    def train_step(self: Any, data: Any) -> dict[str, Any]:
        """Train one batch."""
        images, labels = data[0], data[1]
        with tf.GradientTape() as tape:
            predicted = self(images, training=True)
            loss = self.compute_loss(x=images, y=labels, y_pred=predicted, training=True)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(images)[0])
        gradients = reduced(tape.gradient(loss, self.trainable_weights), self.way)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.compute_metrics(images, labels, predicted)


class HorovodModel(HorovodStep, keras.Sequential):
    """A model of layers that trains so."""

    def __init__(self, layers: list[keras.layers.Layer], way: str) -> None:
        """Take the layers and the way to call Horovod."""
        super().__init__(layers)
        self.way = way


def main(folder: str, text: str) -> None:
    """Serve the parent, which has written the task."""
    task = Task.read(text)
    task.set_environment()
    import horovod.tensorflow as hvd

    from hvd_ext.bench.training_model import Learner, batches

    hvd.init()
    data = batches(hvd.rank(), hvd.size(), task.batch)

    def make(algorithm: str) -> dict[str, Learner]:
        if algorithm == COMPUTE:
            return {"": Learner(task.model, task.width, data)}
        # what Horovod tunes is its fusion, which a group does not need
        ways = WAYS[:1] if "HOROVOD_AUTOTUNE" in task.environment else WAYS
        kinds = {way: functools.partial(HorovodModel, way=way) for way in ways}
        return {way: Learner(task.model, task.width, data, kind=kind) for way, kind in kinds.items()}

    serve(folder, make)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
