"""What `LARS` and `LAMB` share: a rate of its own for each variable, from norms of its weights and its update."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from hvd_ext.keras.optimizers.wrapper import KerasDistribution
    from hvd_ext.options.gradients import GradientOptions

# Biases, and the factors and offsets of normalisation layers, as Keras 3 names them. Their norms say nothing about the
# scale of their updates: they often begin at 0 or 1.
BIASES_AND_NORMALIZATION = (r"(^|/)(bias|gamma|beta|scale)$",)

Parallel = Literal["auto", True, False]


class Layerwise(keras.optimizers.Optimizer):
    """An optimizer whose rate for a variable is the learning rate times the variable's trust ratio.

    Args:
        weight_decay: at least 0; added to the update inside of the norm, not subtracted beside it as Keras does.
        max_trust: the greatest, above 0 and not below min_trust; None: there is none.

    Raises:
        InvalidError: an argument breaks its rule.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float,
        exclude_from_trust: Sequence[str],
        exclude_from_weight_decay: Sequence[str],
        min_trust: float,
        max_trust: float | None,
        parallel: Parallel,
        **options: Any,
    ) -> None:
        number("weight_decay", weight_decay, 0)
        number("min_trust", min_trust, 0)
        if max_trust is not None and not (_is_number(max_trust) and 0 < max_trust >= min_trust):
            raise InvalidError(
                f"max_trust ({max_trust!r}): must be a number above 0, and at least min_trust, which is {min_trust}; "
                "None means no limit"
            )
        if parallel not in get_args(Parallel) or (isinstance(parallel, int) and not isinstance(parallel, bool)):
            raise InvalidError(f"parallel ({parallel!r}): must be 'auto', True or False")
        trust = _patterns("exclude_from_trust", exclude_from_trust)
        decay = _patterns("exclude_from_weight_decay", exclude_from_weight_decay)
        if not callable(learning_rate):
            number("learning_rate", learning_rate, 0)
            learning_rate = float(learning_rate)
        super().__init__(learning_rate=learning_rate, weight_decay=float(weight_decay), **options)
        self.min_trust, self.max_trust = float(min_trust), None if max_trust is None else float(max_trust)
        self.parallel = parallel
        self._trust_patterns, self._decay_patterns = trust, decay

    _hvd_ext: KerasDistribution | None = None  # where the ranks that reduce its gradients may divide the norms

    def _check_parallel(self, options: GradientOptions) -> None:
        """Raise `InvalidError` if parallel is True and steps do not wait for all ranks."""
        if self.parallel is True and not options.waits_for_all:
            wrapped = f"sync={options.sync!r}" if options.partial else "local_steps"
            raise InvalidError(
                f"parallel (True): optimizer {self.name!r} is wrapped with {wrapped}, whose steps "
                "do not wait for all ranks, as norms that all ranks divide would; use parallel='auto' or False"
            )

    def build(self, variables: Sequence[Any]) -> None:
        """Make the slots, and find which variables have a trust ratio and a weight decay."""
        if self.built:
            return
        super().build(list(variables))
        self._has_trust = [not _matches(self._trust_patterns, variable) for variable in variables]
        self._has_decay = [
            not _matches(self._decay_patterns, variable) and self._use_weight_decay(variable) for variable in variables
        ]

    def _slots(self, variables: Sequence[Any], *names: str) -> list[list[Any]]:
        """Make zeros like each variable, a list for each name, in Keras' order; Keras 3.8 has no method for this."""
        by_variable = [
            [self.add_variable_from_reference(variable, name=name) for name in names] for variable in variables
        ]
        return [[slots[place] for slots in by_variable] for place in range(len(names))]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable by a gradient of its shape, or slices of it."""
        self._update([gradient], [variable], learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Give the arguments of the constructor."""
        return super().get_config() | {
            "exclude_from_trust": list(self._trust_patterns),
            "exclude_from_weight_decay": list(self._decay_patterns),
            "min_trust": self.min_trust,
            "max_trust": self.max_trust,
            "parallel": self.parallel,
        }

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing: the decay is a part of the update, inside of its norm."""

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        if tf.distribute.has_strategy():
            super()._backend_update_step(grads, trainable_variables, learning_rate)
        else:
            self._update(list(grads), list(trainable_variables), learning_rate)

    def _update(self, gradients: list[Any], variables: list[Any], learning_rate: Any) -> None:
        """Update variables together."""
        raise NotImplementedError

    def _dense(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[tf.Tensor]:
        """Give gradients as tensors of their variables' shapes and dtypes; slices of one row are added up.

        Norms need static shapes, and a branch of `tf.cond` does not know the shape of slices.
        """
        return [
            tf.ensure_shape(tf.cast(tf.convert_to_tensor(gradient), variable.dtype), variable.shape)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _places(self, variables: Sequence[Any]) -> list[int]:
        return [self._get_variable_index(variable) for variable in variables]

    def _decays(self, places: Sequence[int]) -> np.ndarray:
        """Give each variable's weight decay, float64."""
        return np.array([self.weight_decay if self._has_decay[place] else 0.0 for place in places])

    def _norms(self, variables: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
        """Give the Euclidean norms of variables, and of a tensor for each of them, float64; sums are in float64 too."""
        from hvd_ext.tensorflow import norms

        device = norms.device_of(variables)
        if device is None:
            squares = _plain_squares([*variables, *others])
        else:
            squares = self._squares([*map(tf.convert_to_tensor, variables), *others], variables, device)
        roots = ops.sqrt(squares)
        return roots[: len(variables)], roots[len(variables) :]

    def _norms_of(self, variables: Sequence[Any]) -> Any:
        """Give the norms of variables alone, each rank for itself."""
        from hvd_ext.tensorflow import norms

        device = norms.device_of(variables)
        if device is None:
            return ops.sqrt(_plain_squares(variables))
        return ops.sqrt(norms.squares([tf.convert_to_tensor(variable) for variable in variables], device))

    def _device_of_update(self, variables: Sequence[Any]) -> str | None:
        """Find where ops can update variables, outside of XLA; None where Keras' operations do it."""
        from hvd_ext.tensorflow import norms

        are_float32 = all(tf.as_dtype(variable.dtype) == tf.float32 for variable in variables)
        return norms.device_of(variables) if are_float32 else None

    def _place_of_norms(self, variables: Sequence[Any]) -> str:
        """Say how norms are computed, which ranks must do alike: other sums have other bits, and may be exchanged."""
        from hvd_ext.tensorflow import norms

        device = norms.device_of(variables)
        return "Keras' operations" if device is None else "ops on GPUs" if ":GPU:" in device else "ops on the host"

    def _squares(self, tensors: list[tf.Tensor], variables: Sequence[Any], device: str) -> tf.Tensor:
        """Give the squares of the norms of variables, then of their updates; by the ranks together, if they share."""
        from hvd_ext.job import process_sets
        from hvd_ext.tensorflow import norms, sharing
        from hvd_ext.tensorflow.gradients import kinds

        squares_of = functools.partial(norms.squares, device=device)
        distribution = self._hvd_ext
        step = None if distribution is None else distribution.step
        if distribution is None or step is None or not self.parallel or not distribution.reducer.options.waits_for_all:
            return squares_of(tensors)
        if self.parallel == "auto" and ":GPU:" in device:
            return squares_of(tensors)  # a GPU needs less time than an exchange
        reducer = distribution.reducer
        job = process_sets.runtime_of(reducer.options.process_set)
        if job is None or job.engine.size == 1:
            return squares_of(tensors)
        local = reducer.local_keys
        are_local = [kinds.key(variable) in local for variable in variables] * 2
        if all(are_local):
            return squares_of(tensors)
        local_tensors, shared = (
            [tensor for tensor, is_own in zip(tensors, are_local, strict=True) if is_own == which]
            for which in (True, False)
        )

        together = functools.partial(norms.divided_squares, shared, job, f"{step.name}: norms", device)
        if self.parallel == "auto":
            distribution.trial = distribution.trial or sharing.Trial()
            worst = functools.partial(sharing.maximum, job, f"{step.name}: times")
            squares = distribution.trial.run(shared, lambda divided: together(divided=divided), worst)
        else:
            squares = together()
        if not local_tensors:
            return squares
        places = np.argsort(np.argsort(are_local, kind="stable"), kind="stable")  # those of all ranks come first
        return tf.gather(tf.concat([squares, squares_of(local_tensors)], 0), places)

    def _trust(self, places: Sequence[int], weights: Any, updates: Any) -> Any:
        """Give the trust ratios weights / updates, float64: within the limits, and 1 where a norm is 0 or excluded."""
        both = ops.logical_and(weights > 0, updates > 0)
        ratio = ops.where(both, weights / ops.where(both, updates, ops.ones_like(updates)), ops.ones_like(weights))
        limited = ops.clip(ratio, self.min_trust, math.inf if self.max_trust is None else self.max_trust)
        return ops.where(np.array([self._has_trust[place] for place in places]), limited, ops.ones_like(limited))


def _plain_squares(tensors: Sequence[Any]) -> Any:
    return ops.stack([ops.sum(ops.square(ops.cast(tensor, "float64"))) for tensor in tensors])


def number(name: str, value: Any, least: float, below: float = math.inf) -> None:
    """Check that an argument is a number of a range; `InvalidError` if it is not at least `least` and below `below`."""
    if not _is_number(value) or not least <= value < below:
        end = "" if below == math.inf else f" and below {below:g}"
        raise InvalidError(f"{name} ({value!r}): must be a number, at least {least:g}{end}")


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and not math.isnan(value)


def _patterns(name: str, patterns: Any) -> tuple[str, ...]:
    are_texts = isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns)
    if isinstance(patterns, str) or not are_texts:
        raise InvalidError(
            f"{name} ({patterns!r}): must be a list of patterns, such as ['bias$'], that are searched in variables' "
            "paths"
        )
    for pattern in patterns:
        if not pattern:
            raise InvalidError(f"{name} ({list(patterns)!r}): an empty pattern is found in every path; leave it out")
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidError(f"{name}: {pattern!r} is no regular expression: {error}") from error
    return tuple(patterns)


def _matches(patterns: Sequence[str], variable: Any) -> bool:
    path = getattr(variable, "path", None) or str(variable.name).removesuffix(":0")
    return any(re.search(pattern, path) for pattern in patterns)
