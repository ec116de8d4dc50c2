"""`cached`: stands in for `.cache()` of a data set; its elements are stored under their places in it."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.data import fingerprint, native, store
from hvd_ext.data.elements import Elements
from hvd_ext.data.settings import check_whole
from hvd_ext.errors import InvalidError

# Ops that give something else in every pass.
_RANDOM = re.compile(
    r"^(Random(?!Dataset)\w+|Stateful(Uniform|Standard|Random|Truncated)\w*|TruncatedNormal|ParameterizedTruncatedNormal|"
    r"Multinomial|SampleDistortedBoundingBox\w*|Rng(ReadAnd)?Skip\w*)$"
)
# Ops that are random by a seed alone: layers of Keras keep it in a variable, which each call changes.
_SEEDED = re.compile(r"^Stateless(?!If$|While$|Case$)")
_ASSIGNS = re.compile(r"^Assign(Add|Sub)?VariableOp$")
_SHUFFLES = re.compile(r"^(\w*Shuffle\w*Dataset\w*|RandomDataset\w*|SamplingDataset)$")
_IGNORED = 1  # external_state_policy: the graph is only looked at
_MOST = 1 << 20
_LOOKED_UP = 16  # elements at once
_COUNT = struct.Struct("<q")


def cached(
    name: str,
    *,
    memory: int | str | None = "50%",
    disk: str | os.PathLike[str] | None = None,
    disk_limit: int | str | None = None,
    keep: bool = False,
    most: int = _MOST,
    version: str = "",
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Cache the elements of a data set: `dataset.apply(hvd.data.cached("name"))` in place of `dataset.cache()`.

    The first pass takes the elements from the data set and stores them; what was stored stays, whether or not the pass
    comes to its end. Later passes, and with disk or keep later jobs, take from there what is there, and the data set is
    read for the rest only. Where all elements are there it is not run at all.

    The elements must be the same in every pass: a shuffle and random augmentation belong behind the cache. Ranks whose
    data sets are equal share what is on disk or kept; a `hvd_ext.DataCache` shares its memory in every case, and
    divides and shuffles the samples without reading them.

    Args:
        name: as of `hvd_ext.DataCache`.
        memory: as of `hvd_ext.DataCache`; this is memory of this rank alone unless keep=True.
        disk: as of `hvd_ext.DataCache`.
        disk_limit: as of `hvd_ext.DataCache`.
        keep: as of `hvd_ext.DataCache`.
        most: for a data set that does not know its length: how many elements are stored at most; each takes 8 bytes of
            memory, whether it is there or not.
        version: a word of your own; another one starts an empty cache. For what the data set reads: a file that has
            changed under its old name is not noticed.

    Returns:
        A function for `tf.data.Dataset.apply`.

    Raises:
        InvalidError: an argument breaks its rule. When it is applied: the data set shuffles, is random, has no end, or
            has elements that are no tensors.
    """
    store.check_name(name)
    limit = store.nbytes_of(disk_limit, "disk_limit")
    check_whole("most", most, 1)

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        graph = _graph_of(dataset)
        _check(name, dataset, graph)
        known = int(dataset.cardinality())
        if known == tf.data.INFINITE_CARDINALITY:
            raise InvalidError(f"cached {name}: the data set has no end; put the cache in front of repeat()")
        number = None if known < 0 else known
        if number == 0:
            return dataset
        elements = Elements(dataset.element_spec, f"cached {name}: the data set")
        digest = fingerprint.of_parts(fingerprint.of_graph(graph, version), elements.described(), number, most)
        memory_bytes = store.nbytes_of(memory, "memory", store.free_memory)
        opened = store.Store(
            name,
            digest,
            # one more, behind the elements, for their number
            (most if number is None else number) + 1,
            memory_bytes=memory_bytes,
            keep=store.kept_path(name, digest) if keep and memory_bytes else None,
            folder=None if disk is None else store.folder_of(disk, name, digest),
            disk_bytes=limit,
            about={"source": "a tf.data.Dataset", "elements": elements.described(), "fingerprint": digest},
        )
        return _Cached(opened, dataset, elements, number).dataset()

    return apply


