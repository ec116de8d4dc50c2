"""`LARS`: SGD with momentum and a rate of its own for each layer, for large batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.layerwise import BIASES_AND_NORMALIZATION, Layerwise, Parallel, number


@keras.saving.register_keras_serializable("hvd_ext")
class LARS(Layerwise):
    """SGD with momentum whose rate for a variable grows with the norm of its weights and falls with its gradient's.

    For weights w, a gradient g, the weight decay d, the momentum m and the learning rate r of a step:

        trust = trust_coefficient |w| / (|g| + d |w|)          (CommLib, MLSys 2021, Eq. 11; You et al. 2018)
        u = g + d w
        v = m v + r trust u;    w = w - v                      rate_in_momentum=True
        v = m v + trust u;      w = w - r v                    rate_in_momentum=False

    Where |w| is 0 or both |g| and d |w| are, the trust ratio is 1, within the limits; for excluded variables it is 1.
    It works in plain Keras too, without `hvd_ext.init()`. A gradient of slices, as of an embedding, is made dense.

    Args:
        learning_rate: a number, a schedule of Keras, or a function without arguments.
        momentum: a number from 0 and below 1, which `optimizer.momentum = 0.95` sets between steps, without a new trace
            and in saved files too; or a `keras.optimizers.schedules.LearningRateSchedule` of the steps.
        nesterov: take the step m v + r trust u in place of v, with v as just updated.
        rate_in_momentum: whether velocities contain the learning rates of their own steps.
        trust_coefficient: the factor of all trust ratios, above 0.
        weight_decay: d, at least 0.
        exclude_from_trust: patterns (`re.search`) of the paths of variables that the plain learning rate holds for; by
            default biases and the variables of normalisation layers; () excludes none.
        exclude_from_weight_decay: patterns of the paths of variables whose d is 0, as above.
        min_trust: the least trust ratio.
        max_trust: the greatest; None: there is none.
        parallel: whether the ranks of a `hvd_ext.DistributedOptimizer` divide the norms among themselves (CommLib,
            section 4.2); the weights have the same bits either way. "auto" tries both in the first steps, and takes the
            faster; on a GPU it does not divide them.
        name: the optimizer's name; None: a numbered one.
        **options: clipnorm, use_ema, gradient_accumulation_steps and the other options of every optimizer of Keras.

    Raises:
        InvalidError: an argument breaks its rule.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: Any = 0.9,
        *,
        nesterov: bool = False,
        rate_in_momentum: bool = True,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0,
        exclude_from_trust: Sequence[str] = BIASES_AND_NORMALIZATION,
        exclude_from_weight_decay: Sequence[str] = BIASES_AND_NORMALIZATION,
        min_trust: float = 0.0,
        max_trust: float | None = None,
        parallel: Parallel = "auto",
        name: str | None = None,
        **options: Any,
    ) -> None:
        scheduled = isinstance(momentum, keras.optimizers.schedules.LearningRateSchedule)
        if not scheduled:
            number("momentum", momentum, 0, 1)
        number("trust_coefficient", trust_coefficient, 0)
        if trust_coefficient == 0:
            raise InvalidError("trust_coefficient (0): must be above 0, or no layer would move")
        super().__init__(
            learning_rate,
            weight_decay,
            exclude_from_trust,
            exclude_from_weight_decay,
            min_trust,
            max_trust,
            parallel,
            name=name,
            **options,
        )
        self.nesterov, self.rate_in_momentum = bool(nesterov), bool(rate_in_momentum)
        self.trust_coefficient = float(trust_coefficient)
        self._momentum = momentum
        if not scheduled:
            self._momentum = self.add_variable(
                shape=(),
                initializer=keras.initializers.Constant(float(momentum)),
                dtype=keras.config.floatx(),
                aggregation="only_first_replica",
                name="momentum",
            )

    @property
    def momentum(self) -> Any:
        """The momentum of the next step: a variable, or the value of a schedule."""
        if isinstance(self._momentum, keras.optimizers.schedules.LearningRateSchedule):
            return self._momentum(self._iterations)
        return self._momentum

    @momentum.setter
    def momentum(self, value: Any) -> None:
        """Set the momentum of the steps that follow."""
        if not isinstance(self._momentum, keras.Variable):
            raise InvalidError(
                f"momentum ({value!r}): optimizer {self.name!r} was made with a schedule of its momentum, which cannot "
                "be set; make it with a number"
            )
        number("momentum", value, 0, 1)
        self._momentum.assign(value)

    def build(self, variables: Sequence[Any]) -> None:
        """Make a velocity for each variable; see `Layerwise.build`."""
        if self.built:
            return
        super().build(variables)
        (self.momentums,) = self._slots(variables, "momentum")

    def get_config(self) -> dict[str, Any]:
        """Give the arguments of the constructor, with the momentum as it is now."""
        if isinstance(self._momentum, keras.Variable):
            momentum = float(str(self._momentum.numpy()))
        else:
            momentum = keras.optimizers.schedules.serialize(self._momentum)
        return super().get_config() | {
            "momentum": momentum,
            "nesterov": self.nesterov,
            "rate_in_momentum": self.rate_in_momentum,
            "trust_coefficient": self.trust_coefficient,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> LARS:
        """Make an optimizer from what `get_config` gave."""
        config = dict(config)
        if isinstance(config.get("momentum"), dict):
            config["momentum"] = keras.optimizers.schedules.deserialize(config["momentum"], custom_objects)
        return super().from_config(config, custom_objects)

    def _update(self, gradients: list[Any], variables: list[Any], learning_rate: Any) -> None:
        places, gradients = self._places(variables), self._dense(gradients, variables)
        decays = self._decays(places)
        trust = self._ratios(places, *self._norms(variables, gradients))
        rate = tf.cast(learning_rate, tf.float64)
        into, out = (trust * rate, None) if self.rate_in_momentum else (trust, rate)
        if self._in_one_pass(variables, gradients, places, decays, into, out):
            return
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            dtype, velocity = variable.dtype, self.momentums[places[index]]
            momentum = ops.cast(self.momentum, dtype)
            update = gradient if not decays[index] else gradient + ops.cast(decays[index], dtype) * variable
            update = ops.cast(into[index], dtype) * update
            self.assign(velocity, momentum * velocity + update)
            step = momentum * velocity + update if self.nesterov else velocity
            self.assign_sub(variable, step if out is None else ops.cast(out, dtype) * step)

    def _ratios(self, places: list[int], weights: Any, gradients: Any) -> Any:
        """Give the trust ratios of variables, from the norms of their weights and of their gradients, float64."""
        return self._trust(places, self.trust_coefficient * weights, gradients + self._decays(places) * weights)

    def _rates_after(self, variables: Sequence[Any], gradients: Any) -> Any:
        """Give the rates of the step under way from the gradients' norms in the step before, float64; 0: not known."""
        places = self._places(variables)
        trust = self._ratios(places, self._norms_of(variables), gradients)
        known = ops.logical_or(gradients > 0, np.array([not self._has_trust[place] for place in places]))
        return tf.cast(self._get_current_learning_rate(), tf.float64) * ops.where(known, trust, ops.zeros_like(trust))

    def _in_one_pass(
        self, variables: list[Any], gradients: list[Any], places: list[int], decays: Any, into: Any, out: Any
    ) -> bool:
        """Update all variables with one op, where that is possible."""
        from hvd_ext.tensorflow import updates

        device = self._device_of_update(variables)
        if device is None:
            return False
        updates.apply_lars(
            variables,
            [self.momentums[place] for place in places],
            gradients,
            tf.cast(into, tf.float32),
            tf.cast(tf.convert_to_tensor(self.momentum), tf.float32),
            tf.constant(1.0) if out is None else tf.cast(out, tf.float32),
            decays,
            self.nesterov,
            device,
        )
        return True
