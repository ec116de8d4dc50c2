"""The steps of each epoch as a data set: which samples this rank takes in each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.data import native
from hvd_ext.data.cursor import MARK, Again, DataCursor
from hvd_ext.data.functions import Functions
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow.ops import plain

# the numbers of `native.EpochSteps`, and the place of an iterator: the step that stands for those that are skipped, and
# the one behind it; the number of steps that are skipped; the first step that is needed, and the one behind the last
_PLACE = 5
_BEGUN = tf.TensorSpec([len(native.EpochSteps._fields) + _PLACE], tf.int64)
# (samples' numbers, int64 [n]; their seeds, int32 [n, 2]; the parts of the order, int64) -> a batch
Read = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Any]


class Steps:
    """The steps of each epoch of some samples, on one rank.

    Attributes:
        number: the number of steps in an epoch, always the same.
        rows: the number of samples in each step, or None where it varies.
        cursor: where the next iterator begins, and how the order is divided.
    """

    def __init__(
        self,
        name: str,
        samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        parts: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        remainder: str = "drop",
        steps: int | None = None,
        drop_remainder: bool = False,
        elements: int | None = None,
    ) -> None:
        """Describe the steps.

        Args:
            name: what messages and checkpoints call the data; the same in a job that goes on.
            samples: the number of samples, at least size unless remainder="uneven".
            batch_size: samples of this rank in a step, from 1.
            rank: of those that share the samples.
            size: how many ranks share them.
            parts: the number of parts of the order; None: size, or what the earlier job had.
            shuffle: whether each epoch has an order of its own.
            seed: of the order and of the samples' seeds; the same on all ranks.
            remainder: as `hvd_ext.shard` takes it.
            steps: the number of steps in an epoch, all of them with full batches; None: those that the samples make.
            drop_remainder: drop a last, smaller batch.
            elements: the number of samples of this rank in an epoch, for samples that are its own (size=1); the first
                ones come again where it has fewer. None: what remainder says.

        Raises:
            InvalidError: parts is not in 1 to samples.
        """
        if parts is not None and not 1 <= parts <= max(1, samples):
            raise InvalidError(f"{name}: parts ({parts!r}): must be a whole number from 1 to {samples}, the samples")
        self._samples, self._batch_size, self._rank, self._size = samples, batch_size, rank, size
        self._shuffle, self._seed, self._drop_remainder = shuffle, seed, drop_remainder
        self._remainder, self._steps, self._elements = remainder, steps, elements
        self.rows = batch_size if steps is not None or drop_remainder else None
        parts = size if parts is None else parts
        self._planned = self._elements_of(parts)
        self.number = self._number_of(self._planned)
        kept = {"samples": samples, "samples of a step": batch_size * size, "seed": seed}
        self.cursor = DataCursor(name, self.number, parts, kept if elements is None else None, rank)
        self.cursor.division = self

    def batches(
        self, read: Read, spec: Any, begin: Callable[[], object] = lambda: None, functions: Functions | None = None
    ) -> tf.data.Dataset:
        """Give a data set of the batches of all steps of an epoch; each iterator is one for the next epoch.

        In place of the batches that are skipped, because an earlier job has trained on them, the first one that is
        needed comes: what runs behind has samples that it can work on, and nothing is read for the others.

        Args:
            read: gives the batch of a step, in a graph.
            spec: `tf.TensorSpec` of a batch, and of each part of it.
            begin: called when an iterator is about to give its first element.
            functions: the Python functions in the graph of `read`.
        """
        functions = Functions() if functions is None else functions

        def begun() -> np.ndarray:
            begin()
            first, skipped, parts = self.cursor.begin()
            elements = self._elements_of(parts)
            if self._number_of(elements) != self.number:  # Keras knows the number of steps already
                elements = self._planned
            again = self.cursor.again or Again(-1, 0, 0)
            left = again.step * self._batch_size + self._left_of(again.position, parts)
            steps = native.EpochSteps(
                *(self.number, self._batch_size, self._steps is not None, self._samples, parts),
                *(self._rank, self._size, self._seed, self._shuffle, elements),
                *(again.epoch, again.step, again.position, left),
            )
            # The last step may be smaller, and random numbers that are drawn behind for each sample would be others.
            like = first + skipped - (skipped == self.number - 1)
            place = (like, like + min(skipped, 1), skipped, first + skipped, first + self.number)
            return np.array([*steps, *place], np.int64)

        begins = functions.weak(begun)

        def start(number: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(begins, [], tf.int64), _BEGUN.shape)

        def of(begun: tf.Tensor) -> tf.data.Dataset:
            numbers = tf.unstack(begun)
            parts = native.EpochSteps(*numbers[:-_PLACE]).parts
            like, behind_like, _, needed, end = numbers[-_PLACE:]
            # not of `unstack`: TensorFlow's optimizer crashes where the number of repetitions is no op's first output
            skipped = begun[2 - _PLACE]

            def batch(step: tf.Tensor) -> Any:
                return tuple(tf.nest.flatten(read(*native.epoch_step(begun, step, self.rows), parts)))

            if _of_tensors(spec):  # traced once for both uses
                batch = _traced(batch, [tf.TensorSpec([], tf.int64)])

            def repeated(*element: Any) -> tf.data.Dataset:
                return _as(spec, tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(element)))).repeat(skipped)

            unneeded = _flat_mapped(_mapped(tf.data.Dataset.range(like, behind_like), batch, spec), repeated, spec)
            return unneeded.concatenate(_mapped(tf.data.Dataset.range(needed, end), batch, spec))

        dataset = _flat_mapped(_mapped(tf.data.Dataset.range(1), start, _BEGUN), of, spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.number))
        setattr(dataset, MARK, self.cursor)
        functions.keep_with(dataset)
        return dataset

    def divide_again(self, epoch: int, position: int, parts: int) -> Again:
        """Divide what is left of an epoch among the ranks, the last steps of the epoch having it.

        Args:
            epoch: from 0.
            position: how many of the epoch's samples are done, on all ranks.
            parts: of the order.
        """
        steps = self._number_of(self._left_of(position, parts))
        return Again(epoch, max(0, self.number - steps), position)

    def position_of(self, epoch: int, step: int) -> int:
        """Give how many samples of an epoch are done on all ranks when so many of its steps are."""
        again = self.cursor.again
        if again is None or again.epoch != epoch:
            again = Again(epoch, 0, 0)
        return min(again.position + max(0, step - again.step) * self._batch_size * self._size, self._samples)

    def _elements_of(self, parts: int) -> int:
        """Give the number of this rank's samples in an epoch."""
        if self._elements is not None:
            return self._elements
        return len(range(self._rank, used(self._samples, parts, self._size, self._remainder), self._size))

    def _left_of(self, position: int, parts: int) -> int:
        """Give the number of this rank's samples in the part of an epoch behind a position."""
        if self._elements is not None:
            return max(0, self._elements - position)
        left = used(self._samples, parts, 1, self._remainder) - position
        return len(range(self._rank, used(max(0, left), 1, self._size, self._remainder), self._size))

    def _number_of(self, elements: int) -> int:
        if self._steps is not None:
            return self._steps
        return elements // self._batch_size if self._drop_remainder else -(-elements // self._batch_size)


