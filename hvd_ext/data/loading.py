"""Loads the samples that no place of a cache has, and does what the user wants where one cannot be loaded."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from hvd_ext.data import native
from hvd_ext.data.elements import Elements
from hvd_ext.data.store import Store
from hvd_ext.errors import INTERNAL, INVALID, InvalidError

OnError = Literal["raise", "retry", "replace"]
ON_ERROR = get_args(OnError)
_PAUSE_S = 0.1  # before a sample is tried again; twice as long each time
_OTHERS = 100  # samples that are tried in place of a bad one

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
        load: Callable[[tf.Tensor], Any],
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
            load: gives the element of a number, in a graph.
            place_of: says where a sample lies.
            on_error: what happens if one cannot be loaded.
            retries: how often it is tried again.
            loaded: is called after some samples were loaded.
            threads: how many samples are loaded at the same time.
        """
        self._store, self._elements, self._place_of = store, elements, place_of
        self._on_error, self._retries, self._loaded = on_error, retries, loaded
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "hvd_ext_load") if threads > 1 else None
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(("loaded", "retried", "replaced", "failed", "load_ns"), 0)
        signature = tuple(
            tf.TensorSpec([count], dtype) for dtype, count in zip(elements.dtypes, elements.counts, strict=True)
        )

        def many(numbers: tf.Tensor) -> Any:
            with tf.device("CPU:0"):
                return tf.map_fn(
                    lambda number: tuple(elements.components(load(number))),
                    numbers,
                    fn_output_signature=signature,
                    parallel_iterations=1,  # the threads load side by side
                )

        self._many = tf.function(many).get_concrete_function(tf.TensorSpec([None], tf.int64))
        _loaders[store.cache] = self
        _listen()

    def begin(self) -> None:
        """Note that a pass begins: give back what one that was left in the middle has claimed and will not load."""
        self._store.release()

    def records(self, missing: np.ndarray[Any, Any], pending: np.ndarray[Any, Any], parts: int) -> Any:
        """Give the records of samples that a lookup has not found; `rows` has the arguments and errors.

        Returns:
            See `Elements.records`.
        """
        return self._elements.records(self.rows(missing, pending, parts))

    def rows(self, missing: np.ndarray[Any, Any], pending: np.ndarray[Any, Any], parts: int) -> Rows:
        """Give the rows of samples that a lookup has not found.

        Args:
            missing: numbers that this call loads; it has claimed them.
            pending: numbers that others load.
            parts: of the order; a bad sample is replaced by one of its own part.

        Returns:
            For each component the rows of the missing samples, then those of the pending ones.

        Raises:
            InvalidError: a sample cannot be loaded.
        """
        found = self._load(missing, parts) if len(missing) else None
        if len(pending):
            waited = self._wait(pending, parts)
            found = waited if found is None else [np.concatenate(pair) for pair in zip(found, waited, strict=True)]
        self._store.tell_warnings()
        assert found is not None
        return found

    def _wait(self, numbers: np.ndarray[Any, Any], parts: int) -> Rows:
        rows, missing, _ = self._lookup(numbers, wait=True)
        if len(missing):
            rows = [np.array(one) for one in rows]
            for to, of in zip(rows, self._load(numbers[missing], parts), strict=True):
                to[missing] = of
        return rows

    def _lookup(self, numbers: np.ndarray[Any, Any], wait: bool) -> tuple[Rows, Any, Any]:
        elements = self._elements
        with tf.device("CPU:0"):
            batch, missing, pending = native.lookup(
                self._store.cache, tf.constant(numbers), elements.dtypes, elements.counts, wait=wait
            )
        return [one.numpy() for one in batch], missing.numpy(), pending.numpy()

    def _load(self, numbers: np.ndarray[Any, Any], parts: int) -> Rows:
        """Load samples, each thread a share of them, and this thread the first one."""
        first, *others = np.array_split(numbers, min(self._threads, len(numbers)))
        if self._others is None or not others:
            return self._load_share(first, parts)
        begun = [self._others.submit(self._load_share, share, parts) for share in others]
        try:
            loaded = [self._load_share(first, parts)]
        finally:
            wait(begun)  # nobody shall go on while samples are still being loaded
        loaded += [one.result() for one in begun]
        return [np.concatenate(component) for component in zip(*loaded, strict=True)]

    def _load_share(self, numbers: np.ndarray[Any, Any], parts: int) -> Rows:
        begin = time.perf_counter_ns()
        try:
            with tf.device("CPU:0"):
                values = self._many(tf.constant(numbers))
        except tf.errors.CancelledError:
            self._store.release(numbers.tolist())
            raise
        except tf.errors.OpError:
            rows = self._one_by_one(numbers, parts)
        else:
            self._insert(numbers, values)
            rows = [value.numpy() for value in values]
        self._count("loaded", len(numbers))
        self._count("load_ns", time.perf_counter_ns() - begin)
        self._loaded()
        return rows

    def _insert(self, numbers: np.ndarray[Any, Any], values: Any) -> None:
        with tf.device("CPU:0"):
            native.insert(self._store.cache, tf.constant(numbers), list(values))

    def _one_by_one(self, numbers: np.ndarray[Any, Any], parts: int) -> Rows:
        """Load samples of which at least one is bad."""
        rows: list[Rows] = []
        left = numbers.tolist()
        try:
            while left:
                rows.append(self._one(left[0], parts))
                left.pop(0)
        finally:
            if left:  # nobody shall wait for what will not come
                self._store.release(left)
        return [np.concatenate(component) for component in zip(*rows, strict=True)]

    def _one(self, number: int, parts: int) -> Rows:
        tries = 1 + (self._retries if self._on_error == "retry" else 0)
        for attempt in range(tries):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
                self._count("retried")
            try:
                return self._loaded_and_stored(number)
            except tf.errors.CancelledError:
                raise
            except tf.errors.OpError as error:
                words = _first_line(error)
        self._count("failed")
        self._store.release([number])
        subject = f"cache {self._store.name}: sample {number} ({self._place_of(number)})"
        if self._on_error != "replace":
            often = f" {tries} times" if tries > 1 else ""
            raise InvalidError(
                f"{subject}: it could not be loaded{often}: {words}; mend or remove it, or use on_error='replace', "
                "which takes another sample"
            )
        return self._other(number, parts, f"{subject}: {words}")

    def _other(self, number: int, parts: int, words: str) -> Rows:
        """Give another sample of the same part: the next one that can be loaded, the same on every rank and each time.

        It is not stored under the bad sample's number, which another job may find mended.
        """
        count = len(range(number % parts, self._store.samples, parts))
        place = number // parts
        for step in range(1, min(count, _OTHERS + 1)):
            other = number % parts + (place + step) % count * parts
            try:
                rows = self._found_or_loaded(other)
            except tf.errors.CancelledError:
                raise
            except tf.errors.OpError:
                self._store.release([other])
                continue
            self._count("replaced")
            return rows
        raise InvalidError(
            f"{words}; none of the {min(count - 1, _OTHERS)} samples behind it could be loaded in its place either"
        )

    def _found_or_loaded(self, number: int) -> Rows:
        rows, missing, pending = self._lookup(np.array([number]), wait=False)
        if len(missing):
            return self._loaded_and_stored(number)
        return [one.numpy() for one in self._many(tf.constant([number], tf.int64))] if len(pending) else rows

    def _loaded_and_stored(self, number: int) -> Rows:
        with tf.device("CPU:0"):
            values = self._many(tf.constant([number], tf.int64))
        self._insert(np.array([number]), values)
        return [value.numpy() for value in values]

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number