class _Cached:
    def __init__(self, opened: store.Store, dataset: tf.data.Dataset, elements: Elements, number: int | None) -> None:
        self._store, self._upstream, self._elements, self._number = opened, dataset, elements, number
        self._most = opened.samples - 1
        self._lock = threading.Lock()
        self._seen = 0  # elements of the longest pass

    def dataset(self) -> tf.data.Dataset:
        """Give the data set that reads what is stored, and then the rest of the other."""

        def of(stored: tf.Tensor, rest: tf.Tensor) -> tf.data.Dataset:
            others = self._upstream.skip(stored).take(rest)
            numbered = tf.data.Dataset.zip((tf.data.Dataset.range(stored, tf.int64.max), others))
            return self._read(stored).concatenate(numbered.map(self._insert)).concatenate(self._ended(rest))

        dataset = tf.data.Dataset.from_tensors(0).map(lambda _: self._state()).flat_map(of)
        if self._number is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._number))
        return dataset

    def _state(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Give how many elements are stored, and how many of the others to read: -1 for all, 0 where none are left."""

        def state() -> np.ndarray[Any, Any]:
            seen = self._store.statistics()
            number = self._number if self._number is not None else self._kept_number()
            records = max(seen["memory_records"], seen["disk_records"]) - (self._kept_number() is not None)
            stored = min(max(0, records), self._most if number is None else number)
            return np.array([stored, 0 if number is not None and stored == number else -1], np.int64)

        values = tf.ensure_shape(tf.numpy_function(state, [], tf.int64), [2])
        return values[0], values[1]

    def _read(self, stored: tf.Tensor) -> tf.data.Dataset:
        elements = self._elements

        def look_up(numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
            stored_rows, missing, pending = native.lookup(self._store.cache, numbers, elements.dtypes, elements.counts)
            left = tf.concat([missing, pending], 0)

            def fetched() -> list[tf.Tensor]:
                rows = tf.numpy_function(self._fetch, [tf.gather(numbers, left)], elements.dtypes)
                return [
                    tf.tensor_scatter_nd_update(all_, left[:, None], tf.ensure_shape(row, [None, count]))
                    for all_, row, count in zip(stored_rows, rows, elements.counts, strict=True)
                ]

            rows = tf.cond(tf.equal(tf.size(left), 0), lambda: stored_rows, fetched)
            return tuple(tf.ensure_shape(row, [None, count]) for row, count in zip(rows, elements.counts, strict=True))

        numbers = tf.data.Dataset.range(stored).batch(_LOOKED_UP)
        return numbers.map(look_up).unbatch().map(lambda *components: elements.element(components))

    def _fetch(self, numbers: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Take elements from the data set again that a place had and has no more, because they were damaged."""
        rows = []
        try:
            for number in numbers.tolist():
                element = next(iter(self._upstream.skip(number).take(1)))
                components = [component[None] for component in self._elements.components(element)]
                native.insert(self._store.cache, tf.constant([number], tf.int64), components)
                rows.append([component.numpy() for component in components])
        finally:
            self._store.release(numbers.tolist())
            self._store.tell_warnings()
        return [np.concatenate(component) for component in zip(*rows, strict=True)]

    def _insert(self, number: tf.Tensor, element: Any) -> Any:
        components = self._elements.components(element)

        def insert() -> tf.Tensor:
            return native.insert(self._store.cache, number[None], [component[None] for component in components])

        stored = tf.cond(number < self._most, insert, lambda: tf.constant(0, tf.int64))
        if self._number is None:
            stored += tf.ensure_shape(tf.numpy_function(self._count, [number], tf.int64), [])
        first, *others = tf.nest.flatten(element, expand_composites=True)
        # Without a result that depends on it TensorFlow would leave the insertion out; this takes row 0 of one row.
        same = tf.gather(first[None], tf.minimum(stored, 0))
        same.set_shape(first.shape)
        return tf.nest.pack_sequence_as(element, [same, *others], expand_composites=True)

    def _count(self, number: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with self._lock:
            self._seen = max(self._seen, int(number) + 1)
        return np.int64(0)

    def _ended(self, rest: tf.Tensor) -> tf.data.Dataset:
        """Give a data set without elements that notes the number of elements at the end of a pass."""

        def end(rest: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            self._store.tell_warnings()
            if rest and self._number is None and self._kept_number() is None:
                seen = self._store.statistics()
                if max(seen["memory_records"], seen["disk_records"]) == self._seen:
                    self._keep_number(self._seen)
            return np.int64(0)

        ended = tf.data.Dataset.from_tensors(rest).map(lambda rest: tf.numpy_function(end, [rest], tf.int64))
        return ended.flat_map(lambda none: self._upstream.take(tf.minimum(tf.reshape(none, []), 0)))

    def _kept_number(self) -> int | None:
        room = ctypes.create_string_buffer(_COUNT.size)
        to = (ctypes.c_void_p * 1)(ctypes.addressof(room))
        number, nbytes = (ctypes.c_int64 * 1)(self._most), (ctypes.c_int64 * 1)()
        native.call(
            "hvd_ext_cache_lookup", self._store.cache, number, 1, 0, to, (ctypes.c_int64 * 1)(_COUNT.size), nbytes
        )
        if nbytes[0] != _COUNT.size:
            self._store.release([self._most])
            return None
        return int(_COUNT.unpack(room.raw)[0])

    def _keep_number(self, value: int) -> None:
        data = _COUNT.pack(value)
        native.call("hvd_ext_cache_insert", self._store.cache, self._most, data, len(data), None)


def _graph_of(dataset: tf.data.Dataset) -> Any:
    from tensorflow.core.framework import graph_pb2

    variant = tf.data.experimental.to_variant(dataset)
    text = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant, external_state_policy=_IGNORED, strip_device_assignment=True
    )
    graph = graph_pb2.GraphDef()
    graph.ParseFromString(text.numpy())
    return graph


def _check(name: str, dataset: tf.data.Dataset, graph: Any) -> None:
    """Refuse a data set whose elements are others in every pass."""
    loose = dataset.options().deterministic is False
    inner = [node for function in graph.library.function for node in function.node_def]
    changes = any(_ASSIGNS.match(node.op) for node in inner)
    for node in (*graph.node, *inner):
        if _SHUFFLES.match(node.op):
            raise InvalidError(
                f"cached {name}: the data set in front of it shuffles ({node.op}), so that each pass would have other "
                "elements at the places of the stored ones; shuffle behind the cache: "
                "dataset.apply(hvd.data.cached(...)).shuffle(...)"
            )
        if _RANDOM.match(node.op) or (changes and _SEEDED.match(node.op)):
            raise InvalidError(
                f"cached {name}: the data set in front of it is random ({node.op}), and the cache would repeat the "
                "first pass for ever; do this behind the cache"
            )
        loose = loose or ("deterministic" in node.attr and node.attr["deterministic"].s == b"false")
    if loose:
        raise InvalidError(
            f"cached {name}: the data set in front of it gives its elements in no fixed order (deterministic=False); "
            "leave that out"
        )