def used(samples: int, parts: int, size: int, remainder: str) -> int:
    """Give the number of positions that an epoch uses; those from `samples` on stand for the first ones again.

    Args:
        samples: the number of samples.
        parts: the number of parts.
        size: the number of ranks.
        remainder: "drop", "repeat" or "uneven", as `hvd_ext.shard` takes it.
    """
    if remainder == "uneven":
        return samples
    if remainder == "drop":
        return samples // parts * parts // size * size
    return -(-(-(-samples // parts) * parts) // size) * size


def untuned() -> tf.data.Options:
    """Make options with which TensorFlow tunes nothing.

    Its tuning thread sleeps for longer and longer. An iterator that is dropped wakes it before it says that it has
    ended; where processors are busy the thread looks at once, sleeps on, and the epoch's end waits for seconds.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


def _mapped(dataset: tf.data.Dataset, function: Callable[[tf.Tensor], Any], spec: Any) -> tf.data.Dataset:
    """Map a data set of single tensors; where all results are tensors, without a change of threads.

    TensorFlow runs the ops of a function on other threads than the one that calls it. For a few small ops this costs
    more processor time than the ops. Its public `map` knows no other way, but the op that it makes does.

    Args:
        dataset: the data set.
        function: gives the tensors of spec in a row; it has no control flow. It may be traced already.
        spec: the nest of `TypeSpec` of the results.
    """
    if not _of_tensors(spec):
        return _as(spec, dataset.map(plain(function), num_parallel_calls=tf.data.AUTOTUNE))
    if not isinstance(function, tf.types.experimental.ConcreteFunction):
        function = _traced(function, [dataset.element_spec])
    return _made(
        tf.raw_ops.MapDataset, dataset, function, spec, use_inter_op_parallelism=False, preserve_cardinality=True
    )


def _flat_mapped(dataset: tf.data.Dataset, function: Callable[..., tf.data.Dataset], spec: Any) -> Any:
    """Make a data set of each element of a data set, and give their elements one after the other.

    Args:
        dataset: the data set.
        function: gives a data set; its arguments are the tensors of an element.
        spec: the nest of `TypeSpec` of its elements.
    """
    if not _of_tensors(spec):
        return dataset.flat_map(plain(function))
    specs = tf.nest.flatten(dataset.element_spec)
    traced = _traced(lambda *element: tf.data.experimental.to_variant(function(*element)), specs)
    return _made(tf.raw_ops.FlatMapDataset, dataset, traced, spec)


def _traced(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Trace a function of a data set that runs as it is.

    TensorFlow optimizes other functions for each iterator again: 5 to 10 ms for a few ops, without a gain. It leaves a
    function alone that stays on the device of its data set, and this attribute says so.
    """
    attributes = {"experimental_ints_on_device": True}
    return tf.function(function, autograph=False, experimental_attributes=attributes).get_concrete_function(*specs)


def _made(op: Callable[..., tf.Tensor], dataset: tf.data.Dataset, function: Any, spec: Any, **more: Any) -> Any:
    flat = tf.nest.flatten(spec)
    made = op(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=function.captured_inputs,
        f=function,
        output_types=[part.dtype for part in flat],
        output_shapes=[part.shape for part in flat],
        **more,
    )
    return tf.data.experimental.from_variant(made, spec)


def _of_tensors(spec: Any) -> bool:
    return all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(spec))


def _as(spec: Any, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Give a data set with elements of this structure: tf.data makes tuples of lists, for example."""
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec)
