"""The collectives that a user calls: allreduce, allgather, broadcast, reducescatter, alltoall, barrier.

All work eagerly and in `tf.function`. The ranks' calls are matched by name: the n-th use of a name on one rank meets
the n-th use on the others, so they may come in any order. Default names count the calls of a kind, so ranks that make
the same calls need no names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_ext import runtime
from hvd_ext.errors import InvalidError
from hvd_ext.options import Average, Compression, ReduceOp, Sum, check_compression, check_op
from hvd_ext.tensorflow import gradients, ops
from hvd_ext.tensorflow.ops import plain

# The dtypes that are reduced, and those that are moved: in themselves, or in a wider one where the engine has none.
REDUCED = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
CARRIER = {"bool": "uint8", "int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64"}
MOVED = (*REDUCED, "uint8", *CARRIER)


@plain
def allreduce(
    tensor: Any,
    average: bool | None = None,
    *,
    op: ReduceOp = Average,
    name: str | None = None,
    algorithm: str | None = None,
    compression: Compression | None = None,
) -> tf.Tensor:
    """Sum or average a tensor over the ranks; all ranks call it and get the same bits. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks; a tensor, a variable, NumPy or what TensorFlow converts. float32,
            float64, float16, bfloat16, int32 or int64. Averages of integers are cut toward zero.
        average: Horovod's older way to say `op`: True for `Average`, False for `Sum`.
        op: `hvd_ext.Average` or `hvd_ext.Sum`.
        name: matches the ranks' calls; None for a counted name.
        algorithm: the name of an algorithm, "auto", or None for the options'.
        compression: `hvd_ext.Compression.fp16` or `.bf16`: float32 travels as halves, is added in float32, and comes
            back rounded, or infinite beyond 65504 with fp16; other dtypes travel as they are. None: no compression.

    Returns:
        The sum or average, of the tensor's shape and dtype.

    Raises:
        MismatchError: shape, dtype, op, compression or plan differ between ranks; on all ranks, and the next
            collective works.
        InvalidError: an argument that cannot be.
        PlanError: the algorithm is unknown or cannot run on the topology.
        CommunicationError: a peer is gone or stayed away.
    """
    with _preparing("allreduce", name) as name:
        op = check_op(op) if average is None else (Average if average else Sum)
        wire = check_compression(compression).value
        tensor = _converted("allreduce", tensor, REDUCED)
        if algorithm is not None:
            runtime.current().allreduce(runtime.SIZE_CLASSES[0], algorithm)
    with ops.translated():
        return gradients.summed(name, tensor, op, algorithm, wire)


@plain
def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """Join the tensors of all ranks along the first dimension, in the order of ranks; all ranks call it.

    Differentiable.

    Args:
        tensor: this rank's part, of at least one dimension; all but the first are equal on all ranks. Of the dtypes of
            `allreduce`, or bool, uint8, int8, int16, uint16, uint32.
        name: matches the ranks' calls; None for a counted name.

    Returns:
        The joined parts, of the same dtype.

    Raises:
        MismatchError: dtype, rank or a dimension other than the first differ between ranks; on all ranks.
        InvalidError: a scalar, or a dtype that cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with _preparing("allgather", name) as name:
        tensor = _with_rows("allgather", _converted("allgather", tensor, MOVED), "joined")
    carrier = CARRIER.get(tensor.dtype.name, tensor.dtype.name)
    with ops.translated():
        gathered = ops.allgather(name, tf.cast(tensor, carrier), **gradients.gather_classes())
    return tf.cast(gathered, tensor.dtype)


@plain
def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Give all ranks the tensor of one rank; all ranks call it. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks; its values count on the root only. Of the dtypes of `allgather`.
        root_rank: whose values all get.
        name: matches the ranks' calls; None for a counted name.

    Returns:
        The root's tensor.

    Raises:
        MismatchError: shape, dtype or root differ between ranks; on all ranks.
        InvalidError: the root is not a rank, or a dtype that cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with _preparing("broadcast", name) as name:
        size = runtime.current().engine.size
        if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size:
            raise InvalidError(f"root_rank ({root_rank!r}): must be a rank, 0 to {size - 1}")
        tensor = _converted("broadcast", tensor, MOVED)
    carrier = CARRIER.get(tensor.dtype.name, tensor.dtype.name)
    with ops.translated():
        result = ops.broadcast(name, tf.cast(tensor, carrier), root_rank, **gradients.broadcast_classes(root_rank))
    return tf.cast(result, tensor.dtype)


