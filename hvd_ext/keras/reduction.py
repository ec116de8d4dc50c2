"""How one optimizer's gradients reach the engine: channels opened at the first apply, one reduction per update step.

A *gradient set* is the list of variables of one `apply`. Most optimizers have one; an optimizer that is built over
several parts of a model and applied to them in turn has one channel for each.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_ext import agreement, runtime
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.tensorflow import registration

# What may differ between ranks when the first step begins: Keras numbers the names, and the learning rate is a variable
# that a broadcast or a callback may still set.
_MAY_DIFFER = ("name", "learning_rate")


class Reduction:
    """The channels of one optimizer and the step under way.

    Args:
        label: the optimizer's name in messages.
        **choices: fields of `Options` that the user gave (algorithm, bucket_nbytes, op); None leaves the one of `init`.
    """

    def __init__(self, label: str, **choices: Any) -> None:
        self.label = label
        self._choices = choices
        self._channels: dict[tuple[Any, ...], registration.Channel] = {}
        self._step: _Step | None = None

    @property
    def channels(self) -> tuple[registration.Channel, ...]:
        """The channels opened so far, in the order in which they were opened."""
        return tuple(self._channels.values())

    @contextlib.contextmanager
    def step(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Iterator[list[tf.Tensor | None]]:
        """Begin one apply of the optimizer; the first one of a gradient set opens its channel, together with all ranks.

        Args:
            optimizer: the optimizer; its class is not looked at, only its configuration.
            gradients: this rank's gradients: dense tensors, `tf.IndexedSlices` or None.
            variables: the variables that they belong to.

        Yields:
            The gradients to hand to Keras: dense, in their variables' dtypes; zeros where only other ranks have one,
            None where no rank has one.

        Raises:
            InvalidError: the gradients cannot be reduced; the message says why and what to do.
            MismatchError: the ranks' optimizers or variables differ.
            HvdExtError: Keras applied the gradients without asking for their reduction.
            NotInitializedError: before `init()`.
        """
        if not tf.executing_eagerly():
            _refuse_xla(self.label)
        if len(gradients) != len(variables):
            raise InvalidError(
                f"optimizer {self.label!r}: apply takes one gradient or None for each variable; "
                f"got {len(gradients)} gradients and {len(variables)} variables"
            )
        channel = self._channel(optimizer, gradients, variables)
        ready = [
            _ready(self.label, gradient, variable, spec.present)
            for gradient, variable, spec in zip(gradients, variables, channel.specs, strict=True)
        ]
        outer, self._step = self._step, _Step(channel)
        try:
            yield ready
            # with accumulation, an eager apply that is no update step rightly reduces nothing
            if not self._step.reduced and not optimizer.gradient_accumulation_steps and _any(ready):
                raise HvdExtError(
                    f"optimizer {self.label!r}: its apply did not call _clip_gradients, where gradients are reduced: "
                    "they were applied without the other ranks; derive it from keras.optimizers.Optimizer and leave "
                    "apply to that class"
                )
        finally:
            self._step = outer

    def reduce(self, gradients: Sequence[tf.Tensor], iterations: keras.Variable) -> list[tf.Tensor]:
        """Reduce the gradients of the apply under way.

        Args:
            gradients: dense tensors, one for each variable that some rank has a gradient for.
            iterations: the optimizer's step counter. In a graph it orders the steps: one step's reduction begins after
                the one before has ended, also where nothing else connects them (a loop, constant gradients).

        Returns:
            The sums or averages. None of them is ready before all are, so that a failed step changes no variable.

        Raises:
            HvdExtError: outside an apply, or Keras has dropped some of the gradients.
        """
        step = self._step
        if step is None:
            raise HvdExtError(
                f"optimizer {self.label!r}: _clip_gradients was called outside apply; call apply or apply_gradients"
            )
        present = [index for index, spec in enumerate(step.channel.specs) if spec.present]
        if len(gradients) != len(present):
            raise HvdExtError(
                f"optimizer {self.label!r}: {len(present)} gradients were registered, but {len(gradients)} reached "
                "_clip_gradients; an apply that adds or drops gradients cannot be used"
            )
        step.reduced = True
        everyone: list[tf.Tensor | None] = [None] * len(step.channel.specs)
        for index, gradient in zip(present, gradients, strict=True):
            everyone[index] = gradient
        if tf.executing_eagerly():
            reduced = step.channel.reduce(everyone)
            return [reduced[index] for index in present]
        with tf.control_dependencies([iterations.value.read_value()]):
            reduced = step.channel.reduce(everyone)
        with tf.control_dependencies([reduced[index] for index in present]):
            iterations.value.assign_add(0, read_value=False)
            return [tf.identity(reduced[index]) for index in present]

    def close(self) -> None:
        """Give the channels' buffers back. Again: nothing."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _channel(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> registration.Channel:
        key = tuple(optimizer._var_key(variable) for variable in variables)
        channel = self._channels.get(key)
        if channel is None or not channel.is_open:
            channel = self._open(optimizer, gradients, variables)
            self._channels[key] = channel
        return channel

    def _open(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> registration.Channel:
        owner = runtime.current()

        def facts() -> dict[str, Any]:
            _refuse_surroundings(self.label, optimizer)
            for gradient, variable in zip(gradients, variables, strict=True):
                _refuse_gradient(self.label, gradient, variable)
            return _facts(optimizer)

        where = "DistributedOptimizer"
        with tf.init_scope():  # Keras reads the learning rate for the configuration, also while a step is traced
            agreement.check_same(where, agreement.exchange(owner.engine, where, facts))
        specs = [
            registration.GradientSpec(
                name=_name(variable),
                shape=tuple(variable.shape),
                dtype=_dtype(variable).name,
                present=gradient is not None,
            )
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        return registration.open(self.label, specs, owner.options.replace(**self._choices))


class _Step:
    """An apply under way."""

    def __init__(self, channel: registration.Channel) -> None:
        self.channel = channel
        self.reduced = False


def _facts(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """What decides an update and lives in Python, where no broadcast reaches it: a difference would go unnoticed."""
    facts: dict[str, Any] = {"the optimizer's class": optimizer.__class__.__name__}
    for key, value in optimizer.get_config().items():
        if key not in _MAY_DIFFER and (value is None or isinstance(value, (bool, int, float, str))):
            facts[f"the optimizer's {key}"] = value
    return facts


def _ready(label: str, gradient: Any, variable: Any, present: bool) -> tf.Tensor | None:
    if gradient is None:
        return tf.zeros(variable.shape, _dtype(variable)) if present else None
    if not present:
        raise InvalidError(
            f"optimizer {label!r}: the gradient of {_name(variable)!r} was None on all ranks in the first step and is "
            "there now; a variable that gets its gradient later needs a zero gradient in the first step"
        )
    _refuse_gradient(label, gradient, variable)
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(variable.shape), tf.int64))
    # Keras casts too, but only in its update step: after the reduction
    return tf.cast(tf.convert_to_tensor(gradient), _dtype(variable))


def _refuse_gradient(label: str, gradient: Any, variable: Any) -> None:
    if getattr(variable, "overwrite_with_gradient", False):
        raise InvalidError(
            f"optimizer {label!r}: variable {_name(variable)!r} is overwritten with its gradient (float8 training), "
            "which cannot be reduced yet; train in float32 or bfloat16"
        )
    if gradient is None:
        return
    dtype = tf.as_dtype(gradient.dtype) if hasattr(gradient, "dtype") else tf.convert_to_tensor(gradient).dtype
    if not dtype.is_floating:
        raise InvalidError(
            f"optimizer {label!r}: the gradient of {_name(variable)!r} must be of a floating dtype; it is {dtype.name}"
        )


def _refuse_xla(label: str) -> None:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            raise InvalidError(
                f"optimizer {label!r}: the training step is compiled with XLA (jit_compile), and XLA cannot "
                "communicate; use model.compile(..., jit_compile=False) or tf.function(jit_compile=False)"
            )
        graph = getattr(graph, "outer_graph", None)


def _refuse_surroundings(label: str, optimizer: keras.optimizers.Optimizer) -> None:
    if tf.distribute.has_strategy():
        raise InvalidError(
            f"optimizer {label!r}: it cannot run inside a tf.distribute strategy as well; leave the strategy out and "
            "start one process per device"
        )
    # compile() wraps the optimizer under a mixed_float16 policy and leaves no mark on it: only the callers know
    module = keras.optimizers.LossScaleOptimizer.__module__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # reading f_locals keeps a frame's locals alive, so only Keras' own frames are looked into
        if frame.f_globals.get("__name__") == module and _inner(frame.f_locals.get("self")) is optimizer:
            raise InvalidError(
                f"optimizer {label!r}: a LossScaleOptimizer (policy mixed_float16) decides on each rank alone whether "
                "a step is taken, so that ranks would wait for ever; use the policy mixed_bfloat16, or "
                "model.compile(..., auto_scale_loss=False) with a loss_scale_factor of the optimizer"
            )
        frame = frame.f_back


def _inner(caller: Any) -> Any:
    return getattr(caller, "inner_optimizer", None)


def _any(gradients: Sequence[tf.Tensor | None]) -> bool:
    return any(gradient is not None for gradient in gradients)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(variable.dtype)
