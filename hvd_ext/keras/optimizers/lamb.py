"""`LAMB`: Adam with a rate of its own for each layer, for large batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.layerwise import BIASES_AND_NORMALIZATION, Layerwise, Parallel, number


@keras.saving.register_keras_serializable("hvd_ext")
class LAMB(Layerwise):
    """Adam whose update of a variable is scaled to the norm of the variable's weights.

    For weights w, a gradient g, the weight decay d and the learning rate r of step t, from 1:

        m = beta_1 m + (1 - beta_1) g;    v = beta_2 v + (1 - beta_2) g^2
        u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + d w
        w = w - r |w| / |u| u             (You et al., ICLR 2020, Algorithm 2)

    Where a norm is 0, the trust ratio |w| / |u| is 1, within the limits; for excluded variables it is 1. Without
    exclusions, weight decay and limits this is `keras.optimizers.Lamb`. It works in plain Keras too, without
    `hvd_ext.init()`. A gradient of slices, as of an embedding, is made dense.

    Args:
        learning_rate: a number, a schedule of Keras, or a function without arguments.
        beta_1: the decay of the average of gradients, from 0 and below 1.
        beta_2: the decay of the average of their squares, from 0 and below 1.
        epsilon: above 0.
        weight_decay: as for `hvd_ext.optimizers.LARS`, and so are all that follow.

    Raises:
        InvalidError: an argument breaks its rule.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        weight_decay: float = 0.0,
        exclude_from_trust: Sequence[str] = BIASES_AND_NORMALIZATION,
        exclude_from_weight_decay: Sequence[str] = BIASES_AND_NORMALIZATION,
        min_trust: float = 0.0,
        max_trust: float | None = None,
        parallel: Parallel = "auto",
        name: str | None = None,
        **options: Any,
    ) -> None:
        number("beta_1", beta_1, 0, 1)
        number("beta_2", beta_2, 0, 1)
        number("epsilon", epsilon, 0)
        if epsilon == 0:
            raise InvalidError("epsilon (0): must be above 0, or a gradient of 0 would be divided by 0")
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
        self.beta_1, self.beta_2, self.epsilon = float(beta_1), float(beta_2), float(epsilon)

    def build(self, variables: Sequence[Any]) -> None:
        """Make two averages for each variable; see `Layerwise.build`."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self._slots(variables, "momentum", "velocity")

    def get_config(self) -> dict[str, Any]:
        """Give the arguments of the constructor."""
        return super().get_config() | {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}

    def _update(self, gradients: list[Any], variables: list[Any], learning_rate: Any) -> None:
        places, gradients = self._places(variables), self._dense(gradients, variables)
        decays, device = self._decays(places), self._device_of_update(variables)
        step = ops.cast(self.iterations + 1, "float64")
        # in float64 from the start: 1 - 0.999 of float32 numbers is wrong by 1e-5 of itself
        betas = tf.constant([self.beta_1, self.beta_2], tf.float64)
        unbias = 1 / (1 - tf.pow(betas, step))
        if device is None:
            found = self._updates(gradients, variables, places, decays, unbias)
        else:
            found = self._updates_in_one_pass(gradients, variables, places, decays, unbias, device)
        rates = self._trust(places, *self._norms(variables, found)) * tf.cast(learning_rate, tf.float64)
        if device is None:
            for index, (update, variable) in enumerate(zip(found, variables, strict=True)):
                self.assign_sub(variable, ops.cast(rates[index], variable.dtype) * update)
        else:
            from hvd_ext.tensorflow import updates

            updates.subtract(variables, found, tf.cast(rates, tf.float32), device)

    def _updates(
        self, gradients: list[Any], variables: list[Any], places: list[int], decays: Any, unbias: Any
    ) -> list[Any]:
        """Update the averages, and give what is subtracted from the weights, in Keras' operations."""
        found = []
        for gradient, variable, place, decay in zip(gradients, variables, places, decays, strict=True):
            dtype, m, v = variable.dtype, self._momentums[place], self._velocities[place]
            self.assign_add(m, (gradient - m) * (1 - self.beta_1))
            self.assign_add(v, (ops.square(gradient) - v) * (1 - self.beta_2))
            root = ops.sqrt(v * ops.cast(unbias[1], dtype)) + self.epsilon
            update = m * ops.cast(unbias[0], dtype) / root
            found.append(update + ops.cast(decay, dtype) * variable if decay else update)
        return found

    def _updates_in_one_pass(
        self, gradients: list[Any], variables: list[Any], places: list[int], decays: Any, unbias: Any, device: str
    ) -> list[Any]:
        """Do the same with one op."""
        from hvd_ext.tensorflow import updates

        averages = [[slots[place] for place in places] for slots in (self._momentums, self._velocities)]
        betas = self.beta_1, self.beta_2
        unbias = tf.cast(unbias, tf.float32)
        return updates.lamb_updates(
            variables, (averages[0], averages[1]), gradients, unbias, betas, self.epsilon, decays, device
        )
