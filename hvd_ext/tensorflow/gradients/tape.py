"""`DistributedGradientTape`: a gradient tape that reduces its gradients over the ranks, for loops without `fit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.options import compatibility, faces
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.options.reduction import ReductionOptions, option
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds, policies
from hvd_ext.tensorflow.gradients.tape_reducers import reducer_for

LABEL = "DistributedGradientTape"
_NONE = tf.UnconnectedGradients.NONE


@dataclasses.dataclass(frozen=True, eq=False)
class TapeArguments(faces.Arguments):
    """The arguments of `DistributedGradientTape`."""

    gradtape: tf.GradientTape
    _: dataclasses.KW_ONLY
    backward_passes_per_step: Literal[1] = option(1, "must be 1, because a tape does not accumulate gradients.")
    average_aggregated_gradients: Literal[False] = option(
        False, "must be False, because it is about backward_passes_per_step."
    )
    check_every: Literal[0] = option(0, "must be 0, because a tape does not see the weights change.")
    local_steps: None = option(None, "must be None, because a tape does not see the weights change.")


@dataclasses.dataclass(frozen=True, eq=False)
class PartialTapeArguments(TapeArguments):
    """The arguments of `PartialDistributedGradientTape`."""

    _: dataclasses.KW_ONLY
    local_layers: Any = None


@faces.takes(TapeArguments)
def DistributedGradientTape(arguments: TapeArguments) -> WrappedTape:  # noqa: N802 - Horovod's name
    """Make a tape's `gradient` return gradients reduced over the ranks; for loops with a plain optimizer.

    The tape itself is changed and returned, so that it may be wrapped before, during or after its recording. All ranks
    call `gradient` alike, and must have equal weights once the first step has been applied (see check_start). Jacobians
    are not reduced. A wrapped optimizer would reduce a second time, and refuses gradients of a wrapped tape: wrap
    either the tape or the optimizer.

    Args:
        gradtape: a `tf.GradientTape`.

    Returns:
        The same object, with `register_local_source` and `get_local_and_global_gradients` added.

    Raises:
        InvalidError: the tape cannot be wrapped, or an argument breaks its rule; the message says what to do.
        PlanError: there is no algorithm of this name.
    """
    _refuse(arguments)
    return _wrapped(LABEL, arguments.gradtape, (), arguments.options())


@faces.takes(PartialTapeArguments, as_for="hvd_ext.DistributedGradientTape")
def PartialDistributedGradientTape(arguments: PartialTapeArguments) -> WrappedTape:  # noqa: N802 - Horovod's name
    """Make a tape's `gradient` return reduced gradients, except for the weights of some layers, which are local.

    Args:
        gradtape: a `tf.GradientTape`.
        local_layers: a Keras layer or a list of layers. Their gradients are not reduced; they are divided by the number
            of ranks unless scale_local_gradients is False. None for no layer.

    Returns:
        The same object.

    Raises:
        InvalidError: an element of local_layers is not a layer; and as `DistributedGradientTape`.
        PlanError: as `DistributedGradientTape`.
    """
    local_layers = arguments.local_layers
    layers = [local_layers] if hasattr(local_layers, "trainable_weights") else list(local_layers or ())
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidError(f"local_layers ({layer!r}): must be Keras layers")
    _refuse(arguments)
    return _wrapped("PartialDistributedGradientTape", arguments.gradtape, layers, arguments.options())


@dataclasses.dataclass(eq=False)
class Reduction:
    """How a wrapped tape reduces, in its one attribute `_hvd_ext`.

    Args:
        options: of the reduction.
        local: return the sources that are not reduced.
        plain: whether the tape reduces nothing now.
    """

    options: GradientOptions
    local: list[Callable[[], Iterable[Any]]]
    plain: bool = False


class Distributed:
    """The class that `DistributedGradientTape` puts in front of the tape's own; wrapped tapes are its instances."""

    _hvd_ext: Reduction

    @ops.plain
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = _NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients reduced over the ranks; see `tf.GradientTape.gradient`.

        Args:
            target: the tensors to differentiate.
            sources: variables of Keras or TensorFlow, or tensors of known shape, in any nesting; in the same order on
                all ranks.
            output_gradients: as in TensorFlow.
            unconnected_gradients: as in TensorFlow. A bool is taken for use_generic_names, Horovod's fourth argument.
            use_generic_names: identify the sources by their places in the list, instead of by their names; the ranks
                compare either.

        Returns:
            The sums or averages, nested as the sources, with equal bits on all ranks; None where no rank has the
            gradient.

        Raises:
            InvalidError: a source that cannot be reduced.
            MismatchError: the ranks' sources or options differ.
            NotInitializedError: before `init()`.
        """
        if isinstance(unconnected_gradients, bool):
            unconnected_gradients, use_generic_names = _NONE, unconnected_gradients
        local = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        if self._hvd_ext.plain:
            return local
        flat = tf.nest.flatten(sources)
        places = self._local_places(flat)
        reduced = _reduced(self._hvd_ext.options, tf.nest.flatten(local), flat, places, use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *arguments: Any, **keywords: Any) -> Any:
        """Return this rank's own jacobian; see `tf.GradientTape.jacobian`."""
        return self._own(super().jacobian, arguments, keywords)  # type: ignore[misc]

    def batch_jacobian(self, *arguments: Any, **keywords: Any) -> Any:
        """Return this rank's own jacobian for each example; see `tf.GradientTape.batch_jacobian`."""
        return self._own(super().batch_jacobian, arguments, keywords)  # type: ignore[misc]

    def register_local_source(self, source: Any) -> None:
        """Make a source local: its gradient is not reduced, only scaled (`scale_local_gradients`).

        Args:
            source: a variable of Keras or TensorFlow, or a tensor.
        """
        self._hvd_ext.local.append(lambda: (source,))

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the gradients as `gradient` does, with the local sources in a list of their own.

        Args:
            target: as for `gradient`.
            sources: as for `gradient`; nested sources are flattened.
            output_gradients: as for `gradient`.
            use_generic_names: as for `gradient`.

        Returns:
            Two lists of pairs (source, gradient): first the local sources, then all others.
        """
        flat = tf.nest.flatten(sources)
        places = frozenset(self._local_places(flat))
        gradients = self.gradient(target, flat, output_gradients, use_generic_names=use_generic_names)
        pairs = list(enumerate(zip(flat, gradients, strict=True)))
        return [pair for place, pair in pairs if place in places], [
            pair for place, pair in pairs if place not in places
        ]

    def _local_places(self, sources: Sequence[Any]) -> tuple[int, ...]:
        local = {kinds.key(source) for give in self._hvd_ext.local for source in give()}
        return tuple(place for place, source in enumerate(sources) if kinds.key(source) in local)

    def _own(self, method: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        # TensorFlow's jacobians call self.gradient for each element, in a loop in which no reduction can run
        self._hvd_ext.plain = True
        try:
            return method(*arguments, **keywords)
        finally:
            self._hvd_ext.plain = False


if TYPE_CHECKING:

    class WrappedTape(Distributed, tf.GradientTape):
        """The type of a wrapped tape for type checkers; `_distributed_class` makes the class at run time."""


def _refuse(options: ReductionOptions) -> None:
    """Refuse options that only optimizers support; a tape returns its gradients at every call."""
    if options.local_steps is not None:
        raise InvalidError(compatibility.words("local steps", "tape"))
    if options.backward_passes_per_step != 1:
        raise InvalidError(
            f"backward_passes_per_step ({options.backward_passes_per_step!r}): must be 1, because a tape does not "
            "accumulate gradients; add the gradients of several plain tapes and call hvd_ext.allreduce, or give the "
            "Keras optimizer gradient_accumulation_steps and wrap the optimizer instead of the tape"
        )
    if options.average_aggregated_gradients:
        raise InvalidError(
            f"average_aggregated_gradients ({options.average_aggregated_gradients!r}): it needs "
            "backward_passes_per_step, which a tape does not support; leave it out"
        )
    if options.check_every:
        raise InvalidError(
            f"check_every ({options.check_every!r}): a tape does not see the weights change; give it to "
            "hvd_ext.DistributedOptimizer"
        )


def _wrapped(label: str, tape: Any, layers: Sequence[Any], options: GradientOptions) -> Any:
    if isinstance(tape, Distributed):
        raise InvalidError(f"{label}: the tape is wrapped already; wrap a tape once")
    if not isinstance(tape, tf.GradientTape):
        raise InvalidError(f"{label} ({tape!r}): must be a tf.GradientTape")
    if options.codec is not None and options.codec.momentum_correction is True:
        raise InvalidError(
            f"{label}: momentum_correction takes over an optimizer's momentum, and a tape has no optimizer; leave it "
            "out, or wrap the optimizer with hvd_ext.DistributedOptimizer"
        )
    tape._hvd_ext = Reduction(options, [functools.partial(getattr, layer, "trainable_weights") for layer in layers])
    tape.__class__ = _distributed_class(type(tape))  # type: ignore[arg-type]
    return tape


@functools.cache
def _distributed_class(plain: type) -> type:
    return type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__})


def _is_recorded() -> bool:
    """Whether a tape may be recording now. Only then is a custom gradient made, because TensorFlow never frees one."""
    from tensorflow.python.eager import record

    return bool(record.could_possibly_record())


def _reduced(
    options: GradientOptions, gradients: Sequence[Any], sources: Sequence[Any], local: tuple[int, ...], generic: bool
) -> list[Any]:
    shared = reducer_for(LABEL, options, sources, local, generic)
    dense = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
    results: list[Any] = []
    own = set(local)  # the places that are not reduced; all of them on a rank outside of the process set

    def reduce(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        given = list(gradients)
        for place, tensor in zip(dense, tensors, strict=True):
            given[place] = tensor
        results[:] = shared.reduce(given, sources)
        own.update(place for place, result in enumerate(results) if result is given[place])
        tensors_out = [place for place, result in enumerate(results) if isinstance(result, tf.Tensor)]

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if policies.chosen(options).keeps:
                raise InvalidError(
                    f"{LABEL}: with compression=hvd_ext.TopK(...) or another codec, sync= or delay=1 the reduced "
                    "gradients depend on earlier steps, and cannot be differentiated; take the second derivative of "
                    "the loss with a plain tape"
                )
            # all ranks get the same sum, and the transpose of this map is the sum over the ranks again
            back: list[Any] = [None] * len(gradients)
            for place, gradient in zip(tensors_out, upstream, strict=True):
                back[place] = gradient
            back = shared.reduce(back, sources)
            return [tf.cast(back[place], gradients[place].dtype) for place in dense]

        return [results[place] for place in tensors_out], backward

    if dense and _is_recorded():
        outputs = iter(tf.custom_gradient(reduce)(*[gradients[place] for place in dense]))
        results = [next(outputs) if isinstance(result, tf.Tensor) else result for result in results]
    else:
        reduce(*[gradients[place] for place in dense])
    for place, gradient in enumerate(results):
        if gradient is not None and place not in own:
            kinds.mark_reduced(gradient, LABEL)
    return results
