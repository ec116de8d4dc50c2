"""Velocities when the learning rate changes.

SGD's velocity is v = momentum * v - rate * g: a sum of old gradients times *old* rates. Horovod corrects this by
setting momentum to momentum * new / old for one step. The optimizers of Keras 3 trace `momentum` into the training step
as a constant, so that setting it changes nothing. Scaling the velocity by new / old has the same effect, and works.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import reducer_of

# The attributes in which optimizers keep velocities that contain the learning rate. Muon has none: it applies the rate
# after its momentum.
_VELOCITIES = {"SGD": "momentums", "RMSprop": "_momentums", "Muon": "", "LARS": "momentums"}


class Velocities:
    """The velocities of an optimizer: its own, and those that `TopK` has taken over from it.

    Args:
        optimizer: of Keras 3 or tf_keras, without a loss-scale optimizer around it.

    Raises:
        InvalidError: it has a momentum, and is of an unknown class, whose velocities may be anywhere.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._kind: type | None = None  # the class that keeps them
        self._of: list[Any] = []
        self._scale: Any = None
        momentum = getattr(optimizer, "momentum", None)
        if momentum is None or (isinstance(momentum, (int, float)) and not momentum):
            return
        self._kind = next((kind for kind in type(optimizer).__mro__ if _is_known(kind)), None)
        if self._kind is None:
            raise InvalidError(
                f"momentum_correction (True): where optimizer {type(optimizer).__name__!r} keeps its momentum is not "
                "known; pass momentum_correction=False"
            )

    def scale(self, ratio: float) -> None:
        """Multiply all velocities by the ratio of the new learning rate to the old one."""
        slots = self._slots()
        reducer = reducer_of(self._optimizer)
        if reducer is not None:
            reducer.scale_momentum(ratio)
        if not slots:
            return
        if [id(slot) for slot in slots] != [id(slot) for slot in self._of]:
            self._of, self._scale = slots, _scaling([kinds.inner(slot) for slot in slots])
        self._scale(tf.constant(ratio, tf.float64))

    def _slots(self) -> list[Any]:
        if self._kind is None or not getattr(self._optimizer, "rate_in_momentum", True):  # LARS without the rate in it
            return []
        if "legacy" in self._kind.__module__:  # of tf_keras: the slots are by variable and by name
            return [slots["momentum"] for slots in self._optimizer._slots.values() if "momentum" in slots]
        attribute = _VELOCITIES[self._kind.__name__]
        return list(getattr(self._optimizer, attribute, ())) if attribute else []


def _is_known(kind: type) -> bool:
    return kind.__name__ in _VELOCITIES and kind.__module__.startswith(("keras.", "tf_keras.", "hvd_ext."))


def _scaling(slots: list[tf.Variable]) -> Any:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.float64)])
    def scale(ratio: tf.Tensor) -> None:
        for slot in slots:
            slot.assign(slot * tf.cast(ratio, slot.dtype), read_value=False)

    return scale
