"""Loads the samples that no place of a cache has, and does what the user wants where one cannot be loaded."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from hvd_ext.data import native
from hvd_ext.data.elements import FIRST_SHAPE, Elements
from hvd_ext.data.store import Store
from hvd_ext.errors import INTERNAL, INVALID, InvalidError

OnError = Literal["raise", "retry", "replace"]
ON_ERROR = get_args(OnError)
_PAUSE_S = 0.1  # before a sample is tried again; twice as long each time
OTHERS = 100  # samples that are tried in place of a bad one

Rows = list[np.ndarray[Any, Any]]


class Loader:
    """Loads samples, stores them, and waits for those that other processes load.

    Attributes:
        counts: "loaded", "retried", "replaced", "failed": samples; "load_ns": the time of the threads that loaded.
    """

    def __init__(
        self,
        store: Store,
        elements: Elements,
        locate: Callable[[tf.Tensor], Any],
        load: Callable[[Any], Any],
        place_of: Callable[[int], str],
        on_error: OnError,
        retries: int,
        loaded: Callable[[], None],
        threads: int,
    ) -> None:
        """Trace what loads samples.

        Args:
            store: where they are stored.
            elements: how they become records.
            locate: says where the samples of some numbers lie, in a graph: a nest of tensors with a row for each.
            load: gives the element that lies there, of one row of them, in a graph.
            place_of: says where a sample lies.
            on_error: what happens if one cannot be loaded.
            retries: how often it is tried again.
            loaded: is called after some samples were loaded.
            threads: how many samples are loaded at the same time.
        """
        self._store, self._elements, self._place_of = store, elements, place_of
        self._on_error, self._retries, self._loaded = on_error, retries, loaded
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(("loaded", "retried", "replaced", "failed", "load_ns"), 0)

        converted = _converted(load)

        def many(work: tf.Tensor) -> tf.Tensor:
            """Load, store and give samples; work has the load's number, the place of the first one, and the numbers."""
            number, place, numbers = work[0], work[1], work[2:]
            count = tf.size(numbers, tf.int64)

            def load_at(at: tf.Tensor, stored: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                sample, here = tf.nest.map_structure(lambda column: tf.gather(column, at), (numbers, located))
                values = [value[None] for value in elements.components(converted(here))]
                return at + 1, stored + native.insert(store.cache, sample[None], values, number, place + at)

            # `map_fn` would put results together, which costs more than the loop
            with tf.device("CPU:0"):
                located, zero = locate(numbers), tf.constant(0, tf.int64)
                begun = (zero, zero)
                return tf.while_loop(lambda at, _: at < count, load_at, begun, parallel_iterations=threads)[1]

        self._many = tf.function(many, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.int64))
        _loaders[store.cache] = self
        _listen()

    def begin(self) -> None:
        """Note that a pass begins: give back what one that was left in the middle has claimed and will not load."""
        self._store.release()

    def give(self, load: int, missing: np.ndarray[Any, Any], pending: np.ndarray[Any, Any], parts: int) -> None:
        """Give a load (tf_ops/cache/absent.h) the samples that a lookup has not found.

        Args:
            load: its number.
            missing: numbers that this call loads; it has claimed them. They have the first places.
            pending: numbers that others load.
            parts: of the order; a bad sample is replaced by one of its own part.

        Raises:
            InvalidError: a sample cannot be loaded.
        """
        if len(missing):
            self._load(load, missing, parts)
        if len(pending):
            self._wait(load, pending, len(missing), parts)
        self._store.tell_warnings()

    def _wait(self, load: int, numbers: np.ndarray[Any, Any], first: int, parts: int) -> None:
        rows, missing, _ = self._lookup(numbers, wait=True)
        there = np.setdiff1d(np.arange(len(numbers)), missing)
        self._give_rows(load, there + first, [row[there] for row in rows])
        for place in missing.tolist():
            self._load(load, numbers[place : place + 1], parts, first + place)

    def _lookup(self, numbers: np.ndarray[Any, Any], wait: bool) -> tuple[Rows, Any, Any]:
        elements = self._elements
        with tf.device("CPU:0"):
            batch, missing, pending = native.lookup(
                self._store.cache, tf.constant(numbers), elements.dtypes, elements.counts, wait=wait
            )
        return [component.numpy() for component in batch], missing.numpy(), pending.numpy()

    def _give_rows(self, load: int, places: np.ndarray[Any, Any], rows: Rows) -> None:
        if not len(places):
            return
        records, nbytes = self._elements.records(rows)
        at, sizes = (column.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)) for column in (places, nbytes))
        native.call("hvd_ext_cache_give", load, at, len(places), records, sizes)

    def _load(self, load: int, numbers: np.ndarray[Any, Any], parts: int, first: int = 0) -> None:
        """Load samples, store them, and give them to a load from a place of it on."""
        begin = time.perf_counter_ns()
        try:
            self._many(tf.constant(np.concatenate([[load, first], numbers])))
        except tf.errors.CancelledError:
            self._store.release(numbers.tolist())
            raise
        except tf.errors.OpError:
            self._one_by_one(load, numbers, parts, first)
        with self._lock:
            self.counts["loaded"] += len(numbers)
            self.counts["load_ns"] += time.perf_counter_ns() - begin
        self._loaded()

    def _one_by_one(self, load: int, numbers: np.ndarray[Any, Any], parts: int, first: int) -> None:
        """Load samples of which at least one is bad."""
        left = numbers.tolist()
        try:
            while left:
                self._one(load, left[0], parts, first + len(numbers) - len(left))
                left.pop(0)
        finally:
            if left:  # no process shall wait for samples that will not arrive
                self._store.release(left)

    def _one(self, load: int, number: int, parts: int, place: int) -> None:
        tries = 1 + (self._retries if self._on_error == "retry" else 0)
        for attempt in range(tries):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
                self._count("retried")
            try:
                self._many(tf.constant([load, place, number], tf.int64))
                return
            except tf.errors.CancelledError:
                raise
            except tf.errors.OpError as error:
                words = first_line(error)
        self._count("failed")
        self._store.release([number])
        subject = f"cache {self._store.name}: sample {number} ({self._place_of(number)})"
        if self._on_error != "replace":
            often = f" {tries} times" if tries > 1 else ""
            raise InvalidError(
                f"{subject}: it could not be loaded{often}: {words}; mend or remove it, or use on_error='replace', "
                "which takes another sample"
            )
        self._other(load, number, parts, place, f"{subject}: {words}")

    def _other(self, load: int, number: int, parts: int, place: int, words: str) -> None:
        """Give another sample of the same part: the next one that can be loaded, the same on every rank and each time.

        It is not stored under the bad sample's number, which another job may find mended.
        """
        count = len(range(number % parts, self._store.samples, parts))
        at = number // parts
        for step in range(1, min(count, OTHERS + 1)):
            other = number % parts + (at + step) % count * parts
            try:
                rows, missing, pending = self._lookup(np.array([other]), wait=False)
                if len(missing) or len(pending):
                    self._many(tf.constant([load, place, other], tf.int64))
                else:
                    self._give_rows(load, np.array([place]), rows)
            except tf.errors.CancelledError:
                raise
            except tf.errors.OpError:
                self._store.release([other])
                continue
            self._count("replaced")
            return
        raise InvalidError(
            f"{words}; none of the {min(count - 1, OTHERS)} samples behind it could be loaded in its place either"
        )

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


