"""The collectives that a user calls: allreduce, allgather, broadcast, barrier; eager and in `tf.function`.

The ranks' calls are matched by name: the n-th use of a name on one rank meets the n-th use on the others, so they may
come in any order. Default names count the calls of a kind, so ranks that make the same calls need no names.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext import runtime
from hvd_ext.errors import InvalidError
from hvd_ext.options import Average, ReduceOp, Sum, check_op
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
) -> tf.Tensor:
    """Sum or average a tensor over the ranks; all ranks call it and get the same bits. Differentiable.

    Args:
        tensor: of equal shape and dtype on all ranks; a tensor, a variable, NumPy or what TensorFlow converts. float32,
            float64, float16, bfloat16, int32 or int64. Averages of integers are cut toward zero.
        average: Horovod's older way to say `op`: True for `Average`, False for `Sum`.
        op: `hvd_ext.Average` or `hvd_ext.Sum`.
        name: matches the ranks' calls; None for a counted name.
        algorithm: the name of an algorithm, "auto", or None for the options'.

    Returns:
        The sum or average, of the tensor's shape and dtype.

    Raises:
        MismatchError: shape, dtype, op or plan differ between ranks; on all ranks, and the next collective works.
        InvalidError: an argument that cannot be.
        PlanError: the algorithm is unknown or cannot run on the topology.
        CommunicationError: a peer is gone or stayed away.
    """
    op = check_op(op) if average is None else (Average if average else Sum)
    tensor = _converted("allreduce", tensor, REDUCED)
    name = ops.call_name("allreduce", name)
    with ops.translated():
        return gradients.summed(name, tensor, op, algorithm)


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
    tensor = _converted("allgather", tensor, MOVED)
    if tensor.shape.rank == 0:
        raise InvalidError(
            f"allgather ({tensor.dtype.name} scalar): parts are joined along their first dimension and a scalar has "
            "none; give it one: tf.expand_dims(tensor, 0)"
        )
    name = ops.call_name("allgather", name)
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
    size = runtime.current().engine.size
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise InvalidError(f"root_rank ({root_rank!r}): must be a rank, 0 to {size - 1}")
    tensor = _converted("broadcast", tensor, MOVED)
    name = ops.call_name("broadcast", name)
    carrier = CARRIER.get(tensor.dtype.name, tensor.dtype.name)
    with ops.translated():
        result = ops.broadcast(name, tf.cast(tensor, carrier), root_rank, **gradients.broadcast_classes(root_rank))
    return tf.cast(result, tensor.dtype)


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


def _converted(kind: str, value: Any, dtypes: tuple[str, ...]) -> tf.Tensor:
    runtime.current()
    if isinstance(value, tf.IndexedSlices):
        raise InvalidError(f"{kind} (IndexedSlices): make it dense first: tf.convert_to_tensor(value)")
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.name not in dtypes:
        raise InvalidError(f"{kind} ({tensor.dtype.name}): the dtype must be one of {', '.join(dtypes)}; cast it")
    return tensor
