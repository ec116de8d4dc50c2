"""Equal metrics at the end of each epoch: averages over the ranks, or exactly those of all ranks' data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_ext.errors import MismatchError
from hvd_ext.keras.callbacks import base
from hvd_ext.tensorflow.collectives.objects import allgather_object

State = list[np.ndarray]
_NAME = "MetricAverageCallback"


class MetricAverageCallback(base.Callback):
    """Replaces the metrics of each epoch, those of validation too, by their averages over the ranks.

    Put it in front of callbacks that read metrics (checkpoints, early stopping), so that all ranks see the same numbers
    and take the same decisions. A metric that some ranks do not have (validation on one rank only) is left alone.

    The average of the ranks' averages is wrong where the ranks have unequal numbers of samples, and the average of the
    ranks' AUCs or precisions is never that of all samples. With exact=True the sums that Keras' metrics keep are added
    over the ranks, and each metric is computed from them: these are the numbers of one process that has seen the data
    of all ranks. Ranks without a metric then get it from the others. Metrics of your own that are no sums are still
    averaged.

    Args:
        device: accepted for Horovod's sake; it changes nothing.
        exact: compute metrics from all ranks' sums instead of averaging them.
    """

    def __init__(self, device: str = "", *, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact
        self._trained: State | None = None
        self._fitting = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the ranks train together."""
        base.refuse_plain(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the sums of the epoch before."""
        self._trained, self._fitting = None, True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the sums of training, which validation will overwrite."""
        if self.exact and self._fitting and self._trained is None:
            self._trained = _state(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics in place; all ranks get the same bits."""
        self._fitting = False
        own = {name: float(value) for name, value in (logs or {}).items() if base.is_number(value)}
        sums = self._sums(own) if self.exact else {}
        ranks = allgather_object((own, sums, _shapes(self.model) if self.exact else None), name=_NAME)
        if logs is None:
            return
        everybody = [metrics for metrics, _, _ in ranks]
        for name in {name: None for metrics in (everybody if self.exact else [own]) for name in metrics}:
            having = [metrics[name] for metrics in everybody if name in metrics]
            if self.exact or len(having) == len(ranks):
                logs[name] = sum(having) / len(having)
        if self.exact and all(shapes == ranks[0][2] for _, _, shapes in ranks):
            for prefix in ("", "val_"):
                behind = [sums.get(prefix) for metrics, sums, _ in ranks if _has(metrics, prefix)]
                if behind and all(behind):  # the total would lack a rank that has numbers but not their sums
                    exact = _results(self.model, _total(behind))
                    logs.update({prefix + name: value for name, value in exact.items() if prefix + name in logs})

    def _sums(self, own: dict[str, float]) -> dict[str, State | None]:
        """Give the sums from which this rank's numbers were computed; None where those sums are gone."""
        last = _state(self.model)
        if not _has(own, "val_"):
            return {"": _checked(self.model, own, "", last)}
        return {"": _checked(self.model, own, "", self._trained), "val_": _checked(self.model, own, "val_", last)}


def joined_metrics(model: keras.Model) -> dict[str, float]:
    """Compute the model's metrics over what all ranks have evaluated; all ranks call it, after `model.evaluate`.

    Each rank evaluates its own part of the data, of any length and without communication
    (`hvd_ext.shard(..., remainder="uneven")`); `joined_metrics` adds up the sums that Keras' metrics keep.

    Args:
        model: a compiled model of Keras 3 that has just evaluated its part.

    Returns:
        The metrics by name, equal on all ranks: those of one process that has evaluated all parts. Metrics of your own
        that are no sums are averaged.

    Raises:
        MismatchError: the ranks' models have different metrics, or a rank has evaluated nothing since it was compiled.
    """
    try:
        own = {name: float(value) for name, value in model.get_metrics_result().items() if base.is_number(value)}
    except ValueError:  # Keras: nothing was evaluated; the others must hear of it
        own = {}
    ranks = allgather_object((own, _state(model), _shapes(model)), name="joined_metrics")
    if any(shapes != ranks[0][2] for _, _, shapes in ranks):
        raise MismatchError(
            "joined_metrics: the ranks' models must have the same metrics, and all must have evaluated something; the "
            f"variables of their metrics have the shapes {[shapes for _, _, shapes in ranks]}, by rank"
        )
    averages = {name: sum(metrics[name] for metrics, _, _ in ranks) / len(ranks) for name in own}
    return averages | _results(model, _total([state for _, state, _ in ranks]))


def _has(metrics: dict[str, float], prefix: str) -> bool:
    return any(name.startswith("val_") == (prefix == "val_") for name in metrics)


def _shapes(model: keras.Model) -> list[tuple[int, ...]]:
    return [tuple(variable.shape) for variable in getattr(model, "metrics_variables", ())]


def _state(model: keras.Model) -> State:
    return [np.asarray(variable) for variable in getattr(model, "metrics_variables", ())]


def _total(states: list[State]) -> State:
    """Add the ranks' sums, in their order and in double precision."""
    return [np.sum([np.asarray(part, np.float64) for part in parts], axis=0) for parts in zip(*states, strict=True)]


def _results(model: keras.Model, state: State) -> dict[str, float]:
    """Compute the metrics that are sums from the given state; the model keeps its own."""
    own = _state(model)
    try:
        _assign(model, state)
        results = model.get_metrics_result()
        names = _that_add_up(model)
        return {name: float(value) for name, value in results.items() if name in names}
    finally:
        _assign(model, own)


def _assign(model: keras.Model, state: State) -> None:
    for variable, value in zip(model.metrics_variables, state, strict=True):
        variable.assign(value.astype(variable.dtype))


def _checked(model: keras.Model, own: dict[str, float], prefix: str, state: State | None) -> State | None:
    """Give the sums if the logs' numbers come from them: a callback may have used the metrics since."""
    if not state:
        return None
    try:
        results = _results(model, state)
    except ValueError:  # Keras: some of the model's metrics have never been used
        return None
    named = {name: value for name, value in results.items() if prefix + name in own}
    right = all(np.isclose(own[prefix + name], value, rtol=1e-6, equal_nan=True) for name, value in named.items())
    return state if named and right else None


def _that_add_up(model: keras.Model) -> set[str]:
    """Name the metrics whose variables are sums over samples: all of Keras' own, and means of a user's functions."""
    flat: list[Any] = []
    for metric in model.metrics:
        flat += [metric, *getattr(metric, "metrics", ())]
    others = {metric.name for metric in flat if not _adds_up(metric)}
    return {name for name in model.get_metrics_result() if not any(name.endswith(other) for other in others)}


def _adds_up(metric: Any) -> bool:
    kind = type(metric)
    if kind.__module__.split(".")[0] == "keras":
        return True
    return isinstance(metric, keras.metrics.Mean | keras.metrics.Sum) and kind.result in (
        keras.metrics.Mean.result,
        keras.metrics.Sum.result,
    )