@plain
def reducescatter(tensor: Any, op: ReduceOp = Average, name: str | None = None) -> tf.Tensor:
    """Sum or average a tensor over the ranks and keep one part on each rank; all ranks call it. Differentiable.

    The rows (the first dimension) are divided over the ranks in their order; where they do not divide evenly, the first
    ranks have one more, and where there are fewer rows than ranks, the last ones have none.

    Args:
        tensor: of equal shape and dtype on all ranks, of at least one dimension. Of the dtypes of `allreduce`.
        op: `hvd_ext.Average` or `hvd_ext.Sum`.
        name: matches the ranks' calls; None for a counted name.

    Returns:
        This rank's rows of the sum or average, of the same dtype.

    Raises:
        MismatchError: shape, dtype or op differ between ranks; on all ranks, and the next collective works.
        InvalidError: a scalar, or a dtype that cannot be reduced.
        CommunicationError: a peer is gone or stayed away.
    """
    with _preparing("reducescatter", name) as name:
        op = check_op(op)
        tensor = _with_rows("reducescatter", _converted("reducescatter", tensor, REDUCED), "divided")
    with ops.translated():
        return ops.reducescatter(name, tensor, average=op != Sum, **gradients.scatter_classes())


@plain
def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank and join the rows from every rank, in the order of ranks; all ranks call it.

    Differentiable.

    Args:
        tensor: of at least one dimension; all but the first are equal on all ranks. Of the dtypes of `allgather`.
        splits: how many rows go to each rank, the first ones to rank 0: whole numbers, one for each rank, that add up
            to the rows. None: equal parts.
        name: matches the ranks' calls; None for a counted name.

    Returns:
        The received rows, of the same dtype. With splits also how many rows came from each rank, in the dtype of
        splits.

    Raises:
        MismatchError: dtype, rank or a dimension other than the first differ between ranks; on all ranks.
        InvalidError: splits that do not add up on some rank, or rows that cannot be divided evenly; on all ranks. Also
            a scalar, or a dtype that cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    with _preparing("alltoall", name) as name:
        tensor = _with_rows("alltoall", _converted("alltoall", tensor, MOVED), "divided")
        counts = tf.zeros(0, tf.int64) if splits is None else tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer or counts.shape.rank != 1:
            raise InvalidError(
                f"alltoall: splits ({counts.dtype.name}{list(counts.shape)}): must be a vector of whole numbers, one "
                "for each rank"
            )
    carrier = CARRIER.get(tensor.dtype.name, tensor.dtype.name)
    with ops.translated():
        result, received = ops.alltoall(
            name,
            tf.cast(tensor, carrier),
            tf.cast(counts, tf.int64),
            has_splits=splits is not None,
            **gradients.alltoall_classes(),
        )
    result = tf.cast(result, tensor.dtype)
    return result if splits is None else (result, tf.cast(received, counts.dtype))


@plain
def barrier(name: str | None = None) -> tf.Operation | None:
    """Wait until all ranks have come here. In a `tf.function` it keeps its place among the ops with side effects.

    Args:
        name: matches the ranks' calls; None for a counted name.

    Returns:
        The operation while a function is traced, else None.

    Raises:
        CommunicationError: a peer is gone or stayed away.
    """
    runtime.current()
    with ops.translated():
        return ops.barrier(ops.call_name("barrier", name))


@contextlib.contextmanager
def _preparing(kind: str, name: str | None) -> Iterator[str]:
    """Name a call before anything can refuse it; the ranks that make the call hear of a refusal on this one."""
    job = runtime.current()
    name = ops.call_name(kind, name)
    try:
        yield name
    except Exception as error:
        if tf.executing_eagerly():
            job.engine.refuse(name, str(error))
        raise


def _converted(kind: str, value: Any, dtypes: tuple[str, ...]) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):
        raise InvalidError(f"{kind} (IndexedSlices): make it dense first: tf.convert_to_tensor(value)")
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.name not in dtypes:
        raise InvalidError(f"{kind} ({tensor.dtype.name}): the dtype must be one of {', '.join(dtypes)}; cast it")
    return tensor


def _with_rows(kind: str, tensor: tf.Tensor, verb: str) -> tf.Tensor:
    if tensor.shape.rank == 0:
        raise InvalidError(
            f"{kind} ({tensor.dtype.name} scalar): tensors are {verb} along their first dimension and a scalar has "
            "none; give it one: tf.expand_dims(tensor, 0)"
        )
    return tensor
