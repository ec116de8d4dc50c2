"""A training of an elastic job: python training_job.py FOLDER; worker 1 dies in the seventh step, after one commit.

The oldest worker goes on once the successor of worker 1 is there, so that a change follows the failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import membership
from tests import waiting

FOLDER, WORKER = Path(sys.argv[1]), int(os.environ["HVD_EXT_WORKER"])
STEPS, EPOCHS = 12, 3
X = np.arange(256, dtype=np.float32).reshape(64, 4) / 256


def log(**event: Any) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(json.dumps({"worker": WORKER, "rank": hvd.rank(), "size": hvd.size(), **event}) + "\n")


class Dying(keras.callbacks.Callback):
    """Ends worker 1; in the world of one rank, waits for the second one."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Die, or wait."""
        if WORKER == 1 and batch == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.size() == 1:
            session = membership.session()
            assert session is not None
            waiting.until(lambda: session.changed)


hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
state = hvd.elastic.KerasState(model, epoch=0, batch=0)
callbacks = [
    Dying(),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
]


@hvd.elastic.run
def train(state: Any) -> None:
    """Train what is left."""
    log(begin=[state.epoch, state.batch], iterations=int(model.optimizer.iterations))
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shard(hvd.size(), hvd.rank()).repeat().batch(8)
    while state.epoch < EPOCHS:
        model.fit(
            data,
            initial_epoch=state.epoch,
            epochs=state.epoch + 1,
            steps_per_epoch=STEPS - state.batch,
            callbacks=callbacks,
            verbose=0,
        )


train(state)
weights = [weight.tolist() for weight in model.get_weights()]
log(end=[state.epoch, state.batch], iterations=int(model.optimizer.iterations), weights=weights)
