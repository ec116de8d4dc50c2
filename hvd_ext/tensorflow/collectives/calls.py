"""The common part of the user's collectives: the ranks that take part, the call's name, and its signature."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.options import Average, ReduceOp, Sum, check_op
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.job.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a user.

    Args:
        name: matches the ranks' calls.
        counted: whether the name comes from counting the calls, which is ambiguous if several threads call at once.
    """

    kind: str
    job: Runtime
    name: str
    counted: bool

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"


@contextlib.contextmanager
def preparing(kind: str, name: str | None, process_set: ProcessSet | None) -> Iterator[Call]:
    """Name a call before its arguments are checked, so that the other ranks learn if this rank refuses the call.

    Raises:
        InvalidError: the name is not a string or is empty, this rank is not in the set, or XLA compiles the caller.
    """
    job = process_sets.member(process_set, kind)
    ops.refuse_xla(kind)
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidError(f"{kind}: name ({name!r}): must be a text that is not empty, or None")
    call = Call(kind, job, ops.call_name(kind, name, job), name is None and tf.executing_eagerly())
    try:
        yield call
    except Exception as error:
        if tf.executing_eagerly():
            job.engine.refuse(call.name, str(error))
        raise


def chosen_op(kind: str, op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """Return the op that is given by one of Horovod's two arguments for it.

    Args:
        op: None for `Average`; `Min`, `Max` and `Product` are for an allreduce only.
        average: True for `Average`, False for `Sum`, or None.

    Raises:
        InvalidError: both arguments are given, or the op is not supported.
    """
    if average is not None:
        if op is not None:
            raise InvalidError(
                f"{kind}: op ({op!r}) and average ({average!r}): give only one of them; op is the newer one"
            )
        return Average if average else Sum
    if op is None:
        return Average
    if isinstance(op, ReduceOp) and kind in ("allreduce", "grouped_allreduce"):
        return op
    try:
        return check_op(op)
    except InvalidError as error:
        raise InvalidError(f"{kind}: {error}") from None


def signature(label: str, *lines: Any) -> Any:
    """Join the lines that must be equal on all ranks, beyond what the engine compares; a tensor if some line is."""
    everything = [label, *lines]
    if all(isinstance(line, str) for line in everything):
        return "\n".join(everything)
    return tf.strings.join(everything, separator="\n")


def described(tensor: tf.Tensor, free: bool = False) -> Any:
    """Describe a tensor's dtype and shape, as in "float32[2, 3]".

    Args:
        free: whether the first dimension may differ between ranks; it is then written "*".

    Returns:
        A string; the same text as a string tensor if the shape is unknown while a graph is built.
    """
    name = tensor.dtype.name
    first = ["*"] if free else []
    if tensor.shape.rank is not None and tensor.shape[len(first) :].is_fully_defined():
        return f"{name}[{', '.join(first + [str(n) for n in tensor.shape[len(first) :]])}]"
    sizes = tf.strings.as_string(tf.shape(tensor)[len(first) :])
    joined = tf.strings.reduce_join(tf.concat([tf.constant(first, tf.string), sizes], 0), separator=", ")
    return tf.strings.join([name, "[", joined, "]"])


def agree(call: Call, signature: Any) -> list[tf.Operation]:
    """Wait for all ranks, and compare a signature that no tensor carries; returns the operation of a graph."""
    with ops.translated():
        attributes = {"counted": call.counted, "engine": call.job.engine.generation}
        operation = ops.library().hvd_ext_barrier(call.name, signature, **attributes)
    return [] if operation is None else [operation]
