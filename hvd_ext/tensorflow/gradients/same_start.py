"""A comparison of the weights over the ranks before the first update, in case the script forgot to broadcast them.

The comparison is part of the exchange that registers the gradients, and costs a checksum of each variable. What layers
have besides variables (vocabularies, constants) is compared with the weights, where the model is known. If unequal
weights may still become equal, the comparison is repeated in the following steps until all ranks have had the same
weights once: a loop with a tape may broadcast after its first batch, as Horovod's examples do; so may a callback; and a
function may broadcast before its first update.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import MismatchError
from hvd_ext.job import consensus
from hvd_ext.tensorflow import layers, ops
from hvd_ext.tensorflow.gradients import kinds

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime

Sums = list[int]

_ADVICE = (
    "each rank would train a model of its own; give all ranks the weights of one: hvd_ext.callbacks.synchronized(...) "
    "or BroadcastGlobalVariablesCallback(0) among the callbacks of fit, hvd_ext.broadcast_variables(model.variables, "
    "root_rank=0) in front of a loop, or the same keras.utils.set_random_seed(...) on all ranks before the model is "
    "made; register a variable that is meant to differ with register_local_var(variable) or local_layers; "
    "check_start=False skips this comparison"
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The variables of a step that are compared.

    Args:
        variables: the variables; in a function that is being traced they may have no values yet.
        broadcast: whether the function broadcasts something before its update.
    """

    names: Sequence[str]
    variables: Sequence[Any]
    broadcast: bool

    @classmethod
    def here(cls, pairs: Sequence[tuple[str, Any]]) -> Weights:
        """Make the value from pairs of name and variable, in the eager step or in the function that is being traced."""
        return cls([name for name, _ in pairs], [variable for _, variable in pairs], _broadcasts_before())

    def tensors(self) -> list[tf.Tensor]:
        """Read the variables."""
        return [_tensor(variable) for variable in self.variables]

    def sums_now(self) -> Sums | None:
        """Return the variables' checksums; None if some variable has no value yet."""
        with tf.init_scope():
            tensors = [_value_now(variable) for variable in self.variables]
            return None if any(tensor is None for tensor in tensors) else checksums(tensors)


