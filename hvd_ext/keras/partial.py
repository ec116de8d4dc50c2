"""`PartialDistributedOptimizer`: some layers belong to their rank alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_ext.errors import InvalidError
from hvd_ext.keras.distributed import refuse_global_norm
from hvd_ext.keras.optimizer import DistributedOptimizer


def PartialDistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: Any, name: str | None = None, *, local_layers: Any = None, **keywords: Any
) -> Any:
    """Make an optimizer reduce its gradients over all ranks, except for those of some layers.

    Args:
        optimizer: as for `hvd_ext.DistributedOptimizer`.
        name: its name in messages; None for its class's name.
        local_layers: a layer or several, whose gradients are not reduced; by default they are divided by the number of
            ranks (scale_local_gradients). They may differ from rank to rank, and need not be built yet. None for none.
        **keywords: as for `hvd_ext.DistributedOptimizer`.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidError: something in local_layers is no layer, or the optimizer has a global_clipnorm; and as
            `hvd_ext.DistributedOptimizer`.
        PlanError, TypeError: as `hvd_ext.DistributedOptimizer`.
    """
    layers = _layers(local_layers)
    if layers:
        refuse_global_norm(optimizer)  # before anything is changed
    wrapped = DistributedOptimizer(optimizer, name, **keywords)
    if layers:
        wrapped.check_local()
    for layer in layers:
        wrapped._hvd_ext_reducer.register_local_source(lambda layer=layer: layer.trainable_weights)
    return wrapped


def _layers(given: Any) -> list[Any]:
    if given is None:
        return []
    layers = list(given) if isinstance(given, Iterable) and not hasattr(given, "trainable_weights") else [given]
    for layer in layers:
        if isinstance(layer, type) or not hasattr(layer, "trainable_weights"):
            raise InvalidError(f"local_layers ({layer!r}): must be a layer of Keras, or several")
    return layers
