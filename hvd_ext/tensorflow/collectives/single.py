"""The collectives that a user calls: allreduce, allgather, broadcast, reducescatter, alltoall, barrier.

All of them work eagerly and in `tf.function`. The ranks' calls are matched by name: the n-th use of a name on one rank
meets the n-th use on the other ranks, so that calls may come in any order. Using a name twice at the same time is an
error, because the ranks cannot tell which use is which. Default names count the calls of each kind, so that ranks that
make the same calls in one thread need no names.

The arguments are Horovod's, in Horovod's order. `device_dense`, `device_sparse` and `ignore_name_scope` have no effect:
tensors go through the host's memory, and names do not depend on name scopes.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options import Algorithm, Average, Compression, ReduceOp
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.collectives import backward, calls, dtypes, rows
from hvd_ext.tensorflow.collectives.calls import Call
from hvd_ext.tensorflow.collectives.dtypes import ALLREDUCED, MOVED, REDUCED
from hvd_ext.tensorflow.collectives.reductions import Reduction
from hvd_ext.tensorflow.ops import plain


@plain
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    *,
    algorithm: Algorithm | None = None,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce a tensor over the ranks; all ranks call it and get the same bits. Differentiable.

    Args:
        tensor: a tensor, a variable, a NumPy array or any value that TensorFlow converts, of equal shape and dtype on
            all ranks: float32, float64, float16, bfloat16, int32 or int64; or int8, int16, uint8, uint16 or uint32 if
            the result fits. Averages of integers are exact, also where the sum would not fit, and truncated toward
            zero. Sums and products of int32 and int64 wrap around, as in MPI. Or `tf.IndexedSlices`, whose rows are
            joined; their averages of integers are floats, as in Horovod.
        average: Horovod's older argument for `op`: True for `Average`, False for `Sum`.
        device_dense: accepted for Horovod's sake, like device_sparse and ignore_name_scope.
        device_sparse: see device_dense.
        compression: `hvd_ext.Compression.fp16` or `.bf16`: float32 is sent in 16 bits and added in float32. The result
            is rounded; with fp16 it is infinite where a rank's own value is beyond 65504. Other dtypes are sent as they
            are. None for no compression.
        op: `hvd_ext.Average`, the default, `Sum`, `Min`, `Max` or `Product`. Only the first two have a gradient and
            take IndexedSlices. A minimum or maximum is NaN where a rank has NaN.
        prescale_factor: multiplies the tensor before the reduction; integers in float64, and then truncated.
        postscale_factor: multiplies the result; integers in float64, and then truncated.
        name: matches the ranks' calls; None for a counted name.
        process_set: the ranks that take part; None for all.
        ignore_name_scope: see device_dense.
        algorithm: the name of an algorithm, "auto", or None for the algorithm of the options.

    Returns:
        The result, of the tensor's shape and dtype. IndexedSlices are returned as IndexedSlices, without repeated
        indices.

    Raises:
        MismatchError: shape, dtype, op, compression, a factor or the plan differ between ranks; raised on all ranks,
            and the next collective works.
        InvalidError: an argument breaks its rule, or a sum does not fit into a narrow dtype, or a result with factors
            does not fit into its integer dtype.
        PlanError: the algorithm is unknown or cannot run on the topology.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("allreduce", name, process_set) as call:
        request = Reduction.of(call, op, average, compression, prescale_factor, postscale_factor)
        if algorithm is not None:
            call.job.allreduce(runtime.SIZE_CLASSES[0], algorithm)
        if isinstance(tensor, tf.IndexedSlices):
            tensor = rows.checked("allreduce", tensor, request.op, algorithm)
        else:
            tensor = dtypes.converted("allreduce", tensor, ALLREDUCED)
    if isinstance(tensor, tf.IndexedSlices):
        return rows.allreduced(request, tensor)
    return request.allreduced(tensor, algorithm)


@plain
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Join the tensors of all ranks along the first dimension, in the order of ranks; all ranks call it.

    Differentiable.

    Args:
        tensor: this rank's part, with at least one dimension; all dimensions but the first must be equal on all ranks.
            float32, float64, float16, bfloat16, bool, or integers of 8 to 64 bits.
        name: matches the ranks' calls; None for a counted name.
        ignore_name_scope: accepted for Horovod's sake; names never depend on name scopes.
        process_set: the ranks that take part; None for all.

    Returns:
        The joined parts, of the same dtype.

    Raises:
        MismatchError: the dtype, the number of dimensions or a dimension other than the first differs between ranks;
            raised on all ranks.
        InvalidError: the tensor is a scalar, or its dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("allgather", name, process_set) as call:
        tensor = dtypes.with_rows("allgather", dtypes.converted("allgather", tensor, MOVED), "joined")
    return gathered(call, tensor)


def gathered(call: Call, tensor: tf.Tensor, signature: Any = "") -> tf.Tensor:
    """Join the ranks' parts, of the dtypes `MOVED`, after the arguments have been checked."""
    carrier, dtype = dtypes.carried(tensor)
    classes = backward.one_class(call.job.all_gather)
    with ops.translated():
        result = ops.allgather(call.name, carrier, signature, dtype=dtype, counted=call.counted, **classes)
    return dtypes.unpacked(result, tensor.dtype)