class SameStart:
    """The comparison for one list of variables.

    Args:
        after_first: the weights may be broadcast after the first step, so that unequal weights are an error only once
            they have changed since that step.
        waits: returns whether a broadcast of the weights is still to come; the same on all ranks.
        states: returns the checksums of the states that layers have besides their variables.

    Attributes:
        done: whether all ranks have had the same weights once.
        name: the name of its exchanges; the same on all ranks, and different for each list.
    """

    def __init__(
        self,
        label: str,
        job: Runtime,
        *,
        after_first: bool,
        waits: Callable[[], bool],
        states: Callable[[], layers.Checksums],
    ) -> None:
        self.done = False
        self.name = label
        self._label, self._job = label, job
        self._after_first = after_first
        self._waits = waits
        self._states = states
        self._names: Sequence[str] = ()
        self._first: dict[str, Any] | None = None
        self._compared: tf.Variable | None = None

    def described(self, weights: Weights) -> dict[str, Any]:
        """Give this rank's part of the registration; variables without a value are compared at run time."""
        self._names = weights.names
        sums = weights.sums_now()
        self._first = None if sums is None else self._state_of(sums)
        later = self._after_first or self._waits() or weights.broadcast or self._first is None
        return {"own": self._first, "later": later}

    def registered(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Compare what the ranks have exchanged.

        Args:
            ranks: the values of `described`, by rank.

        Raises:
            MismatchError: the weights differ, and no broadcast can follow that makes them equal; on all ranks.
        """
        states = [rank["own"] for rank in ranks]
        if not any(rank["later"] for rank in ranks):
            self._refuse(states)
        self.done = states[0] is not None and _are_equal(states)

    def again(self, weights: Weights) -> tf.Operation | None:
        """Compare the weights again: now if eager, else whenever the function that is being traced runs.

        Returns:
            In a function, the operation that must run before the step; None if there is nothing left to compare.

        Raises:
            MismatchError: the weights differ; on all ranks. A running function raises `tf.errors.InvalidArgumentError`
                with the same message.
        """
        if self.done:
            return None
        if tf.executing_eagerly():
            self._compare(*weights.tensors())
            return None
        if self._compared is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._compared = tf.Variable(False, trainable=False, name="hvd_ext_same_start")
        compared = self._compared

        def compare() -> tf.Tensor:
            # these reads see the values that the function has assigned so far
            equal = tf.py_function(self._compare, weights.tensors(), tf.bool)
            equal.set_shape(())
            with tf.control_dependencies([compared.assign(equal, read_value=False)]):
                return tf.identity(equal)

        with tf.device("CPU:0"):
            return ops.in_order(lambda: tf.cond(compared.read_value(), lambda: tf.constant(True), compare).op)

    @ops.plain
    def _compare(self, *tensors: tf.Tensor) -> bool:
        if self.done or self._waits():
            return self.done

        def described() -> dict[str, Any]:
            state = self._state_of(checksums(tensors))
            if self._first is None:
                self._first = state
            return {"own": state, "changed": not self._after_first or state != self._first}

        ranks, joined = consensus.exchange_in_step(self._job.engine, f"{self.name}: equal weights", described)
        states = [rank["own"] for rank in ranks]
        if any(rank["changed"] for rank in ranks):
            self._refuse(states)
        self.done = _are_equal(states) and not joined  # a rank that has joined compares in its next step
        return self.done

    def _state_of(self, sums: Sums) -> dict[str, Any]:
        # lists, as they are after an exchange
        return {"weights": sums, "layers": [list(pair) for pair in self._states()]}

    def _refuse(self, ranks: Sequence[dict[str, Any]]) -> None:
        when = " after the first step" if self._after_first else " before the first step"
        numbers = self._job.engine.ranks
        refuse(self._label, self._names, [state["weights"] for state in ranks], numbers, _ADVICE, when)
        layers.refuse(self._label, [state["layers"] for state in ranks], numbers, when)


def _are_equal(ranks: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks have the same checksums; the names of layers may differ."""
    first, *others = [[*state["weights"], *(crc for _, crc in state["layers"])] for state in ranks]
    return all(other == first for other in others)


def checksums(tensors: Sequence[tf.Tensor]) -> Sums:
    """Return the CRC-32 of each tensor's bytes; a difference goes unnoticed with a probability of 2**-32."""
    # `numpy()` would copy, and in an elastic job each world reads on a thread of its own, whose heap keeps the copy
    return [zlib.crc32(np.atleast_1d(np.asarray(tensor)).reshape(-1).view(np.uint8).data) for tensor in tensors]


def refuse(
    label: str, names: Sequence[str], sums: Sequence[Sums], ranks: Sequence[int], advice: str, when: str = ""
) -> None:
    """Refuse variables whose bits differ between ranks.

    Args:
        when: when the variables must be equal, for the message; begins with a space.

    Raises:
        MismatchError: the message names the first rank that differs from the first of all, and the first variable that
            differs there.
    """
    for rank, sums_of_rank in zip(ranks, sums, strict=True):
        for name, checksum, first in zip(names, sums_of_rank, sums[0], strict=True):
            if checksum != first:
                raise MismatchError(
                    f"{label}: {name!r} must have the same bits on all ranks{when}; rank {rank} has the checksum "
                    f"{checksum:08x}, rank {ranks[0]} has {first:08x}; {advice}"
                )


def _tensor(variable: Any) -> tf.Tensor:
    """Read a variable without any tape or custom gradient recording the read."""
    inner = kinds.inner(variable)
    handle = getattr(inner, "handle", None)
    if handle is None:
        return tf.convert_to_tensor(inner)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=inner.dtype)


def _value_now(variable: Any) -> tf.Tensor | None:
    """Return a variable's value as an eager tensor; None if it has no value yet."""
    handle = getattr(kinds.inner(variable), "handle", None)
    if not hasattr(handle, "numpy"):  # the variable is an argument of a function
        return None
    try:
        return _tensor(variable)
    except tf.errors.FailedPreconditionError:  # the function that is being traced makes the variable
        return None


def _broadcasts_before() -> bool:
    """Whether the function that is being traced has broadcast something before its update."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if any(operation.type == "HvdExt>Broadcast" for operation in graph.get_operations()):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
