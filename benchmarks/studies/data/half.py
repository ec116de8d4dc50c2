"""Room for half of the data: the share of samples of each later epoch that is not loaded again."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.data.goals import HITS, OURS
from benchmarks.studies.data.samples import Numbered
from benchmarks.studies.data.ways import ours
from benchmarks.studies.data.worker import Task, Tell

SAMPLES, BATCH, SIDE = 8192, 128, 96


def measure(task: Task, tell: Tell) -> None:
    """Read one epoch more than there are samples of a figure, and count the calls of `load` in each."""
    import tensorflow as tf

    numbered, count, loaded = Numbered(SIDE), task.count(SAMPLES, BATCH), [0]

    def make(number: Any) -> Any:
        loaded[0] += 1
        return numbered.pictures([int(number)])[0]

    def load(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        picture = tf.numpy_function(make, [number], tf.uint8)
        return tf.ensure_shape(picture, (SIDE, SIDE, 3)), tf.cast(number, tf.int32)

    data_bytes = count * (numbered.nbytes + 4)
    cache = ours(np.arange(count), load, data_bytes // 2)
    data = cache.dataset(batch_size=BATCH, shuffle=True, seed=1)
    facts = {"sample_bytes": numbered.nbytes + 4, "batch": BATCH, "count": count, "memory_bytes": data_bytes // 2}
    for epoch in range(task.repetitions + 1):
        before, wrong = loaded[0], ""
        for pictures, labels in data:
            wrong = wrong or numbered.fault(pictures, labels)
        if epoch:
            tell("later epochs", OURS, HITS, [1 - (loaded[0] - before) / count], **facts, wrong=wrong)
    cache.close()
