"""What is common to the user's collectives: the ranks that take part, the call's name, and what else must agree."""

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
        kind: the function that the user has called.
        job: the runtime of the ranks that take part.
        name: matches the ranks' calls.
        counted: the name is a number of the calls so far, which says nothing where several threads call at once.
    """

    kind: str
    job: Runtime
    name: str
    counted: bool

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"


@contextlib.contextmanager
def preparing(kind: str, name: str | None, process_set: ProcessSet | None) -> Iterator[Call]:
    """Name a call before anything can refuse it; the ranks that make the call hear of a refusal on this one.

    Args:
        kind: the function that the user has called.
        name: what the user gave, or None.
        process_set: what the user gave; None for all ranks.

    Raises:
        InvalidError: the name is no text, or this rank is not in the set.
    """
    job = process_sets.member(process_set, kind)
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
    """Make one op of Horovod's two ways to say it.

    Args:
        kind: the collective, for messages.
        op: None for `Average`; `Min`, `Max` and `Product` are for an allreduce only.
        average: True for `Average`, False for `Sum`, or None.

    Returns:
        The op.

    Raises:
        InvalidError: both are given, or one that is not supported.
    """
    if average is not None:
        if op is not None:
            raise InvalidError(f"{kind}: op ({op!r}) and average ({average!r}): give one of them only; op is the newer")
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
    """Write down what must be the same on all ranks, beyond what the engine compares.

    Args:
        label: what the user has called, for messages.
        *lines: one agreement each, a text or a string tensor.

    Returns:
        A text, or a string tensor where a graph does not know it yet.
    """
    everything = [label, *lines]
    if all(isinstance(line, str) for line in everything):
        return "\n".join(everything)
    return tf.strings.join(everything, separator="\n")


def described(tensor: tf.Tensor, free: bool = False) -> Any:
    """Write down a tensor's dtype and shape, as in "float32[2, 3]"; equally whether a graph knows the shape or not.

    Args:
        tensor: any.
        free: the first dimension may differ between ranks and is written "*".

    Returns:
        A text, or a string tensor.
    """
    name = tensor.dtype.name
    first = ["*"] if free else []
    if tensor.shape.rank is not None and tensor.shape[len(first) :].is_fully_defined():
        return f"{name}[{', '.join(first + [str(n) for n in tensor.shape[len(first) :]])}]"
    sizes = tf.strings.as_string(tf.shape(tensor)[len(first) :])
    joined = tf.strings.reduce_join(tf.concat([tf.constant(first, tf.string), sizes], 0), separator=", ")
    return tf.strings.join([name, "[", joined, "]"])


def agree(call: Call, signature: Any) -> tf.Operation | None:
    """Wait for all ranks, and compare what has no tensor to go with.

    Args:
        call: from `preparing`.
        signature: from `signature`, or "".

    Returns:
        The operation while a graph is built, else None.
    """
    with ops.translated():
        return ops.barrier(call.name, signature, counted=call.counted, engine=call.job.engine.generation)
