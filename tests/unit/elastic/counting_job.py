"""A training that counts how often each sample was trained on: each has a weight of its own, from which each step that
has it takes 1, in whole numbers. `test_fit.py` runs it as a supervised job, and ends and adds workers meanwhile.

    counting_job.py FOLDER SAMPLES EPOCHS PAUSE_S [DENSITY]

With a density the gradients are selected, and one more epoch begins with a step that sends what is left.

Each worker writes lines of JSON to FOLDER/log: its updates now and then, and at its end all weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.job import membership

folder, samples, epochs, pause_s = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
BATCH = 4


def note(**values: object) -> None:
    """Adds a line to the log, in one piece."""
    session = membership.session()
    assert session is not None
    values |= {"worker": session.worker, "world": session.world, "pid": os.getpid(), "s": time.time()}
    with (folder / "log").open("ab", buffering=0) as log:
        log.write(json.dumps(values).encode() + b"\n")


class Progress(keras.callbacks.Callback):
    """Writes how far the training is, and makes it slow enough to be disturbed."""

    before = -1

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note an update."""
        updates = int(self.model.optimizer.iterations)
        if updates != self.before:
            note(updates=updates, rank=hvd.rank(), size=hvd.size())
            time.sleep(pause_s)
        self.before = updates


hvd.init()
# minus the sum over the samples of a step; the sum over the ranks takes 1 from the weight of each sample
inputs = keras.Input((1,), dtype="int64")
weight = keras.layers.Embedding(samples, 1, embeddings_initializer="zeros", name="counts")(inputs)
model = keras.Model(inputs, keras.layers.Flatten()(weight))
compression = hvd.TopK(float(sys.argv[5])) if len(sys.argv) > 5 else None
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(1.0), op=hvd.Sum, sparse_as_dense=True, compression=compression, algorithm="hitopk"
)
model.compile(optimizer, loss=lambda y, out: tf.reduce_sum(out) / 1.0, jit_compile=False)


def data() -> tf.data.Dataset:
    """Gives this rank's samples."""
    numbers = np.arange(samples)[:, None]
    return hvd.shard((numbers, np.zeros((samples, 1), np.float32)), BATCH, shuffle=True, seed=5)


history = model.fit(data, epochs=epochs, verbose=0, callbacks=hvd.callbacks.synchronized([Progress()], elastic=True))
if compression is not None:
    hvd.flush(optimizer)
    model.fit(data, epochs=1, verbose=0, callbacks=hvd.callbacks.synchronized(elastic=True))
counts = (-model.get_layer("counts").get_weights()[0][:, 0]).tolist()
note(
    counts=counts,
    iterations=int(optimizer.iterations),
    size=hvd.size(),
    epochs=len(history.epoch),
    traced=model.train_function is not None,
)
