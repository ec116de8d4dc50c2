"""The contestants of the top-k benchmark: our op, and what users have without it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import hvd_ext
from benchmarks.studies.topk import functions
from benchmarks.studies.topk.functions import Answer
from benchmarks.studies.topk.inputs import picks


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to select.

    Attributes:
        name: a key of `topk.NAMES`.
        call: selects once.
        answer: makes values and indices of the result of `call`; None if it has none.
        beside: the yardstick, "pass" or "add".
        promise: "unique": the answer of our contract; "segments": that of every segment; "exact": k elements, of which
            none is smaller than one that was left out; "": none of these.
    """

    name: str
    call: Callable[[], Any]
    answer: Callable[[Any], Answer] | None = None
    beside: str = "pass"
    promise: str = ""


def memory_of(x: tf.Tensor) -> NDArray[np.float32]:
    """Give the memory of an eager tensor on the CPU as an array, without a copy."""
    return np.asarray(memoryview(x))


def as_arrays(found: tuple[tf.Tensor, tf.Tensor]) -> Answer:
    """Give values and indices as arrays."""
    values, indices = found
    return np.asarray(values), np.asarray(indices)


class Bench:
    """The contestants of one input and one k; they share its memory."""

    def __init__(self, x: tf.Tensor, k: int, density: float, offsets: Sequence[int], threads: int) -> None:
        """Take an input.

        Args:
            x: float32 [elements], on the CPU.
            k: how many to select.
            density: the share that is selected from each segment.
            offsets: of the segments.
            threads: of the pass over memory, and of PyTorch.
        """
        self.x, self.k, self.threads = x, k, threads
        self.array = memory_of(x)
        self.offsets, self.segment_picks = list(offsets), picks(density, list(offsets))
        self._sums: NDArray[np.float32] | None = None

    def yardstick(self, beside: str) -> Callable[[], Any]:
        """Give the pass over memory with which a contestant is compared.

        Args:
            beside: "pass": the input is read; "add": it is added to another buffer.
        """
        if beside == "pass":
            return lambda: functions.read_pass(self.array, self.threads)
        if self._sums is None:
            self._sums = self.array.copy()
        sums = self._sums
        return lambda: functions.bare_add(sums, self.array)

    def contestant(self, name: str) -> Contestant:
        """Prepare a contestant, a key of `topk.NAMES`.

        Raises:
            ModuleNotFoundError: it needs PyTorch, which is not installed.
        """
        if name in MODES:
            return Contestant(name, lambda: self.select(mode=name), as_arrays, promise=MODES[name])
        return MAKERS[name](self)

    def select(self, **options: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Call our op eagerly: inside of a large graph it costs less than a `tf.function` for it alone."""
        found: tuple[tf.Tensor, tf.Tensor] = hvd_ext.mstopk(self.x, self.k, **options)
        return found

    def graph(
        self, name: str, function: Callable[[tf.Tensor], Any], promise: str = "", beside: str = "pass"
    ) -> Contestant:
        """Prepare a contestant that calls a function from x to values and indices, in a `tf.function` of its own."""
        traced = tf.function(function, autograph=False)
        return Contestant(name, lambda: traced(self.x), as_arrays, beside, promise)


def _noop(bench: Bench) -> Contestant:
    return Contestant("noop", lambda: tf.identity(bench.x))


def _noop_graph(bench: Bench) -> Contestant:
    return dataclasses.replace(bench.graph("noop-graph", lambda x: (tf.identity(x), x)), answer=None)


def _graph(bench: Bench) -> Contestant:
    return bench.graph("graph", lambda x: hvd_ext.mstopk(x, bench.k), "unique")


def _segments(bench: Bench) -> Contestant:
    lengths = tf.constant([end - begin for begin, end in itertools.pairwise(bench.offsets)], tf.int64)
    k = tf.constant(bench.segment_picks, tf.int64)

    def call() -> Any:
        return hvd_ext.mstopk(bench.x, k, segments=lengths)

    return Contestant("segments", call, as_arrays, promise="segments")


def _threshold(bench: Bench) -> Contestant:
    # such schemes use the threshold of the step before; here it is exact, which favours them
    above = np.partition(np.abs(bench.array), len(bench.array) - bench.k)[len(bench.array) - bench.k]
    return Contestant("threshold", lambda: bench.select(mode="threshold", threshold=float(above)), as_arrays)


def _feedback(bench: Bench) -> Contestant:
    residual = tf.Variable(tf.zeros_like(bench.x))

    def call() -> Any:
        return hvd_ext.topk_error_feedback(residual, bench.x, bench.k)

    return Contestant("feedback", call, as_arrays, "add", "unique")


def _separate(bench: Bench) -> Contestant:
    residual = tf.zeros_like(bench.x)
    left = functions.written(memory_of(residual))

    def call() -> Any:
        functions.bare_add(left, bench.array)
        values, indices = hvd_ext.mstopk(residual, bench.k)
        left[np.asarray(indices)] = 0
        return values, indices

    return Contestant("separate", call, as_arrays, "add", "unique")


def _algorithm1(bench: Bench) -> Contestant:
    return Contestant("algorithm1", functions.Algorithm1(bench.array, bench.k), lambda found: found)


def _algorithm1_tf(bench: Bench) -> Contestant:
    return bench.graph("algorithm1-tf", lambda x: functions.algorithm_1_tf(x, tf.constant(bench.k)))


def _dgc_tf(bench: Bench) -> Contestant:
    return bench.graph("dgc-tf", lambda x: functions.dgc_tf(x, tf.constant(bench.k)))


def _tf(bench: Bench) -> Contestant:
    k = tf.constant(bench.k)
    return Contestant("tf", lambda: functions.top_k_tf(bench.x, k), as_arrays, promise="exact")


def has_torch() -> bool:
    """Say whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _torch(bench: Bench) -> Contestant:
    import torch

    torch.set_num_threads(bench.threads)
    with warnings.catch_warnings():
        # the tensor's memory is not ours to write, and nothing here does
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        x = torch.from_numpy(bench.array)

    def call() -> Any:
        indices = torch.topk(x.abs(), bench.k, sorted=False).indices
        return x[indices], indices

    return Contestant("torch", call, lambda found: (found[0].numpy(), found[1].numpy()), promise="exact")


def _numpy(bench: Bench) -> Contestant:
    rest = len(bench.array) - bench.k

    def call() -> Answer:
        indices = np.argpartition(np.abs(bench.array), rest)[rest:]
        return bench.array[indices], indices

    return Contestant("numpy", call, lambda found: found, promise="exact")


# Modes of our op, with what they promise.
MODES = {"exact": "unique", "mstopk": "", "dgc": "", "random": ""}
MAKERS: dict[str, Callable[[Bench], Contestant]] = {
    "noop": _noop,
    "noop-graph": _noop_graph,
    "graph": _graph,
    "segments": _segments,
    "threshold": _threshold,
    "feedback": _feedback,
    "separate": _separate,
    "algorithm1": _algorithm1,
    "algorithm1-tf": _algorithm1_tf,
    "dgc-tf": _dgc_tf,
    "tf": _tf,
    "torch": _torch,
    "numpy": _numpy,
}
