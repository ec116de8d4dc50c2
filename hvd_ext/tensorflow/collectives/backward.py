"""The collectives' gradients, and the plans by size class that each op gets as attributes.

The gradients are Horovod's (horovod/tensorflow/mpi_ops.py, v0.28.1), so that a script trains as it does with Horovod.
Let y = collective(x), g_r = dL_r/dy_r on rank r, and P the number of ranks that take part. The gradient of x on a rank
is

- allreduce: the sum of all g_r, or with `Average` their average;
- allgather: the rank's own rows of the average of all g_r;
- broadcast: the average of all g_r on the root, zero on all other ranks;
- reducescatter: the joined parts g_r, with `Sum` multiplied by P;
- alltoall: the rows of g_r, each sent back to the rank that it came from.

For allreduce and alltoall this is the gradient of the sum of all ranks' losses. For allgather and broadcast it is this
gradient divided by P, which is the gradient of the average loss. For reducescatter it is this gradient multiplied by P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import runtime
from hvd_ext.job.runtime import Prepared, Runtime
from hvd_ext.options import Average, ReduceOp, Sum
from hvd_ext.tensorflow import ops

# The ranks' parts of an allgather or alltoall differ in size, so the grain cannot depend on them; it is the grain of
# this medium size.
_GATHER_NBYTES = 1 << 20


def summed(
    job: Runtime, name: Any, tensor: tf.Tensor, op: ReduceOp, algorithm: str | None = None, wire: str = "", **more: Any
) -> tf.Tensor:
    """Allreduce a tensor; the caller translates errors.

    Args:
        name: the call's final name.
        algorithm: the algorithm; None for the algorithm of the options.
        wire: the dtype in which float32 is sent; "" for float32.
    """
    plans = rows([job.allreduce(limit, algorithm) for limit in runtime.SIZE_CLASSES])
    return ops.allreduce(name, tensor, op=int(op), wire=wire, **plans, **more)


def one_class(prepare: Callable[[int], Prepared]) -> dict[str, list[int]]:
    """Return an op's attributes for parts of unknown sizes, a single size class; a method of `Runtime` plans it."""
    return rows([prepare(_GATHER_NBYTES)], [_GATHER_NBYTES])


def rows(prepared: list[Prepared], limits: Sequence[int] = runtime.SIZE_CLASSES) -> dict[str, list[int]]:
    """Return an op's attributes for the plans of a collective, one for each size class."""
    return {
        "limits": list(limits),
        "plans": [row.plan for row in prepared],
        "digests": [row.digest for row in prepared],
        "segments": [row.segment_nbytes for row in prepared],
    }


def _job(op: Any) -> Runtime:
    """Find the runtime of the forward call: the handle of the call's plan begins with its engine's generation."""
    job = runtime.current()
    for owner in (job, *job.subsets.values()):
        if owner.engine.generation == op.get_attr("plans")[0] >> 32:
            return owner
    raise InvalidError(
        "gradient of a collective: since the collective ran, its process set was removed or hvd_ext was shut down"
    )


def _to_tensor(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    """Return the gradients of an op's inputs: only the second input, the tensor, has one."""
    return [gradient if index == 1 else None for index in range(len(op.inputs))]


@tf.RegisterGradient("HvdExt>Allreduce")
def _allreduce_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    plans = {attribute: list(op.get_attr(attribute)) for attribute in ("limits", "plans", "digests", "segments")}
    kind, wire = ReduceOp(op.get_attr("reduce_op")), tf.compat.as_str(op.get_attr("wire"))
    if kind not in (Average, Sum):
        raise InvalidError(
            f"gradient of an allreduce with op={kind.name}: only Average and Sum have a gradient; stop it with "
            "tf.stop_gradient, or gather with hvd_ext.allgather and reduce the parts with TensorFlow"
        )
    return _to_tensor(op, ops.allreduce(_name(op), gradient, op=int(kind), wire=wire, **plans))


@tf.RegisterGradient("HvdExt>Allgather")
def _allgather_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    job = _job(op)
    count = tf.shape(op.inputs[1], out_type=tf.int64)[:1]
    sizes = ops.allgather(_name(op, ".sizes"), count, **one_class(job.all_gather))
    begin = tf.reduce_sum(sizes[: job.engine.rank])
    return _to_tensor(op, summed(job, _name(op), gradient, Average)[begin : begin + count[0]])


@tf.RegisterGradient("HvdExt>Broadcast")
def _broadcast_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    job = _job(op)
    average = summed(job, _name(op), gradient, Average)
    if op.get_attr("root") == job.engine.rank:
        return _to_tensor(op, average)
    # zeros of a known shape are a constant; without this dependency a graph of TensorFlow 1 would drop the allreduce
    with tf.control_dependencies([average]):
        return _to_tensor(op, tf.zeros_like(average))


@tf.RegisterGradient("HvdExt>Reducescatter")
def _reducescatter_gradient(op: Any, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    job = _job(op)
    if op.get_attr("reduce_op") == Sum:
        gradient *= tf.cast(job.engine.size, gradient.dtype)
    return _to_tensor(op, ops.allgather(_name(op), gradient, **one_class(job.all_gather)))


@tf.RegisterGradient("HvdExt>Alltoall")
def _alltoall_gradient(op: Any, gradient: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor | None]:
    result, _ = ops.alltoall(_name(op), gradient, op.outputs[1], has_splits=True, **one_class(_job(op).all_to_all))
    return _to_tensor(op, result)


# A reduced gradient is a constant to a tape, because it passes through tickets, which are integers.
for _kind in ("BeginStep", "BeginTopKStep", "EndStep", "Submit", "Collect", "Barrier"):
    tf.no_gradient(f"HvdExt>{_kind}")


def _name(op: Any, suffix: str = "") -> Any:
    """Name the backward call after the forward one, whose name is its first input."""
    name = tf.get_static_value(op.inputs[0])
    if name is None:
        return tf.strings.join([op.inputs[0], ".gradient", suffix])
    text = name if isinstance(name, bytes) else name.item()
    return ops.call_name("gradient", text.decode() + ".gradient" + suffix, _job(op))
