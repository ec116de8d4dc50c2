"""The collectives' gradients, and the rows of size classes that each call carries.

With L the sum of all ranks' losses and y = collective(x): rank i's dL/dx_i is the reduction over ranks r of dL/dy_r,
taken where x_i went. So an allreduce's gradient is an allreduce of the same op, an allgather's is the rank's own part
of the summed gradient, and a broadcast's is the summed gradient on the root and zero elsewhere. A reducescatter's is
the allgather of the parts' gradients, and an alltoall's is the alltoall that sends every row back.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext import runtime
from hvd_ext.options import ReduceOp, Sum
from hvd_ext.tensorflow import ops

# The ranks' parts of an allgather or alltoall differ in size, so its grain cannot follow them: that of a middling size.
_GATHER_NBYTES = 1 << 20


def summed(name: Any, tensor: tf.Tensor, op: ReduceOp, algorithm: str | None = None, wire: str = "") -> tf.Tensor:
    """Allreduce a tensor; the caller translates errors.

    Args:
        name: the call's final name.
        tensor: of a dtype that the engine reduces.
        op: `Sum` or `Average`.
        algorithm: None for the options'.
        wire: the dtype in which float32 travels, "" for its own.

    Returns:
        The reduced tensor.
    """
    job = runtime.current()
    rows = _rows([job.allreduce(limit, algorithm) for limit in runtime.SIZE_CLASSES])
    return ops.allreduce(name, tensor, average=op != Sum, wire=wire, **rows)


def gather_classes() -> dict[str, list[int]]:
    """Give the op's attributes for an allgather; one class only, whatever the parts' sizes."""
    prepared = runtime.current().all_gather(_GATHER_NBYTES)
    return {**_rows([prepared]), "limits": [_GATHER_NBYTES]}


def scatter_classes() -> dict[str, list[int]]:
    """Give the op's attributes for a reducescatter."""
    prepared = runtime.current().reduce_scatter(_GATHER_NBYTES)
    return {**_rows([prepared]), "limits": [_GATHER_NBYTES]}


def alltoall_classes() -> dict[str, list[int]]:
    """Give the op's attributes for an alltoall."""
    prepared = runtime.current().all_to_all(_GATHER_NBYTES)
    return {**_rows([prepared]), "limits": [_GATHER_NBYTES]}


def broadcast_classes(root: int) -> dict[str, list[int]]:
    """Give the op's attributes for a broadcast.

    Args:
        root: the rank whose tensor all get.
    """
    job = runtime.current()
    return _rows([job.broadcast(limit, root) for limit in runtime.SIZE_CLASSES])


def _rows(prepared: list[runtime.Prepared]) -> dict[str, list[int]]:
    return {
        "limits": list(runtime.SIZE_CLASSES),
        "plans": [one.plan for one in prepared],
        "digests": [one.digest for one in prepared],
        "segments": [one.segment_nbytes for one in prepared],
    }


@tf.RegisterGradient("HvdExt>Allreduce")
def _allreduce_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    rows = {attribute: list(op.get_attr(attribute)) for attribute in ("limits", "plans", "digests", "segments")}
    average, wire = bool(op.get_attr("average")), op.get_attr("wire")
    return [None, ops.allreduce(_name(op), gradient, average=average, wire=tf.compat.as_str(wire), **rows)]


@tf.RegisterGradient("HvdExt>Allgather")
def _allgather_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    own = tf.shape(op.inputs[1], out_type=tf.int64)[:1]
    sizes = ops.allgather(_name(op, ".sizes"), own, **gather_classes())
    begin = tf.reduce_sum(sizes[: runtime.current().engine.rank])
    return [None, summed(_name(op), gradient, Sum)[begin : begin + own[0]]]


@tf.RegisterGradient("HvdExt>Broadcast")
def _broadcast_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    total = summed(_name(op), gradient, Sum)
    return [None, total if op.get_attr("root") == runtime.current().engine.rank else tf.zeros_like(total)]


@tf.RegisterGradient("HvdExt>Reducescatter")
def _reducescatter_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    gathered = ops.allgather(_name(op), gradient, **gather_classes())
    if op.get_attr("average"):
        gathered /= tf.cast(runtime.current().engine.size, gathered.dtype)
    return [None, gathered]


@tf.RegisterGradient("HvdExt>Alltoall")
def _alltoall_gradient(op: Any, gradient: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor | None]:
    result, _ = ops.alltoall(_name(op), gradient, op.outputs[1], has_splits=True, **alltoall_classes())
    return [None, result, None]


# A reduced gradient is a constant to a tape: its way goes through tickets, which are whole numbers.
for _kind in ("BeginStep", "Submit", "Collect", "Barrier"):
    tf.no_gradient(f"HvdExt>{_kind}")


def _name(op: Any, suffix: str = "") -> Any:
    """Name the backward call after the forward one, whose name is its first input."""
    name = tf.get_static_value(op.inputs[0])
    if name is None:
        return tf.strings.join([op.inputs[0], ".gradient", suffix])
    text = name if isinstance(name, bytes) else name.item()
    return ops.call_name("gradient", text.decode() + ".gradient" + suffix)
