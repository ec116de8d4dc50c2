"""The collectives that a user calls: allreduce, allgather, broadcast, reducescatter, alltoall, barrier.

All work eagerly and in `tf.function`. The ranks' calls are matched by name: the n-th use of a name on one rank meets
the n-th use on the others, so they may come in any order; two uses at once are an error, because nobody can tell which
is which. Default names count the calls of a kind, so ranks that make the same calls in one thread need no names.

The arguments are Horovod's, in its order. `device_dense`, `device_sparse` and `ignore_name_scope` choose nothing here:
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
        tensor: of equal shape and dtype on all ranks; a tensor, a variable, NumPy or what TensorFlow converts. float32,
            float64, float16, bfloat16, int32, int64; int8, int16, uint8, uint16 and uint32 where the sum fits. Averages
            of whole numbers are cut toward zero. Or `tf.IndexedSlices`, whose rows are joined; averages of whole
            numbers are floats there, as in Horovod.
        average: Horovod's older way to say `op`: True for `Average`, False for `Sum`.
        device_dense: accepted for Horovod's sake, like device_sparse and ignore_name_scope.
        device_sparse: see device_dense.
        compression: `hvd_ext.Compression.fp16` or `.bf16`: float32 travels as halves, is added in float32, and comes
            back rounded, or infinite beyond 65504 with fp16; other dtypes travel as they are. None: no compression.
        op: `hvd_ext.Average`, the default, `Sum`, `Min`, `Max` or `Product`. Only the first two have a gradient and
            take IndexedSlices. A minimum or maximum is NaN where a rank has NaN.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        name: matches the ranks' calls; None for a counted name.
        process_set: the ranks that take part; None for all.
        ignore_name_scope: see device_dense.
        algorithm: the name of an algorithm, "auto", or None for the options'.

    Returns:
        The result, of the tensor's shape and dtype. IndexedSlices come back as such, each index once.

    Raises:
        MismatchError: shape, dtype, op, compression, a factor or the plan differ between ranks; on all ranks, and the
            next collective works.
        InvalidError: an argument that cannot be, or a sum that does not fit into a narrow dtype.
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
        tensor: this rank's part, of at least one dimension; all but the first are equal on all ranks. float32, float64,
            float16, bfloat16, bool, or whole numbers of 8 to 64 bits.
        name: matches the ranks' calls; None for a counted name.
        ignore_name_scope: accepted for Horovod's sake; names never depend on name scopes.
        process_set: the ranks that take part; None for all.

    Returns:
        The joined parts, of the same dtype.

    Raises:
        MismatchError: dtype, rank or a dimension other than the first differ between ranks; on all ranks.
        InvalidError: a scalar, or a dtype that cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("allgather", name, process_set) as call:
        tensor = dtypes.with_rows("allgather", dtypes.converted("allgather", tensor, MOVED), "joined")
    return gathered(call, tensor)


def gathered(call: Call, tensor: tf.Tensor, signature: Any = "") -> tf.Tensor:
    """Join the parts of a checked call.

    Args:
        call: from `calls.preparing`.
        tensor: of a dtype of `MOVED`.
        signature: from `calls.signature`.

    Returns:
        The joined parts.
    """
    carrier, dtype = dtypes.carried(tensor)
    classes = backward.gather_classes(call.job)
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
        tensor: of equal shape and dtype on all ranks; its values count on the root only. Of the dtypes of `allgather`.
        root_rank: whose values all get: a rank of the job, also in a process set.
        name: matches the ranks' calls; None for a counted name.
        ignore_name_scope: accepted for Horovod's sake; names never depend on name scopes.
        process_set: the ranks that take part; None for all.

    Returns:
        The root's tensor.

    Raises:
        MismatchError: shape, dtype or root differ between ranks; on all ranks.
        InvalidError: the root is not one of the ranks, or a dtype that cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with calls.preparing("broadcast", name, process_set) as call:
        root = consensus.place_of_root(call.job.engine, root_rank)
        tensor = dtypes.converted("broadcast", tensor, MOVED)
        carrier, dtype = dtypes.carried(tensor)
        classes = backward.broadcast_classes(call.job, root)
    with ops.translated():
        result = ops.broadcast(call.name, carrier, root, dtype=dtype, counted=call.counted, **classes)
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

    The rows (the first dimension) are divided over the ranks in their order; where they do not divide evenly, the first
    ranks have one more, and where there are fewer rows than ranks, the last ones have none.

    Args:
        tensor: of equal shape and dtype on all ranks, of at least one dimension; float32, float64, float16, bfloat16,
            int32 or int64.
        device_dense: accepted for Horovod's sake, like ignore_name_scope.
        compression: as in `allreduce`.
        op: `hvd_ext.Average`, the default, or `hvd_ext.Sum`.
        name: matches the ranks' calls; None for a counted name.
        process_set: the ranks that take part; None for all.
        ignore_name_scope: see device_dense.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows of the sum or average, of the same dtype.

    Raises:
        MismatchError: shape, dtype, op, compression or a factor differ between ranks; on all ranks, and the next
            collective works.
        InvalidError: a scalar, or a dtype that cannot be reduced.
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
        tensor: of at least one dimension; all but the first are equal on all ranks. Of the dtypes of `allgather`.
        splits: how many rows go to each rank, the first ones to the first rank: whole numbers, one for each rank, that
            add up to the rows. None: equal parts.
        name: matches the ranks' calls; None for a counted name.
        ignore_name_scope: accepted for Horovod's sake; names never depend on name scopes.
        process_set: the ranks that take part; None for all.

    Returns:
        The received rows, of the same dtype. With splits also how many rows came from each rank, in the dtype of
        splits.

    Raises:
        MismatchError: dtype, rank or a dimension other than the first differ between ranks; on all ranks.
        InvalidError: splits that do not add up on some rank, or rows that cannot be divided evenly; on all ranks. Also
            a scalar, or a dtype that cannot be moved.
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
        attributes = {"dtype": dtype, "counted": call.counted, **backward.alltoall_classes(call.job)}
    with ops.translated():
        given = splits is not None
        result, received = ops.alltoall(call.name, carrier, tf.cast(counts, tf.int64), has_splits=given, **attributes)
    result = dtypes.unpacked(result, tensor.dtype)
    return result if splits is None else (result, tf.cast(received, counts.dtype))


@plain
def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> tf.Operation | None:
    """Wait until all ranks have come here. In a `tf.function` it keeps its place among the ops with side effects.

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
    return calls.agree(call, "")
