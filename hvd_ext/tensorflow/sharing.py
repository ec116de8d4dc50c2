"""Work that every rank would do alike, divided among the ranks: `pto`, the parallel tensor operator of CommLib.

The ranks divide a list by its costs, compute their shares, and gather the results (MLSys 2021, section 4.2, Eq. 12-14).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config  # there is no public way to ask

from hvd_ext.errors import InvalidError
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.job.runtime import Runtime
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import calls, dtypes, single

# Both ways are tried in turn for so many steps; the first pair is left out, since caches and memory are cold then.
_TRIALS = 5


@ops.plain
def pto(
    function: Callable[[tf.Tensor], Any],
    tensors: Iterable[Any],
    cost: Sequence[float] | Callable[[tf.Tensor], float] | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Apply a function to each tensor of a list that all ranks have alike, each rank to its share; all ranks call it.

    Each tensor goes to one rank as a whole: the most costly first, each to the rank that has least so far. The results
    travel in one collective. It pays where the function costs more than a small message: that of CommLib computes the
    rates of LARS (MLSys 2021, section 4.2, Eq. 12-14), as `hvd_ext.optimizers.LARS(parallel=True)` does. Results are
    not differentiable.

    Args:
        function: gives a tensor for a tensor. The shape of its result must follow from that of its argument. Each call
            traces it once for each shape and dtype.
        tensors: as many as there are on the other ranks, of the same dtypes and known shapes, with the same values.
        cost: what the function costs for each tensor, in any unit: numbers, or a function that gives a number for a
            tensor; None: its number of elements.
        process_set: the ranks that take part; None for all.

    Returns:
        The results in the order of the tensors, the same bits on all ranks.

    Raises:
        InvalidError: an argument breaks its rule, or a result's shape is not known before it has been computed.
        MismatchError: the ranks' lists, costs or results differ in shape or dtype; raised on all ranks.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("pto", None, process_set) as call:
        listed = _listed(function, tensors)
        costs = _costs(listed, cost)
        trace = functools.cache(functools.partial(_traced, function))
        traced = [trace(tf.TensorSpec(tensor.shape, tensor.dtype)) for tensor in listed]
        signature = calls.signature(
            "pto",
            f"number of tensors {len(listed)}",
            *(f"tensor {i} {calls.described(tensor)}, cost {costs[i]!r}" for i, tensor in enumerate(listed)),
            *(f"result {i} {spec.dtype.name}{spec.shape.as_list()}" for i, (_, spec) in enumerate(traced)),
        )
        size, rank = call.job.engine.size, call.job.engine.rank
        parts = shares(costs, size)
        local = [_bytes(traced[i][0](listed[i]), traced[i][1]) for i in parts[rank]]
    joined = single.gathered(call, tf.concat([tf.zeros(0, tf.uint8), *local], 0), signature)
    order = [i for part in parts for i in part]
    pieces = tf.split(joined, [_nbytes(traced[i][1]) for i in order]) if order else []
    results = {i: _of_bytes(piece, traced[i][1]) for i, piece in zip(order, pieces, strict=True)}
    return [_without_gradient(results[i], tensor) for i, tensor in enumerate(listed)]


def shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide work by costs: the most costly first, each to the rank with least so far; ascending pieces by rank."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(piece)
        heapq.heappush(loads, (load + costs[piece], rank))
    return [sorted(part) for part in parts]


class Trial:
    """Finds which of two ways of a step takes less time: both are tried in the first steps, and all ranks agree.

    Attributes:
        chosen: a variable: 1 for the second way, 0 for the first, -1 while they are tried.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self.chosen = tf.Variable(-1, dtype=tf.int32, trainable=False, name="hvd_ext_chosen")
            self._done = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd_ext_tried")
            self._times = tf.Variable(tf.zeros([2 * _TRIALS], tf.float64), trainable=False, name="hvd_ext_times")

    def run(
        self,
        inputs: Sequence[tf.Tensor],
        work: Callable[[Any], tf.Tensor],
        worst: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Go one of two ways.

        Args:
            inputs: a time begins when they are there.
            work: goes the second way, with all ranks, if its argument is true, and the first one if not. The argument
                is a bool or a scalar tensor, equal on all ranks; the result has the same shape and dtype.
            worst: gives the maximum of a vector over the ranks.

        Returns:
            The result of one way; of the first where `tf.config.experimental.enable_op_determinism` forbids clocks.
        """
        if config.is_op_determinism_enabled():
            return work(False)
        if tf.executing_eagerly() and int(self.chosen) >= 0:
            return work(int(self.chosen) == 1)
        chosen, tried = self.chosen.read_value(), self._done.read_value()
        together = tf.where(chosen < 0, tried % 2 == 1, chosen == 1)
        with tf.control_dependencies(inputs):
            begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            result = work(bool(together) if tf.executing_eagerly() else together)
        with tf.control_dependencies([result]):
            seconds = tf.timestamp() - begin
        with tf.control_dependencies([tf.cond(chosen < 0, lambda: self._note(seconds, worst), lambda: False)]):
            return tf.identity(result)

    def _note(self, seconds: tf.Tensor, worst: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Keep the time of a try, and choose after the last one."""
        place = self._done.assign_add(1) - 1
        times = tf.tensor_scatter_nd_update(self._times, [[place]], [seconds])
        with tf.control_dependencies([self._times.assign(times)]):
            chosen = tf.cond(place == 2 * _TRIALS - 1, lambda: _faster(times, worst), lambda: -1)
        with tf.control_dependencies([self.chosen.assign(chosen)]):
            return tf.constant(False)


def _faster(times: tf.Tensor, worst: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Give 1 if the second of two ways, in turn, took less time over all ranks, else 0.

    Alone, a step waits for the slowest rank. Together all ranks wait for the one that begins last; its time, which is
    the shortest, is what this way costs.
    """
    trials = tf.reshape(times, [_TRIALS, 2])[1:]
    alone, together = tf.split(worst(tf.concat([trials[:, 0], -trials[:, 1]], 0)), 2)
    middle = [tf.sort(seconds)[(_TRIALS - 1) // 2] for seconds in (alone, -together)]
    return tf.cast(middle[1] < middle[0], tf.int32)


def maximum(job: Runtime, name: str, vector: tf.Tensor) -> tf.Tensor:
    """Give the maximum of a vector over the ranks of a job, or of a process set."""
    call = calls.Call("pto", job, ops.call_name("pto", name, job), False)
    gathered = single.gathered(call, vector[tf.newaxis])
    return tf.reduce_max(gathered, axis=0)


def _listed(function: Any, tensors: Any) -> list[tf.Tensor]:
    if not callable(function):
        raise InvalidError(f"pto: function ({function!r}): must be a function of one tensor")
    if isinstance(tensors, (tf.Tensor, tf.Variable, np.ndarray)) or not isinstance(tensors, Iterable):
        raise InvalidError(f"pto: tensors ({type(tensors).__name__}): must be a list of tensors")
    listed = [dtypes.converted("pto", tensor, dtypes.MOVED) for tensor in tensors]
    for place, tensor in enumerate(listed):
        if not tensor.shape.is_fully_defined():
            raise InvalidError(f"pto: tensor {place} (shape {tensor.shape}): its shape must be known when it is traced")
    return listed


def _costs(tensors: Sequence[tf.Tensor], cost: Any) -> list[float]:
    if cost is None:
        return [float(tensor.shape.num_elements() or 0) for tensor in tensors]
    costs = [cost(tensor) for tensor in tensors] if callable(cost) else list(cost)
    if len(costs) != len(tensors):
        raise InvalidError(f"pto: cost ({len(costs)} numbers): must be one for each tensor; there are {len(tensors)}")
    for place, value in enumerate(costs):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < float("inf"):
            raise InvalidError(f"pto: cost of tensor {place} ({value!r}): must be a number, at least 0")
    return [float(value) for value in costs]


def _traced(function: Callable[[tf.Tensor], Any], spec_of_argument: tf.TensorSpec) -> tuple[Any, tf.TensorSpec]:
    """Trace a function for a shape and a dtype, and give it with those of its result."""
    traced = tf.function(lambda tensor: tf.convert_to_tensor(function(tensor)), autograph=False)
    concrete = traced.get_concrete_function(spec_of_argument)
    spec = tf.TensorSpec(concrete.structured_outputs.shape, concrete.structured_outputs.dtype)
    if not spec.shape.is_fully_defined():
        raise InvalidError(f"pto: result (shape {spec.shape}): its shape must follow from that of the tensor")
    if spec.dtype.name not in dtypes.MOVED:
        raise InvalidError(f"pto: result ({spec.dtype.name}): its dtype must be one of {', '.join(dtypes.MOVED)}")
    return concrete, spec


def _nbytes(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements() or 0) * int(spec.dtype.size)


def _bytes(result: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    flat = tf.reshape(tf.cast(result, tf.uint8) if spec.dtype == tf.bool else result, [-1])
    return flat if flat.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _of_bytes(piece: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype == tf.bool:
        piece = tf.cast(piece, tf.bool)
    elif spec.dtype.size > 1:
        piece = tf.bitcast(tf.reshape(piece, [-1, spec.dtype.size]), spec.dtype)
    elif spec.dtype != tf.uint8:
        piece = tf.bitcast(piece, spec.dtype)
    return tf.reshape(piece, spec.shape)


@tf.custom_gradient
def _without_gradient(result: tf.Tensor, tensor: tf.Tensor) -> Any:
    """Give a result that refuses the gradient with respect to its tensor, in place of having none."""

    def refuse(*_: tf.Tensor) -> Any:
        raise InvalidError("pto: its results have no gradient; stop the gradient behind it: tf.stop_gradient")

    return tf.identity(result), refuse
