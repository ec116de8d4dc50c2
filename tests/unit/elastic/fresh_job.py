"""A training with dense layers, Adam and shuffled data: `fresh_job.py FOLDER EPOCHS`; worker 2 dies before update 35.

At its end each worker writes a digest of its weights and slots to FOLDER/log.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import hvd_ext as hvd
from hvd_ext.job import membership

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
x = np.random.default_rng(3).random((240, 4), np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))


class Dies(keras.callbacks.Callback):
    """Ends worker 2."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Die before update 35."""
        session = membership.session()
        if session is not None and session.worker == 2 and int(self.model.optimizer.iterations) == 34:
            os.kill(os.getpid(), signal.SIGKILL)


hvd.init()
keras.utils.set_random_seed(hvd.rank())  # all ranks get the weights of rank 0
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
checkpoint = hvd.callbacks.Checkpoint(folder / "checkpoints", every=None, every_steps=3, keep=1000)
history = model.fit(
    lambda: hvd.shard((x, y), 4, shuffle=True),
    epochs=epochs,
    verbose=0,
    callbacks=hvd.callbacks.synchronized([Dies(), checkpoint], elastic=True),
)
digest = hashlib.sha256()
for variable in (*model.variables, *model.optimizer.variables):
    digest.update(np.asarray(variable.numpy()).tobytes())
end = {"digest": digest.hexdigest(), "size": hvd.size(), "updates": int(model.optimizer.iterations)}
with (folder / "log").open("a") as log:
    log.write(json.dumps({**end, "epochs": history.epoch, "loss": history.history["loss"][-1]}) + "\n")
