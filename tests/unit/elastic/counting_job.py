"""A training that counts how often each sample was trained on: each has a weight of its own, from which each step that
has it takes 1, in whole numbers. `test_fit.py` runs it as a supervised job, and ends and adds workers meanwhile.

    counting_job.py FOLDER SAMPLES EPOCHS PAUSE_S [DENSITY]

With a density the gradients are selected, and one more epoch begins with a step that sends what is left.

While FOLDER/slowly exists, a step takes half a second, so that the training does not end before what a test waits for.

Each worker writes lines of JSON to FOLDER/log: its updates now and then, and at its end all weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import membership
from hvd_ext.keras.checkpoint import model_state

folder, samples, epochs, pause_s = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
BATCH = 4


def note(**values: object) -> None:
    """Adds a line to the log, in one piece."""
    session = membership.session()
    assert session is not None
    values |= {"worker": session.worker, "world": session.world, "pid": os.getpid(), "s": time.time()}
    with (folder / "log").open("ab", buffering=0) as log:
        log.write(json.dumps(values).encode() + b"\n")


def dies(event: str) -> None:
    """Ends this worker if DIES names it and the event, as in "2 3 trains"."""
    session = membership.session()
    *workers, when = os.environ.get("DIES", "").split() or [""]
    if session is not None and when == event and str(session.worker) in workers:
        os.kill(os.getpid(), signal.SIGKILL)


class Progress(keras.callbacks.Callback):
    """Writes how far the training is, and makes it slow enough to be disturbed."""

    before = -1

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Die between two steps, while the others wait in the next one."""
        if int(self.model.optimizer.iterations) == 35 and os.environ.get("DIES", "").endswith("trains"):
            time.sleep(0.5)
            dies("trains")

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note an update."""
        updates = int(self.model.optimizer.iterations)
        if updates != self.before:
            note(updates=updates, rank=hvd.rank(), size=hvd.size())
            time.sleep(0.5 if (folder / "slowly").exists() else pause_s)
        self.before = updates


hvd.init()
# minus the sum over the samples of a step; the sum over the ranks takes 1 from the weight of each sample
inputs = keras.Input((1,), dtype="int64")
weight = keras.layers.Embedding(samples, 1, embeddings_initializer="zeros", name="counts")(inputs)
model = keras.Model(inputs, keras.layers.Flatten()(weight))
compression = {"compression": hvd.TopK(float(sys.argv[5])), "algorithm": "hitopk"} if len(sys.argv) > 5 else {}
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, sparse_as_dense=True, **compression)
cache = hvd.DataCache("numbers", np.arange(samples)[:, None], memory="1MB") if os.environ.get("CACHE") else None
traced_in: set[int] = set()


def loss(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    """Sums up the weights of the samples; notes in which world a function is traced."""
    session = membership.session()
    traced_in.add(-1 if session is None else session.world)
    return tf.reduce_sum(out)


model.compile(optimizer, loss=loss, jit_compile=False)


def data() -> tf.data.Dataset:
    """Gives this rank's samples."""
    session = membership.session()
    if session is not None and session.world > 0:
        dies("joins")
    if cache is not None:
        return cache.dataset(BATCH, shuffle=True, seed=5).map(lambda sample: (sample, tf.zeros((BATCH, 1))))
    numbers = np.arange(samples)[:, None]
    return hvd.shard((numbers, np.zeros((samples, 1), np.float32)), BATCH, shuffle=True, seed=5)


callbacks = [Progress()]
if os.environ.get("CHECKPOINTS"):
    plain = model_state.save

    def save(*arguments: Any) -> str:
        """Saves a model; a worker may die before the rest of the checkpoint is written."""
        name = plain(*arguments)
        dies("saves")
        return name

    model_state.save = save
    callbacks.append(hvd.callbacks.Checkpoint(folder / "checkpoints", every_steps=7))
elastic = hvd.callbacks.Elastic(redundancy=int(os.environ.get("REDUNDANCY", "0")))
history = model.fit(data, epochs=epochs, verbose=0, callbacks=hvd.callbacks.synchronized(callbacks, elastic=elastic))
if compression:
    hvd.flush(optimizer)
if "MORE_EPOCHS" in os.environ and not compression:  # with an optimizer that has slots, which keep whole numbers whole
    before = int(optimizer.iterations)
    optimizer = keras.optimizers.SGD(1.0, momentum=1e-30)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, sparse_as_dense=True)
    model.compile(optimizer, loss=loss, jit_compile=False)
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(before)
if compression or "MORE_EPOCHS" in os.environ:
    more = int(os.environ.get("MORE_EPOCHS", "1"))
    model.fit(data, epochs=more, verbose=0, callbacks=hvd.callbacks.synchronized([Progress()], elastic=True))
counts = (-model.get_layer("counts").get_weights()[0][:, 0]).tolist()
note(
    counts=counts,
    iterations=int(optimizer.iterations),
    size=hvd.size(),
    epochs=len(history.epoch),
    last_loss=history.history["loss"][-1],
    traced_in=sorted(traced_in),
)
