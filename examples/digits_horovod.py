"""The same training with Horovod's allreduce.

horovodrun --mpi -np 4 python examples/digits_horovod.py

With Keras 3 Horovod's own DistributedOptimizer silently trains without synchronising. So a custom training step reduces
the gradients here.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from handwritten import BATCH, EPOCHS, RATE, SEED, Report, digits_of, emit, fingerprint, layers


class HorovodModel(keras.Sequential):
    """A model whose training step averages the gradients over the ranks with Horovod."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Do one step as Keras does, but average the gradients before the update."""
        images, labels = data[0], data[1]
        with tf.GradientTape() as tape:
            predicted = self(images, training=True)
            loss = self.compute_loss(x=images, y=labels, y_pred=predicted)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(images)[0])
        gradients = tape.gradient(loss, self.trainable_variables)
        averaged = hvd.grouped_allreduce(gradients, op=hvd.Average)
        self.optimizer.apply(averaged, self.trainable_variables)
        return self.compute_metrics(images, labels, predicted)


class AverageMetrics(keras.callbacks.Callback):
    """Replaces the metrics of each epoch by their averages over the ranks, because Horovod's callback needs Keras 2."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics in place."""
        for name in sorted(logs or {}):
            logs[name] = float(hvd.allreduce(tf.constant(logs[name], tf.float64), op=hvd.Average, name=name))


def main(epochs: int, report: str | None) -> None:
    """Train the digits.

    Args:
        epochs: passes over the training digits.
        report: the file for the progress; None to print it.
    """
    hvd.init()
    keras.utils.set_random_seed(SEED + hvd.rank())
    train, test = digits_of(hvd.rank(), hvd.size())
    model = HorovodModel(layers())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss, metrics=["accuracy"], jit_compile=False)
    hvd.broadcast_variables([variable.value for variable in model.weights], root_rank=0)
    callbacks = [AverageMetrics()]
    if hvd.rank() == 0:
        callbacks.append(Report(report, test))
    verbose = 2 if hvd.rank() == 0 and report is None else 0
    model.fit(*train, batch_size=BATCH, epochs=epochs, validation_data=test, callbacks=callbacks, verbose=verbose)

    prints = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        emit(report, "end", equal=len(set(prints)) == 1, algorithm="", why="")
        if report is None:
            print(f"weights equal on all {hvd.size()} ranks: {len(set(prints)) == 1}")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train handwritten digits on several ranks with Horovod's allreduce.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--report", help="file for the progress")
    given = parser.parse_args()
    main(given.epochs, given.report)
