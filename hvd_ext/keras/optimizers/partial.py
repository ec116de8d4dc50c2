"""`PartialDistributedOptimizer`: some layers belong to their rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import InvalidError
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.keras.optimizers.optimizer import wrap
from hvd_ext.options import Algorithm, Average, Compression, ReduceOp, SparseAlgorithm
from hvd_ext.options.gradients import GradientOptions, groups_of

if TYPE_CHECKING:
    from hvd_ext.keras.optimizers.distributed import WrappedOptimizer


def PartialDistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: Any,
    name: str | None = None,
    *,
    local_layers: Any = None,
    op: ReduceOp = Average,
    compression: Compression | TopK | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
    algorithm: Algorithm | SparseAlgorithm | None = None,
    bucket_nbytes: int | None = None,
    check_every: int = 0,
    check_start: bool = True,
    num_groups: int = 0,
    device_dense: str = "",
    device_sparse: str = "",
    use_locking: bool = False,
) -> WrappedOptimizer:
    """Make an optimizer reduce its gradients over all ranks, except for those of some layers.

    Args:
        optimizer: as for `hvd_ext.DistributedOptimizer`.
        name: its name in messages; None for its class's name.
        local_layers: a layer or several, whose gradients are not reduced; by default they are divided by the number of
            ranks (scale_local_gradients). They may differ from rank to rank, and need not be built yet. None for none.
        op: as for `hvd_ext.DistributedOptimizer`, and so are all that follow.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidError: something in local_layers is no layer, or the optimizer has a global_clipnorm; and as
            `hvd_ext.DistributedOptimizer`.
        PlanError: as `hvd_ext.DistributedOptimizer`.
    """
    options = GradientOptions(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        algorithm=algorithm,
        bucket_nbytes=bucket_nbytes,
        check_every=check_every,
        check_start=check_start,
    )
    return wrap(optimizer, name, options, _layers(local_layers))


def _layers(given: Any) -> list[Any]:
    if given is None:
        return []
    layers = list(given) if isinstance(given, Iterable) and not hasattr(given, "trainable_weights") else [given]
    for layer in layers:
        if isinstance(layer, type) or not hasattr(layer, "trainable_weights"):
            raise InvalidError(f"local_layers ({layer!r}): must be a layer of Keras, or several")
    return layers
