"""Optimizers of tf_keras (Keras 2): in `fit`, `minimize`, `apply_gradients` and `compute_gradients` they reduce.

Keras 2 has a hook for this: where the replicas of a tf.distribute strategy would add up their gradients, before
clipping, weight decay and moving averages. The optimizer inside of a loss-scale optimizer is asked at the same place,
before anybody looks whether the gradients are finite, so that all ranks skip a step together. This module never imports
tf_keras: whoever has an optimizer of it has imported it.

As in Horovod, `compute_gradients` gives reduced gradients. They are marked, so that the `apply_gradients` that follows
does not reduce them again, whether or not the caller asks it to skip the reduction.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import weakref
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers import checks, models
from hvd_ext.keras.optimizers.keras2_accumulation import Accumulation, Pairs
from hvd_ext.keras.optimizers.wrapper import Distributed, put_in_front, refuse_around
from hvd_ext.options import Sum, compatibility
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import identity, kinds
from hvd_ext.tensorflow.gradients.reducer import Distribution, Reducer
from hvd_ext.tensorflow.skipping import Skipping

# The two ways to tell an optimizer that its gradients are reduced already: since Keras 2.11, and before.
_SKIP, _AGGREGATE = "skip_gradients_aggregation", "experimental_aggregate_gradients"
_PASSES_AND_SCALE = (
    "backward_passes_per_step: gradients would be added up before the loss-scale optimizer sees whether they are "
    "finite; use one pass and a larger batch, or the policy mixed_bfloat16"
)


@dataclasses.dataclass(eq=False)
class Keras2Distribution(Distribution):
    """What a wrapped optimizer of Keras 2 has of ours.

    Args:
        skipping: counts skipped steps, with a loss scale.
        applying: whether an apply_gradients with reduced gradients is under way.
        computes: whether compute_gradients has been called.
    """

    skipping: Skipping | None = None
    accumulation: Accumulation | None = None
    applying: bool = False
    computes: bool = False


def wrap(optimizer: Any, label: str, options: GradientOptions) -> Any:
    """Make an optimizer of tf_keras reduce its gradients; `hvd_ext.DistributedOptimizer` calls it.

    Args:
        optimizer: a `tf_keras.optimizers.Optimizer`, one of `tf_keras.optimizers.legacy`, or a loss-scale optimizer
            of tf_keras.
        options: of the reduction. The gradients of backward_passes_per_step are added up in variables that are not
            saved with the optimizer.

    Returns:
        The same object, whose class is still the plain one in files.

    Raises:
        InvalidError: the optimizer cannot be wrapped; the message says what to do.
    """
    _check(optimizer)
    if refused := compatibility.refused(options.features | {"Keras 2"}):
        raise InvalidError(f"optimizer {label!r}: {refused}")
    if options.check_every:
        raise InvalidError(f"check_every ({options.check_every}): is not supported for optimizers of tf_keras")
    model_class = sys.modules["tf_keras"].Model
    models.watch(model_class)
    scaling = _inner(optimizer) is not None
    if scaling and options.backward_passes_per_step > 1:
        raise InvalidError(_PASSES_AND_SCALE)
    reducer = Reducer(identity.of_optimizer(label, _name(_inner(optimizer) or optimizer)), options)
    distribution = Keras2Distribution(
        reducer,
        weakref.ref(optimizer),
        skipping=Skipping(label) if scaling else None,
        accumulation=Accumulation(options) if options.backward_passes_per_step > 1 else None,
    )
    put_in_front(optimizer, distribution, Keras2 if scaling else Legacy if _is_legacy(optimizer) else Aggregating)
    weakref.finalize(optimizer, reducer.close).atexit = False
    models.drop_traced_steps(optimizer, model_class)
    return optimizer


class Keras2(Distributed):
    """A wrapped optimizer of Keras 2; a loss-scale optimizer, old or new, whose inner optimizer stays plain."""

    _hvd_ext: Keras2Distribution

    def check_local(self) -> None:
        """Raise `InvalidError` if local variables would change reduced gradients (global_clipnorm) or skipped steps."""
        if _inner(self) is not None:
            raise InvalidError(
                "local variables: a tf_keras LossScaleOptimizer skips a step on the rank whose local gradient is not "
                "finite, and on no other, so that the ranks' weights would differ; use the policy mixed_bfloat16"
            )
        super().check_local()

    @ops.plain
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """Compute gradients and reduce them over the ranks; see `tf_keras.optimizers.Optimizer.compute_gradients`.

        Args:
            loss: a function without arguments, or a tensor that `tape` has recorded.
            var_list: the variables, or a function that gives them.
            tape: a plain `tf.GradientTape`.

        Returns:
            Pairs of a gradient or None, and its variable, for `apply_gradients`, which does not reduce them again. With
            backward_passes_per_step they are this rank's sums so far, except after the last pass before an update.

        Raises:
            InvalidError, MismatchError, NotInitializedError: as `apply_gradients`.
        """
        return self._compute_gradients(loss, var_list, tape=tape)

    @ops.plain
    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        plain = super()
        if hasattr(plain, "_compute_gradients"):  # the legacy ones
            return self._computed(plain._compute_gradients(loss, var_list, grad_loss, tape=tape))
        if grad_loss is not None:
            raise InvalidError(f"optimizer {_name(self)!r}: grad_loss must be None; only legacy optimizers have it")
        return self._computed(plain.compute_gradients(loss, var_list, tape=tape))

    @ops.plain
    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Give the gradients of a loss in a graph, reduced over the ranks; of legacy optimizers.

        Args:
            loss: a tensor of the graph.
            params: the variables.

        Returns:
            The gradients, for `apply_gradients`.
        """
        params = tf.nest.flatten(params)
        pairs = zip(super().get_gradients(loss, params), params, strict=True)
        return [gradient for gradient, _ in self._computed(list(pairs))]

    @ops.plain
    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **keywords: Any) -> Any:
        """Apply one step's gradients, reduced over the ranks; see `tf_keras.optimizers.Optimizer.apply_gradients`.

        Args:
            grads_and_vars: pairs of a gradient or None, and its variable. Those of `compute_gradients` are reduced
                already; if they were changed since, they are averaged once more, which changes nothing.
            *arguments: as in tf_keras.
            **keywords: as in tf_keras; with skip_gradients_aggregation=True or experimental_aggregate_gradients=False
                the gradients are taken for reduced ones.

        Returns:
            What tf_keras returns. With backward_passes_per_step the step counter, which counts updates.

        Raises:
            InvalidError: the gradients cannot be reduced, or may be reduced already; the message says what to do.
            MismatchError: the ranks' options or variables differ.
            NotInitializedError: before `init()`.
        """
        pairs = list(grads_and_vars)
        plain = super().apply_gradients
        if not pairs:
            return plain(pairs, *arguments, **keywords)
        steps, accumulation = self._steps, self._hvd_ext.accumulation
        if self._is_reduced(pairs) or not _asks_for_reduction(plain, arguments, keywords):
            if accumulation is None or not self._hvd_ext.computes:
                return self._applied(plain, pairs, arguments, keywords)
            accumulation.when_due(lambda: self._applied(plain, pairs, arguments, keywords))
            return steps
        pairs = self._unmarked(pairs)
        if accumulation is None:
            return self._applied(plain, self._reduced(pairs), arguments, keywords)
        accumulation.step(pairs, lambda sums: self._applied(plain, self._reduced(sums), arguments, keywords))
        return steps

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidError(
            f"optimizer {_name(self)!r}: optimizers of Keras 2 are not pickled; make another from get_config(), and "
            "wrap that"
        )

    def _applied(self, plain: Any, pairs: Pairs, arguments: Any, keywords: Any) -> Any:
        self._hvd_ext.applying = True
        skipping = self._hvd_ext.skipping if getattr(self, "dynamic", False) else None
        before = None if skipping is None else tf.convert_to_tensor(self.loss_scale)
        try:
            applied = plain(pairs, *arguments, **keywords)
            if skipping is not None:
                scale, finite_steps = tf.convert_to_tensor(self.loss_scale), self.dynamic_counter
                # a skipped step counts in tf_keras' iterations; a step after which the scale rises resets the counter
                skipping.count(tf.logical_or(tf.not_equal(finite_steps, 0), scale > before), scale > 1)
            return applied
        finally:
            self._hvd_ext.applying = False

    def _computed(self, pairs: Pairs) -> Pairs:
        if not pairs or _applies_at_once(self):
            return pairs
        self._hvd_ext.computes = True
        if self._hvd_ext.accumulation is None:
            return self._marked(self._reduced(pairs))
        return self._marked(self._hvd_ext.accumulation.gathered(pairs, self._reduced))

    def _aggregated(self, plain: Any, pairs: Any) -> Pairs:
        """Reduce for a loss-scale optimizer around this one, or for a caller who applies the gradients afterwards."""
        pairs = list(pairs)
        if self._hvd_ext.applying or not pairs:
            return plain(pairs)
        if not self._is_reduced(pairs):
            if self._hvd_ext.accumulation is not None:
                raise InvalidError(_PASSES_AND_SCALE)
            pairs = self._reduced(self._unmarked(pairs))
        return self._marked(plain(pairs))

    @property
    def _steps(self) -> tf.Variable:
        with tf.init_scope():
            return self.iterations

    def _reduced(self, pairs: Pairs) -> Pairs:
        gradients, variables = zip(*pairs, strict=True)
        reducer = self._hvd_ext.reducer
        step = reducer.begin(
            list(gradients),
            list(variables),
            lambda: checks.settings(self),
            refuse=lambda: refuse_around(self, reducer.label),
        )
        return list(zip(step.reduce_all(self._steps), variables, strict=True))

    def _marked(self, pairs: Pairs) -> Pairs:
        # copies, since the gradient of a local variable may be the caller's own object
        reducer = self._hvd_ext.reducer
        return [
            (None if gradient is None else kinds.reduced_copy(gradient, reducer), variable)
            for gradient, variable in pairs
        ]

    def _is_reduced(self, pairs: Pairs) -> bool:
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        return bool(gradients) and all(kinds.reduced_by(gradient) is self._hvd_ext.reducer for gradient in gradients)

    def _unmarked(self, pairs: Pairs) -> Pairs:
        """Take the marks off gradients that are not all marked, so that they are reduced; refuse if that is unsafe."""
        if not self._hvd_ext.computes:
            return pairs
        options = self._hvd_ext.reducer.options
        divided = bool(self._hvd_ext.reducer.local_keys) and options.scale_local_gradients
        if options.op == Sum or divided or self._hvd_ext.accumulation is not None:
            raise InvalidError(
                f"optimizer {_name(self)!r}: it cannot tell whether the gradients given to apply_gradients were "
                "reduced by its compute_gradients and then changed; with op=Sum, local variables or "
                f"backward_passes_per_step that matters. If they were, add {_SKIP}=True (legacy optimizers: "
                f"{_AGGREGATE}=False); for gradients of a tape of your own wrap a second optimizer"
            )
        reducer = self._hvd_ext.reducer
        return [
            (kinds.reduced_copy(gradient, None) if kinds.reduced_by(gradient) is reducer else gradient, variable)
            for gradient, variable in pairs
        ]