@plain
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Give all ranks the tensor of one rank; all ranks call it. Differentiable.

    Args:
        tensor: a tensor of the dtypes of `allgather`, of equal shape and dtype on all ranks; only the root's values are
            used.
        root_rank: the rank whose values all ranks get, counted in the job, also with a process set.
        name: as for `allgather`, and so are all that follow.

    Returns:
        The root's tensor.

    Raises:
        MismatchError: shape, dtype or root differ between ranks; raised on all ranks.
        InvalidError: the root is not one of the ranks, or the dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("broadcast", name, process_set) as call:
        root = consensus.place_of_root(call.job.engine, root_rank)
        tensor = dtypes.converted("broadcast", tensor, MOVED)
        carrier, dtype = dtypes.carried(tensor)
        attributes = {"root": root, "dtype": dtype, "counted": call.counted}
        attributes |= backward.rows([call.job.broadcast(limit, root) for limit in runtime.SIZE_CLASSES])
    with ops.translated():
        result = ops.library().hvd_ext_broadcast(call.name, carrier, "", **attributes)
    return dtypes.unpacked(result, tensor.dtype)


@plain
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compression | None = None,
    op: ReduceOp | None = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Sum or average a tensor over the ranks and keep one part on each rank; all ranks call it. Differentiable.

    The rows (the first dimension) are divided over the ranks in their order. If they do not divide evenly, the first
    ranks get one row more; if there are fewer rows than ranks, the last ranks get none.

    Args:
        tensor: a tensor with at least one dimension, of equal shape and dtype on all ranks; float32, float64, float16,
            bfloat16, int32 or int64. For integers see `allreduce`.
        device_dense: accepted for Horovod's sake, like ignore_name_scope.
        compression: as in `allreduce`.
        op: `hvd_ext.Average`, the default, or `hvd_ext.Sum`.
        name: as for `allreduce`, and so are all that follow.

    Returns:
        This rank's rows of the sum or average, of the same dtype.

    Raises:
        MismatchError: shape, dtype, op, compression or a factor differ between ranks; raised on all ranks, and the next
            collective works.
        InvalidError: the tensor is a scalar, or its dtype cannot be reduced.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("reducescatter", name, process_set) as call:
        request = Reduction.of(call, op, None, compression, prescale_factor, postscale_factor)
        tensor = dtypes.with_rows("reducescatter", dtypes.converted("reducescatter", tensor, REDUCED), "divided")
    return request.scattered(tensor)


@plain
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank and join the rows from every rank, in the order of ranks; all ranks call it.

    Differentiable.

    Args:
        tensor: a tensor of the dtypes of `allgather`, with at least one dimension; all dimensions but the first must be
            equal on all ranks.
        splits: the number of rows for each rank, in the order of the ranks: integers that add up to the number of rows.
            None for equal parts.
        name: as for `allgather`, and so are all that follow.

    Returns:
        The received rows, of the same dtype. With splits also the number of rows that came from each rank, in the dtype
        of splits.

    Raises:
        MismatchError: the dtype, the number of dimensions or a dimension other than the first differs between ranks;
            raised on all ranks.
        InvalidError: on some rank the splits do not add up, or the rows cannot be divided evenly; raised on all ranks.
            Also if the tensor is a scalar, or its dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("alltoall", name, process_set) as call:
        tensor = dtypes.with_rows("alltoall", dtypes.converted("alltoall", tensor, MOVED), "divided")
        counts = tf.zeros(0, tf.int64) if splits is None else tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer or counts.shape.rank != 1:
            raise InvalidError(
                f"alltoall: splits ({counts.dtype.name}{list(counts.shape)}): must be a vector of whole numbers, one "
                "for each rank"
            )
        carrier, dtype = dtypes.carried(tensor)
        attributes = {"dtype": dtype, "counted": call.counted, **backward.one_class(call.job.all_to_all)}
    with ops.translated():
        has_splits = splits is not None
        result, received = ops.alltoall(
            call.name, carrier, tf.cast(counts, tf.int64), has_splits=has_splits, **attributes
        )
    result = dtypes.unpacked(result, tensor.dtype)
    return result if splits is None else (result, tf.cast(received, counts.dtype))


@plain
def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> tf.Operation | None:
    """Wait until all ranks have called it. A `tf.function` keeps its order among the ops with side effects.

    Args:
        name: matches the ranks' calls; None for a counted name.
        process_set: the ranks that take part; None for all.

    Returns:
        The operation while a function is traced, else None.

    Raises:
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("barrier", name, process_set) as call:
        pass
    return next(iter(calls.agree(call, "")), None)
