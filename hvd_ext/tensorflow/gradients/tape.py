"""`DistributedGradientTape`: a gradient tape that reduces its gradients over the ranks, for loops without `fit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import InvalidError
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options import Algorithm, Average, Compression, ReduceOp, SparseAlgorithm, Sync
from hvd_ext.options.gradients import GradientOptions, groups_of
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds, policies
from hvd_ext.tensorflow.gradients.tape_reducers import reducer_for

LABEL = "DistributedGradientTape"
_NONE = tf.UnconnectedGradients.NONE


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    *,
    op: ReduceOp = Average,
    compression: Compression | TopK | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
    algorithm: Algorithm | SparseAlgorithm | None = None,
    bucket_nbytes: int | None = None,
    buckets: str | Path | None = None,
    check_start: bool = True,
    sync: Sync = "full",
    quorum: int | None = None,
    staleness: int = 4,
    delay: int = 0,
    num_groups: int = 0,
    device_dense: str = "",
    device_sparse: str = "",
    backward_passes_per_step: Literal[1] = 1,
    average_aggregated_gradients: Literal[False] = False,
    check_every: Literal[0] = 0,
) -> WrappedTape:
    """Make a tape's `gradient` return gradients reduced over the ranks; for loops with a plain optimizer.

    The tape itself is changed and returned, so that it may be wrapped before, during or after its recording. All ranks
    call `gradient` alike, and must have equal weights once the first step has been applied (see check_start). Jacobians
    are not reduced. A wrapped optimizer would reduce a second time, and refuses gradients of a wrapped tape: wrap
    either the tape or the optimizer.

    Args:
        gradtape: a `tf.GradientTape`.
        op: `hvd_ext.Average` or `hvd_ext.Sum` of the ranks' gradients.
        compression: the format in which float32 gradients are sent, `hvd_ext.Compression.fp16` or `.bf16`, or a
            `hvd_ext.TopK` to send only the largest elements (docs/topk.md). None for the compression of `init`.
        sparse_as_dense: make `tf.IndexedSlices` dense before they are reduced.
        gradient_predivide_factor: a number f: gradients are divided by f before the sum, and the sum by size/f. Only
            with `Average`.
        groups: a number of buckets, or lists of variables that share a bucket; None for buckets of bucket_nbytes.
        process_set: the ranks that reduce among themselves; None for all.
        scale_local_gradients: divide the gradients of local variables, which are not reduced, by the number of ranks.
        algorithm: "auto" or an allreduce algorithm; None for the algorithm of `init`. With a `TopK`, a sparse
            algorithm; None for "hitopk".
        bucket_nbytes: the approximate size of a bucket in bytes; None for the size of `init`.
        buckets: "auto", a way to divide gradients into buckets, or a file of `hvd_ext.explain` (docs/buckets.md); None
            for that of `init`.
        check_start: compare the ranks' weights before the second step (docs/training.md).
        sync: whose gradients a step waits for (docs/stragglers.md): "full", those of all ranks; "solo", the first;
            "majority", those of a rank drawn for each step; "quorum", the first `quorum` of them; "auto", a quorum that
            the job chooses. Gradients that come late enter a later step.
        quorum: with sync="quorum", how many gradients a step waits for, from 1 to the number of ranks.
        staleness: the largest number of steps by which a gradient may come late.
        delay: 1: a step returns the gradients of the step before it, so that computation hides communication;
            only with sync="full".
        num_groups: Horovod's older name for groups.
        device_dense: accepted for Horovod's sake, like device_sparse; changes nothing.
        device_sparse: see device_dense.
        backward_passes_per_step: must be 1, because a tape does not accumulate gradients.
        average_aggregated_gradients: must be False, because it is about backward_passes_per_step.
        check_every: must be 0, because a tape does not see the weights change.

    Returns:
        The same object, with `register_local_source` and `get_local_and_global_gradients` added.

    Raises:
        InvalidError: the tape cannot be wrapped, or an argument breaks its rule; the message says what to do.
        PlanError: there is no algorithm of this name.
    """
    _refuse(backward_passes_per_step, average_aggregated_gradients, check_every)
    options = GradientOptions(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        algorithm=algorithm,
        bucket_nbytes=bucket_nbytes,
        buckets=buckets,
        check_start=check_start,
        sync=sync,
        quorum=quorum,
        staleness=staleness,
        delay=delay,
    )
    return _wrapped(LABEL, gradtape, (), options)


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    *,
    local_layers: Any = None,
    op: ReduceOp = Average,
    compression: Compression | TopK | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
    algorithm: Algorithm | SparseAlgorithm | None = None,
    bucket_nbytes: int | None = None,
    buckets: str | Path | None = None,
    check_start: bool = True,
    sync: Sync = "full",
    quorum: int | None = None,
    staleness: int = 4,
    delay: int = 0,
    num_groups: int = 0,
    device_dense: str = "",
    device_sparse: str = "",
    backward_passes_per_step: Literal[1] = 1,
    average_aggregated_gradients: Literal[False] = False,
    check_every: Literal[0] = 0,
) -> WrappedTape:
    """Make a tape's `gradient` return reduced gradients, except for the weights of some layers, which are local.

    Args:
        gradtape: a `tf.GradientTape`.
        local_layers: a Keras layer or a list of layers. Their gradients are not reduced; they are divided by the number
            of ranks unless scale_local_gradients is False. None for no layer.
        op: as for `DistributedGradientTape`, and so are all that follow.

    Returns:
        The same object.

    Raises:
        InvalidError: an element of local_layers is not a layer; and as `DistributedGradientTape`.
        PlanError: as `DistributedGradientTape`.
    """
    layers = [local_layers] if hasattr(local_layers, "trainable_weights") else list(local_layers or ())
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidError(f"local_layers ({layer!r}): must be Keras layers")
    _refuse(backward_passes_per_step, average_aggregated_gradients, check_every)
    options = GradientOptions(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        algorithm=algorithm,
        bucket_nbytes=bucket_nbytes,
        buckets=buckets,
        check_start=check_start,
        sync=sync,
        quorum=quorum,
        staleness=staleness,
        delay=delay,
    )
    return _wrapped("PartialDistributedGradientTape", gradtape, layers, options)


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


def _refuse(backward_passes_per_step: int, average_aggregated_gradients: bool, check_every: int) -> None:
    """Refuse options that only optimizers support; a tape returns its gradients at every call."""
    if backward_passes_per_step != 1:
        raise InvalidError(
            f"backward_passes_per_step ({backward_passes_per_step!r}): must be 1, because a tape does not accumulate "
            "gradients; add the gradients of several plain tapes and call hvd_ext.allreduce, or give the Keras "
            "optimizer gradient_accumulation_steps and wrap the optimizer instead of the tape"
        )
    if average_aggregated_gradients:
        raise InvalidError(
            f"average_aggregated_gradients ({average_aggregated_gradients!r}): it needs backward_passes_per_step, "
            "which a tape does not support; leave it out"
        )
    if check_every:
        raise InvalidError(
            f"check_every ({check_every!r}): a tape does not see the weights change; give it to "
            "hvd_ext.DistributedOptimizer"
        )


def _wrapped(label: str, tape: Any, layers: Sequence[Any], options: GradientOptions) -> Any:
    if isinstance(tape, Distributed):
        raise InvalidError(f"{label}: the tape is wrapped already; wrap a tape once")
    if not isinstance(tape, tf.GradientTape):
        raise InvalidError(f"{label} ({tape!r}): must be a tf.GradientTape")
    if options.topk is not None and options.topk.momentum_correction is True:
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
                    f"{LABEL}: with compression=hvd_ext.TopK(...), sync= or delay=1 the reduced gradients depend on "
                    "earlier steps, and cannot be differentiated; take the second derivative of the loss with a plain "
                    "tape"
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