class Aggregating(Keras2):
    """An optimizer since Keras 2.11."""

    @ops.plain
    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Reduce gradients over the ranks; see `tf_keras.optimizers.Optimizer.aggregate_gradients`."""
        return self._aggregated(super().aggregate_gradients, grads_and_vars)


class Legacy(Keras2):
    """An optimizer of `tf_keras.optimizers.legacy`."""

    @ops.plain
    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return self._aggregated(super()._aggregate_gradients, grads_and_vars)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a copy is plain, as one from the configuration
        memo[id(self._hvd_ext)] = None
        return super().__deepcopy__(memo)


def _applies_at_once(optimizer: Any) -> bool:
    """Whether tf_keras computes gradients in its own `minimize` or `get_updates`, which then has them reduced.

    The method may be that of a loss-scale optimizer around this one: `compile` makes it, and leaves no mark.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name in ("minimize", "get_updates") and frame.f_globals["__name__"].startswith("tf_keras."):
            caller = frame.f_locals.get("self")
            if caller is optimizer or _inner(caller) is optimizer:
                return True
    return False


def _asks_for_reduction(plain: Any, arguments: Any, keywords: Any) -> bool:
    """Whether the caller of `apply_gradients` wants the gradients reduced."""
    by_name = inspect.signature(plain).bind_partial(None, *arguments, **keywords).arguments
    by_name = {**by_name, **by_name.get("kwargs", {})}
    return not by_name.get(_SKIP, False) and bool(by_name.get(_AGGREGATE, True))


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", None)


def _name(optimizer: Any) -> str:
    with tf.init_scope():  # the configuration reads variables, also while a step is traced
        return str(optimizer.get_config().get("name") or optimizer.__class__.__name__)  # a loss-scale one has no name


def _is_legacy(optimizer: Any) -> bool:
    return isinstance(optimizer, sys.modules["tf_keras"].optimizers.legacy.Optimizer)


def _check(optimizer: Any) -> None:
    inner = _inner(optimizer)
    if isinstance(inner, Distributed):
        raise InvalidError(
            f"optimizer {_name(inner)!r}, inside of a loss-scale optimizer: it is wrapped already; wrap the outer one "
            "only"
        )
    if not _is_legacy(optimizer):
        return
    default = sys.modules["tf_keras"].optimizers.legacy.SGD().gradient_aggregator
    if getattr(inner or optimizer, "gradient_aggregator", None) not in (None, default):
        raise InvalidError(
            f"optimizer {_name(optimizer)!r}: its gradient_aggregator would replace the reduction over the ranks; "
            "leave it out"
        )
