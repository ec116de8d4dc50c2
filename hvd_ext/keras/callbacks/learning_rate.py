"""The learning rate during `fit`: schedules by epoch, a warm-up to the rate of many ranks, and velocities.

SGD's velocity is v = momentum * v - rate * g: a sum of old gradients times *old* rates. Horovod corrects this by
setting momentum to momentum * new / old for one step. The optimizers of Keras 3 trace `momentum` into the training step
as a constant, so that setting it changes nothing. Scaling the velocity by new / old has the same effect, and works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job.process import rank, size
from hvd_ext.keras import base
from hvd_ext.keras.checkpoint.skipping import skips
from hvd_ext.keras.optimizers.learning_rate import check_settable
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.reducer import reducer_of

# The attributes in which optimizers keep velocities that contain the learning rate. Muon has none: it applies the rate
# after its momentum.
_VELOCITIES = {"SGD": "momentums", "RMSprop": "_momentums", "Muon": "", "LARS": "momentums"}


class LearningRateScheduleCallback(base.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`, between two epochs.

    With steps_per_execution above 1, a rate holds for that many steps. Each epoch's logs get the rate as `lr`.

    Args:
        initial_lr: the rate that the multiplier is applied to.
        multiplier: a function of the epoch; or a number m, for m ** (epoch - start_epoch).
        start_epoch: the first epoch in which the rate is set, from 0.
        end_epoch: the first epoch in which the rate is no longer set; None: there is none.
        staircase: True: the rate is set once in an epoch, and the multiplier gets whole numbers; False: it is set
            before every step, and the multiplier gets epoch + batch / steps_per_epoch.
        momentum_correction: scale the velocities of SGD, RMSprop and LARS, where they contain the rates of earlier
            steps, by new rate / old rate (Goyal et al. 2017, section 3, remark 2).
        steps_per_epoch: training steps of one rank in an epoch; None: as Keras knows it. Needed with staircase=False.

    Raises:
        InvalidError: an argument breaks its rule; or, when `fit` begins, the optimizer's rate cannot be set, or no rank
            knows the number of steps or where the optimizer keeps its momentum.
    """

    works_on_batches = True

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not base.is_number(initial_lr):
            raise InvalidError(
                f"initial_lr ({initial_lr!r}): must be a number, the rate that training would begin with"
            )
        if not callable(multiplier) and not base.is_number(multiplier):
            raise InvalidError(f"multiplier ({multiplier!r}): must be a number or a function of the epoch")
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._steps_are_given = bool(steps_per_epoch)
        self.multiplier = multiplier if callable(multiplier) else _powers(float(multiplier), start_epoch)
        self._epoch = 0
        self._velocities: Velocities | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the ranks train together, that the rate can be set, and how many steps an epoch has."""
        base.refuse_plain(self.model)
        optimizer = check_settable(type(self).__name__, getattr(self.model, "optimizer", None))
        self._velocities = Velocities(optimizer) if self.momentum_correction else None
        if not self.staircase and not self._steps_are_given:  # each `fit` may have another number
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise InvalidError(
                    f"{type(self).__name__}: steps_per_epoch must be given, because this data set's length is not "
                    "known before it has been read: the number of training steps of one rank in an epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate, if it is time to; batches that an earlier job has trained on change nothing."""
        if skips(self.model):
            return
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self._epoch + batch / float(self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate into the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        old = self._rate()
        self.model.optimizer.learning_rate = self.initial_lr * float(self.multiplier(epoch))
        new = self._rate()
        if self._velocities is not None and old != 0 and new != old:
            self._velocities.scale(new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, step by step over the first epochs.

    After `e` epochs, e counted in steps, the rate is initial_lr / size * (1 + e * (size - 1) / warmup_epochs), so that
    it is initial_lr with the last step of the warm-up (Goyal et al. 2017, section 2.2).

    Args:
        initial_lr: the rate at the end of the warm-up: usually that of one rank times the number of ranks, see
            `hvd_ext.scale_learning_rate`.
        warmup_epochs: the length of the warm-up; 0: none.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1: rank 0 prints a line when the warm-up has ended.

    Raises:
        InvalidError: see `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            done = epoch + 1 / float(self.steps_per_epoch or 1)  # the step that begins counts as done
            return (1 + done * (size() - 1) / warmup_epochs) / size()

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate into the logs, and say that the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            print(f"\nepoch {epoch + 1}: the warm-up has ended; the learning rate is {self._rate():g}")


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
        reducer = reducer_of(self._optimizer)
        if reducer is not None:
            reducer.scale_momentum(ratio)
        if slots := [kinds.inner(slot) for slot in self._slots()]:
            _scale(slots, tf.constant(ratio, tf.float64))

    def _slots(self) -> list[Any]:
        if self._kind is None or not getattr(self._optimizer, "rate_in_momentum", True):  # LARS without the rate in it
            return []
        if "legacy" in self._kind.__module__:  # of tf_keras: the slots are by variable and by name
            return [slots["momentum"] for slots in self._optimizer._slots.values() if "momentum" in slots]
        attribute = _VELOCITIES[self._kind.__name__]
        return list(getattr(self._optimizer, attribute, ())) if attribute else []


def _powers(factor: float, start: int) -> Callable[[float], float]:
    return lambda epoch: factor ** (epoch - start)


def _is_known(kind: type) -> bool:
    return kind.__name__ in _VELOCITIES and kind.__module__.startswith(("keras.", "tf_keras.", "hvd_ext."))


@tf.function(autograph=False)
def _scale(slots: list[tf.Variable], ratio: tf.Tensor) -> None:
    for slot in slots:
        slot.assign(slot * tf.cast(ratio, slot.dtype), read_value=False)