# the loaders of this process's caches, by their numbers
_loaders: weakref.WeakValueDictionary[int, Loader] = weakref.WeakValueDictionary()


@functools.cache
def _listen() -> Any:
    """Let the ops have samples loaded (tf_ops/cache/absent.h); what is set must live as long as the process."""
    answer = native.LOAD(_answer)
    native.call("hvd_ext_cache_set_load", answer)
    return answer


def _answer(cache: int, numbers: Any, missing: int, pending: int, parts: int, load: int) -> None:
    """Give a load of an op its samples, or the reason why not."""
    try:
        loader = _loaders.get(cache)
        if loader is None:
            raise InvalidError(f"cache ({cache}): it is closed; make it again")
        wanted = np.array(numbers[: missing + pending], np.int64)
        loader.give(load, wanted[:missing], wanted[missing:], parts)
    except BaseException as error:  # an exception would be lost here
        code = INVALID if isinstance(error, InvalidError) else INTERNAL
        native.call("hvd_ext_cache_fail", load, code, f"{type(error).__name__}: {error}".encode())


# Lines of TensorFlow's messages that say where in a graph, and not what.
_WHERE = ("File ", "Detected at node", "Graph execution error", "Traceback", "[[", "^", "~")


_UNLIKE = re.compile(r"Shape of tensor \S+ (\[.*?\]) is not compatible with expected shape (\[.*?\])")


def first_line(error: Exception) -> str:
    """Give what went wrong, without TensorFlow's lists of nodes and files.

    Args:
        error: what a load has raised.
    """
    message = getattr(error, "message", None) or str(error)
    unlike = _UNLIKE.search(message)
    if unlike is not None and FIRST_SHAPE in message:
        return (
            f"it has the shape {unlike[1]}, and the first sample {unlike[2]}: a tensor whose rank load does not tell "
            "must have one shape in all samples; for several use tensor.set_shape((None, ...)) in load"
        )
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(_WHERE)]
    words = (telling or lines or [type(error).__name__])[0]
    return re.sub(r"^\{\{.*?\}\} ", "", words)


def _converted(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function have `if` and `for` over tensors, as `Dataset.map` does; loops do not do it for their bodies."""
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.autograph.impl import api

    return api.tf_convert(function, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))  # type: ignore[no-any-return]
