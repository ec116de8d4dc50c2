"""What the tests of sources share: records, and how a cache reads a source."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.data import sources

RECORDS = [bytes([index % 251]) * (index * 37) for index in range(50)]


def read_all(source: sources.Source) -> list[Any]:
    """Read the samples as a cache does: in a graph that captures the index."""
    numbers = tf.data.Dataset.range(source.samples).batch(max(1, source.samples))
    located = numbers.map(source.locate).unbatch()
    # a tuple that says where a sample lies is one argument
    return list(located.map(lambda *parts: source.read(parts if len(parts) > 1 else parts[0])).as_numpy_iterator())