# the loaders of this process's caches, by their numbers
_loaders: weakref.WeakValueDictionary[int, Loader] = weakref.WeakValueDictionary()


@functools.cache
def _listen() -> Any:
    """Let the ops have samples loaded (tf_ops/cache/absent.h); what is set must live as long as the process."""
    answer = native.LOAD(_answer)
    native.call("hvd_ext_cache_set_load", answer)
    return answer


def _answer(cache: int, numbers: Any, missing: int, pending: int, parts: int, to: int) -> None:
    """Load samples for an op, and give it their records, or the reason why not."""
    try:
        loader = _loaders.get(cache)
        if loader is None:
            raise InvalidError(f"cache ({cache}): it is closed; make it again")
        wanted = np.array(numbers[: missing + pending], np.int64)
        records, nbytes = loader.records(wanted[:missing], wanted[missing:], parts)
        native.call("hvd_ext_cache_give", to, records, nbytes.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
    except BaseException as error:  # an exception would be lost here
        code = INVALID if isinstance(error, InvalidError) else INTERNAL
        native.call("hvd_ext_cache_fail", to, code, f"{type(error).__name__}: {error}".encode())


# Lines of TensorFlow's messages that say where in a graph, and not what.
_WHERE = ("File ", "Detected at node", "Graph execution error", "Traceback", "[[", "^", "~")


def _first_line(error: Exception) -> str:
    """Give what went wrong, without TensorFlow's lists of nodes and files."""
    message = getattr(error, "message", None) or str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(_WHERE)]
    words = (telling or lines or [type(error).__name__])[0]
    return re.sub(r"^\{\{.*?\}\} ", "", words)
