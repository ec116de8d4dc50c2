"""How an element of a data set becomes the components of a record, and records become a batch of elements.

A tensor whose shape is known is a component as it is: numbers as their bytes, strings one by one. Tensors of varying
shape, ragged and sparse ones are components of one string for each of their dense parts, serialised by TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import InvalidError

# The op that compares the shape of a tensor whose rank `load` does not tell; TensorFlow's message has this name.
FIRST_SHAPE = "shape_of_the_first_sample"


@dataclasses.dataclass(frozen=True)
class _Part:
    """A tensor, or a ragged or sparse one, of an element.

    Args:
        spec: its `TypeSpec`.
        first: the place of its first component.
        count: the number of its components.
    """

    spec: Any
    first: int
    count: int

    @property
    def fixed(self) -> bool:
        return isinstance(self.spec, tf.TensorSpec) and self.spec.shape.is_fully_defined()


class Elements:
    """The elements of one structure.

    Attributes:
        spec: the nest of `TypeSpec` of an element.
        dtypes: of the components of its records.
        counts: how many numbers or strings of each component an element has.
    """

    def __init__(self, spec: Any, what: str, padding: Any = None) -> None:
        """Lay the records of such elements out.

        Args:
            spec: the nest of `TypeSpec` of an element.
            what: whose elements they are, for messages.
            padding: None: tensors of varying shape become ragged batches. Else the value with which they are padded to
                the largest of a batch: one for all, or a nest of values as `tf.data.Dataset.padded_batch` takes it.

        Raises:
            InvalidError: an element holds something that is no tensor of a known rank.
        """
        self.spec, self._padding = spec, padding
        self.dtypes: list[tf.DType] = []
        self.counts: list[int] = []
        self._parts: list[_Part] = []
        for inner in tf.nest.flatten(spec):
            _check(inner, what)
            part = _Part(inner, len(self.dtypes), len(tf.nest.flatten(inner, expand_composites=True)))
            self.dtypes += [inner.dtype] if part.fixed else [tf.string] * part.count
            self.counts += [math.prod(inner.shape)] if part.fixed else [1] * part.count
            self._parts.append(part)

    def described(self) -> list[str]:
        """Describe the structure and the parts of an element, for comparisons."""
        structure = tf.nest.map_structure(lambda _: None, self.spec)
        return [repr(structure), *(repr(part.spec) for part in self._parts)]

    def components(self, element: Any) -> list[tf.Tensor]:
        """Take an element apart, in a graph.

        Args:
            element: a nest of tensors as `spec` has it.

        Returns:
            A vector for each component.
        """
        components: list[tf.Tensor] = []
        for part, value in zip(self._parts, tf.nest.flatten(element), strict=True):
            if part.fixed:
                if value.shape.rank is None:
                    value = tf.ensure_shape(value, part.spec.shape, FIRST_SHAPE)
                components.append(tf.reshape(value, [self.counts[part.first]]))
            else:
                inner = tf.nest.flatten(value, expand_composites=True)
                components += [tf.reshape(tf.io.serialize_tensor(dense), [1]) for dense in inner]
        return components

    def records(self, rows: Sequence[np.ndarray[Any, Any]]) -> tuple[bytes, np.ndarray[Any, Any]]:
        """Give the records of some elements, as tf_ops/ops/data/cache.cc has them.

        Args:
            rows: for each component its values, [n, count].

        Returns:
            The records, one after the other, and the bytes of each, int64 [n].
        """
        count = len(rows[0]) if rows else 0
        if tf.string not in self.dtypes:
            columns = [np.ascontiguousarray(row).view(np.uint8).reshape(count, -1) for row in rows if row.size]
            joined = columns[0] if len(columns) == 1 else np.concatenate([np.zeros((count, 0), np.uint8), *columns], 1)
            return joined.tobytes(), np.full(count, joined.shape[1], np.int64)
        records = [b"".join(_bytes_of(row[place]) for row in rows) for place in range(count)]
        return b"".join(records), np.array([len(record) for record in records], np.int64)

    def element(self, components: Sequence[tf.Tensor]) -> Any:
        """Make an element of its components, in a graph.

        Args:
            components: a vector for each of them.

        Returns:
            The element, a nest as `spec` has it.
        """
        values: list[Any] = []
        for part in self._parts:
            if part.fixed:
                values.append(tf.reshape(components[part.first], part.spec.shape))
            else:
                texts = tuple(components[part.first + index][0] for index in range(part.count))
                values.append(_parsed([part], [texts])[0])
        return tf.nest.pack_sequence_as(self.spec, values)

    def batch(self, rows: Sequence[tf.Tensor], number: int | None) -> Any:
        """Make a batch of elements of components, in a graph.

        Args:
            rows: for each component its values, [n, count].
            number: n, where it is known.

        Returns:
            The batch, a nest as `spec` has it.
        """

        def fixed(part: _Part) -> tf.Tensor:
            first = tf.shape(rows[part.first])[0] if number is None else number  # elements may have no values
            shape = part.spec.shape
            return tf.ensure_shape(tf.reshape(rows[part.first], [first, *shape]), [number, *shape])

        def varying(places: list[int]) -> tuple[Any, ...]:
            strings = [
                tuple(tf.reshape(rows[part.first + index], [-1]) for index in range(part.count))
                for part in (self._parts[place] for place in places)
            ]
            batched = self._batched(strings, places, tf.shape(strings[0][0], tf.int64)[0])
            values: tuple[Any, ...] = batched.get_single_element()
            for value in values:
                if number is not None and isinstance(value, tf.Tensor):
                    value.set_shape([number, *value.shape[1:]])
            return values

        return self._packed(fixed, varying)

    def _packed(self, fixed: Callable[[_Part], Any], varying: Callable[[list[int]], Iterable[Any]]) -> Any:
        """Make a nest of what `fixed` gives for each part, and `varying` for the places of all others at once."""
        places = [place for place, part in enumerate(self._parts) if not part.fixed]
        values = iter(varying(places) if places else ())
        return tf.nest.pack_sequence_as(
            self.spec, [fixed(part) if part.fixed else next(values) for part in self._parts]
        )

    def _batched(
        self, strings: Sequence[tuple[tf.Tensor, ...]], places: list[int], number: Any, drop_remainder: bool = False
    ) -> tf.data.Dataset:
        """Batch tensors of varying shape.

        Args:
            strings: for each of them its serialised dense parts, string [n].
            places: of them among the parts of an element.
            number: of elements in a batch.
            drop_remainder: drop a smaller batch, so that number is known.
        """
        parts = [self._parts[place] for place in places]
        data = tf.data.Dataset.from_tensor_slices(tuple(strings)).map(lambda *texts: _parsed(parts, texts))
        if self._padding is None:
            return data.ragged_batch(number, drop_remainder=drop_remainder)
        padding, count = self._padding, len(self._parts)
        values = tf.nest.flatten(padding) if tf.nest.is_nested(padding) else [padding] * count
        if len(values) != count:
            raise InvalidError(
                f"padding ({padding!r}): must be one value, or one for each of the {count} parts of an element"
            )
        return data.padded_batch(
            number,
            padding_values=tuple(
                tf.cast(value, self._parts[place].spec.dtype)
                if self._parts[place].spec.dtype != tf.string
                else tf.constant(value if isinstance(value, str | bytes) else "")
                for value, place in ((values[place], place) for place in places)
            ),
            drop_remainder=drop_remainder,
        )

    def batch_spec(self, number: int | None) -> Any:
        """Give the spec of a batch.

        Args:
            number: of its elements; None where it varies.
        """

        def fixed(part: _Part) -> tf.TensorSpec:
            return tf.TensorSpec([number, *part.spec.shape], part.spec.dtype)

        def varying(places: list[int]) -> Any:
            blank = [(tf.constant([""]),) * self._parts[place].count for place in places]
            return self._batched(blank, places, number or 1, number is not None).element_spec

        return self._packed(fixed, varying)


def _check(spec: Any, what: str) -> None:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank is None:
        raise InvalidError(f"{what} ({spec}): must give tensors of a known rank; use tensor.set_shape(...)")
    kinds = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec
    if not isinstance(spec, kinds) or spec.dtype in (tf.variant, tf.resource):
        raise InvalidError(f"{what} ({spec}): must give tensors, ragged tensors or sparse tensors")


def _bytes_of(row: np.ndarray[Any, Any]) -> bytes:
    if row.dtype != object:
        return row.tobytes()
    return b"".join(len(text).to_bytes(4, sys.byteorder) + text for text in row)


def _parsed(parts: Sequence[_Part], texts: Sequence[Sequence[tf.Tensor]]) -> tuple[Any, ...]:
    """Make the tensors of their serialised dense parts again."""
    values: list[Any] = []
    for part, inner in zip(parts, texts, strict=True):
        specs = tf.nest.flatten(part.spec, expand_composites=True)
        dense = [
            tf.ensure_shape(tf.io.parse_tensor(text, spec.dtype), spec.shape)
            for text, spec in zip(inner, specs, strict=True)
        ]
        values.append(tf.nest.pack_sequence_as(part.spec, dense, expand_composites=True))
    return tuple(values)
