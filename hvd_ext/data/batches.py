"""Data that come in batches: a rank's part of a `PyDataset` or a generator, and which data sets are in batches."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_SINGLE = ("RangeDataset", "TensorSliceDataset")

# Held while an epoch begins, also by a fork: a worker process has the order of before or of after, and none between.
_beginning = threading.RLock()
os.register_at_fork(before=_beginning.acquire, after_in_parent=_beginning.release, after_in_child=_beginning.release)


def is_batched(data: tf.data.Dataset) -> bool | None:
    """Tell whether the elements of a data set are batches, by how it was made, and by the shapes of its elements.

    Returns:
        None where neither tells, as after `from_generator`.
    """
    batched = _made_of_batches(data)
    ranks = [getattr(getattr(spec, "shape", None), "rank", None) for spec in tf.nest.flatten(data.element_spec)]
    return False if batched is None and 0 in ranks else batched


def is_py_dataset(data: Any) -> bool:
    """Tell whether data are a `keras.utils.PyDataset` (`Sequence`), or a `Sequence` of tf_keras."""
    return isinstance(data, (keras.utils.PyDataset, *_old_sequence()))


def number_of_batches(data: Any) -> int:
    """Give the number of batches of a `PyDataset` or `Sequence` in an epoch, -1 for infinitely many."""
    number = data.num_batches if isinstance(data, keras.utils.PyDataset) else len(data)
    return -1 if number is None else int(number)


def part_of(data: Any, first: int, stride: int, number: int) -> Any:
    """Give a part of a `PyDataset` or `Sequence`: the batches first, first + stride, first + 2 * stride and so on.

    Args:
        data: the whole.
        first: the index of the part's first batch.
        stride: the distance from one of its batches to the next.
        number: the number of its batches in an epoch, -1 for infinitely many. After the last batch of the whole comes
            its first again.

    Returns:
        An object of the same kind, with the same workers, which passes begins and ends of epochs on to the whole.
    """
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetPart(data, first, stride, number)
    return _sequence_part()(data, first, stride, number)


def part_of_items(items: Iterator[Any], index: int, size: int, full: bool) -> Iterator[Any]:
    """Yield an item of each group of items.

    Args:
        items: a generator, read to its end.
        index: which item of a group, from 0.
        size: the number of items in a group.
        full: drop the items of a last, smaller group, so that all ranks get equally many.
    """
    if not full:
        yield from itertools.islice(items, index, None, size)
        return
    while len(group := list(itertools.islice(items, size))) == size:
        yield group[index]


class _Part:
    def _take(self, data: Any, first: int, stride: int, number: int) -> None:
        self._data, self._first, self._stride, self._number = data, first, stride, number
        self._whole = number_of_batches(data)

    def __len__(self) -> int:
        if self._number < 0:
            raise NotImplementedError("it has infinitely many batches")
        return self._number

    def __getitem__(self, index: int) -> Any:
        index = self._first + index * self._stride
        return self._data[index if self._whole < 0 else index % self._whole]

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


class PyDatasetPart(_Part, keras.utils.PyDataset):
    """A rank's part of a `keras.utils.PyDataset`; the arguments are those of `part_of`.

    Keras starts the workers before it calls `on_epoch_begin`. A worker that is faster would fetch the first batches in
    the order of the epoch before, on one rank and not on another. So the first worker that fetches begins the epoch.
    """

    def __init__(self, data: keras.utils.PyDataset, first: int, stride: int, number: int) -> None:
        super().__init__(
            workers=data.workers, use_multiprocessing=data.use_multiprocessing, max_queue_size=data.max_queue_size
        )
        self._take(data, first, stride, number)
        self._process = os.getpid()
        self._begun = False  # since the end of the epoch before
        self._ahead = False  # a worker has begun the epoch, and Keras will do so

    def __getitem__(self, index: int) -> Any:
        if not self._begun and self._in_worker():
            with _beginning:
                if not self._begun:
                    self._data.on_epoch_begin()
                    self._begun = self._ahead = True
        return super().__getitem__(index)

    def _in_worker(self) -> bool:
        several = self.workers > 1 or self.use_multiprocessing
        here = os.getpid() == self._process and threading.current_thread() is threading.main_thread()
        return several and not here

    def on_epoch_begin(self) -> None:
        """Pass the begin of an epoch on to the whole, unless a worker has done so."""
        with _beginning:
            if not self._ahead:
                self._data.on_epoch_begin()
            self._begun, self._ahead = True, False

    def on_epoch_end(self) -> None:
        """Pass the end of an epoch on to the whole."""
        self._begun = self._ahead = False
        super().on_epoch_end()

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None for infinitely many."""
        return None if self._number < 0 else self._number


@functools.cache
def _sequence_part() -> Any:
    def init(self: Any, data: Any, first: int, stride: int, number: int) -> None:
        self._take(data, first, stride, number)

    return type("SequencePart", (_Part, *_old_sequence()), {"__init__": init})


def _old_sequence() -> tuple[type, ...]:
    tf_keras = sys.modules.get("tf_keras")
    return () if tf_keras is None else (tf_keras.utils.Sequence,)


def _made_of_batches(data: Any) -> bool | None:
    name = type(data).__name__.lstrip("_")
    if name.endswith("BatchDataset"):
        return True
    if name == "UnbatchDataset" or name in _SINGLE:
        return False
    if name.startswith(("FlatMap", "Interleave", "ParallelInterleave", "Window", "GroupBy")):
        return None  # what its function makes
    batched = [_made_of_batches(source) for source in data._inputs()]
    return True if True in batched else None if None in batched or not batched else False
