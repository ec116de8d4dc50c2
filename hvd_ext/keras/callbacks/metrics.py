"""Equal metrics at the end of each epoch: averages over the ranks, or exactly those of all ranks' data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvd_ext.errors import MismatchError
from hvd_ext.job.log import logger
from hvd_ext.job.process import rank
from hvd_ext.keras import base
from hvd_ext.keras.callbacks import additive
from hvd_ext.keras.callbacks.caches import CacheLogs
from hvd_ext.tensorflow.collectives.objects import allgather_object

Value: TypeAlias = "float | np.ndarray"
State: TypeAlias = "list[list[np.ndarray]]"  # the variables of each metric
_NAME = "MetricAverageCallback"
_CONTAINERS = ("CompileMetrics", "MetricsList")  # of Keras 3, with metrics in them
_NO_METRIC = "no state of a metric gives this value"
_BY_BATCH = "Keras gives all batches the same weight in it, and the batches differ in size"
_logged: set[tuple[str, str]] = set()


class _Sums(NamedTuple):
    """The sums behind a rank's numbers: of training or of validation."""

    state: State
    names: frozenset[str]  # the numbers that come from the state
    rows: float | None  # the rows of a batch, where losses by output have counted batches instead of rows


class MetricAverageCallback(base.Callback):
    """Replaces the metrics of each epoch, those of validation too, by their averages over the ranks.

    Put it in front of callbacks that read metrics (checkpoints, early stopping), so that all ranks see the same numbers
    and take the same decisions. A metric that some ranks do not have (validation on one rank only) is left alone.

    The average of the ranks' averages is wrong where the ranks have unequal numbers of samples, and the average of the
    ranks' AUCs or precisions is never that of all samples. With exact=True the sums that Keras' metrics keep are added
    over the ranks, and each metric is computed from them: these are the numbers of one process that has seen the data
    of all ranks. Ranks without a metric then get it from the others. Metrics whose state is no sum are still averaged;
    the log names each once, with the reason. The state is a sum in Keras' metrics, and in a class of your own whose
    `update_state` only adds to its variables (`self.total.assign_add(...)`) or calls that of Keras. Losses by output
    are weighted with the ranks' numbers of rows; Keras itself gives all batches of a rank the same weight in them.

    Metrics whose result is a vector are averaged or computed by element, and give float64 arrays. Those whose result is
    a dictionary give one number for each of its keys, as in Keras' logs.

    Args:
        device: accepted for Horovod's sake; it changes nothing.
        exact: compute metrics from all ranks' sums instead of averaging them.

    Attributes:
        left: the numbers of the logs after the last epoch.
    """

    def __init__(self, device: str = "", *, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact
        self.left: dict[str, Value] = {}
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
        local = numbers(logs or {})
        sums = self._sums(local) if self.exact else {}
        ranks = allgather_object((local, sums, _description(self.model) if self.exact else None), name=_NAME)
        by_rank = [metrics for metrics, _, _ in ranks]
        names = {name: None for metrics in (by_rank if self.exact else [local]) for name in metrics}
        averages = {
            name: average
            for name in names
            if (average := _average(_NAME, name, by_rank, partly=self.exact)) is not None
        }
        exact, reasons = _exact(self.model, ranks) if self.exact else ({}, {})
        if logs is not None:
            logs.update(averages | exact)
            self.left = numbers(logs)
        if self.exact:
            for name in averages:
                if name not in exact and _differ(name, by_rank):
                    _say_average(name, reasons.get(name, _NO_METRIC))
            for name in exact.keys() & reasons.keys():
                _say_average(name, reasons[name])

    def _sums(self, local: dict[str, Value]) -> dict[str, _Sums]:
        """Give the sums from which this rank's numbers were computed, where they are still there."""
        last = _state(self.model)
        states = {"": self._trained, "val_": last} if _has(local, "val_") else {"": last}
        sums_of = {prefix: _behind(self.model, local, prefix, state) for prefix, state in states.items()}
        return {prefix: sums for prefix, sums in sums_of.items() if sums is not None}


class AverageAdded(base.Callback):
    """Averages the numbers that callbacks have put into the logs of an epoch since the metrics were made equal.

    `synchronized` puts it in front of Keras' callbacks that decide by a log, and behind the last callback. A number
    that some ranks lack is left alone, and the log names it once.

    Args:
        average: the callback that has made the metrics equal.
        caches: the callback whose logs belong to one rank.
        before: the callbacks of this class in front of this one, if it is the last. They do nothing in a `fit` in which
            the ranks have unequal numbers of them.
    """

    def __init__(self, average: MetricAverageCallback, caches: CacheLogs, before: Sequence[AverageAdded] = ()) -> None:
        super().__init__()
        self._average, self._caches, self._before = average, caches, before
        self._is_last = True
        self._works = True
        for callback in before:
            callback._is_last = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agree on whether those in front of this one work."""
        if self._is_last:
            counts = allgather_object(len(self._before), name="logs")
            for callback in self._before:
                callback._works = len(set(counts)) == 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace what was added in place; all ranks get the same bits."""
        if not self._works:
            return
        local = {name: value for name, value in numbers(logs or {}).items() if name not in self._caches.names}
        ranks = allgather_object((local, local.keys() - self._average.left.keys()), name="logs")
        by_rank = [values for values, _ in ranks]
        for name in local:
            average = _average("fit", name, by_rank, partly=False)
            if logs is not None and average is not None and _differ(name, by_rank):
                logs[name] = average
        for name in sorted(set().union(*(added for _, added in ranks))):
            if not all(name in values for values in by_rank):
                _say(
                    name, "a callback has put it into the logs of some ranks only, and each of them keeps its own value"
                )


def joined_metrics(model: keras.Model) -> dict[str, Any]:
    """Compute the model's metrics over what all ranks have evaluated; all ranks call it, after `model.evaluate`.

    Each rank evaluates its own part of the data, of any length and without communication
    (`hvd_ext.shard(..., remainder="uneven")`); `joined_metrics` adds up the sums that Keras' metrics keep.

    Args:
        model: a compiled model of Keras 3 or tf_keras that has just evaluated its part.

    Returns:
        The metrics by name, equal on all ranks: those of one process that has evaluated all parts. A metric whose
        result is a vector gives a float64 array, others give floats. Metrics whose state is no sum are averaged, which
        the log says once; see `MetricAverageCallback`.

    Raises:
        MismatchError: the ranks' models have different metrics, or a rank has evaluated nothing since it was compiled.
    """
    name = "joined_metrics"
    try:
        local = numbers(model.get_metrics_result())
    except ValueError:  # Keras: nothing was evaluated; the others must hear of it
        local = {}
    sums = _behind(model, local, "", _state(model))
    ranks = allgather_object((local, {"": sums} if sums else {}, _description(model)), name=name)
    if any(described != ranks[0][2] for _, _, described in ranks) or not all(metrics for metrics, _, _ in ranks):
        raise MismatchError(
            "joined_metrics: the ranks' models must have the same metrics, and all must have evaluated something; the "
            f"metrics and the shapes of their variables are {[described for _, _, described in ranks]}, by rank"
        )
    by_rank = [metrics for metrics, _, _ in ranks]
    averages = {metric: _average(name, metric, by_rank, partly=True) for metric in local}
    exact, reasons = _exact(model, ranks)
    for metric in reasons:
        if metric in exact or _differ(metric, by_rank):
            _say_average(metric, reasons[metric])
    return averages | exact


def numbers(logs: dict[str, Any]) -> dict[str, Value]:
    """Give what can be averaged of logs or metrics' results, by name; dictionaries among them are flattened.

    Returns:
        Floats, and float64 arrays of values that have dimensions. Lists are left out, too: a callback's own notes.
    """
    converted: dict[str, Value] = {}
    for name, value in _flat(logs).items():
        if base.is_number(value):
            converted[name] = float(value)
        elif getattr(value, "shape", None):
            array = np.asarray(value)
            if array.dtype.kind in "biufV" and array.dtype.names is None:
                converted[name] = array.astype(np.float64)
    return converted


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _average(what: str, name: str, ranks: list[dict[str, Value]], *, partly: bool) -> Value | None:
    """Average a value over the ranks that have it; None if some do not, unless that is allowed (partly)."""
    having = [values[name] for values in ranks if name in values]
    if len(having) < len(ranks) and not partly:
        return None
    shapes = [np.shape(value) for value in having]
    if any(shape != shapes[0] for shape in shapes):
        raise MismatchError(f"{what}: log {name!r} must have the same shape on all ranks; the shapes are {shapes}")
    return sum(having[1:], having[0]) / len(having)


def _differ(name: str, ranks: list[dict[str, Value]]) -> bool:
    having = [values[name] for values in ranks if name in values]
    return any(not np.array_equal(value, having[0], equal_nan=True) for value in having)


def _say_average(name: str, reason: str) -> None:
    _say(
        name.removeprefix("val_"),
        f"it is the average of the ranks' values, and may not be exactly that of all ranks' data: {reason}",
    )


def _say(name: str, words: str) -> None:
    """Log a line about a log of Keras once, on rank 0."""
    if (name, words) not in _logged:
        _logged.add((name, words))
        if rank() == 0:
            logger.warning("log %r: %s", name, words)


def _has(metrics: dict[str, Value], prefix: str) -> bool:
    return any(name.startswith("val_") == (prefix == "val_") for name in metrics)


def _metrics(model: Any) -> list[Any]:
    """List the metrics of a model of Keras 3 or Keras 2 that have variables, those in containers too."""
    listed = [
        metric
        for outer in getattr(model, "metrics", ())
        for metric in (outer.metrics if type(outer).__name__ in _CONTAINERS else [outer])
    ]
    return list({id(metric): metric for metric in listed}.values())


def _description(model: Any) -> list[tuple[str, list[tuple[int, ...]]]]:
    return [(metric.name, [tuple(variable.shape) for variable in metric.variables]) for metric in _metrics(model)]


def _state(model: Any) -> State:
    return [[np.asarray(variable).copy() for variable in metric.variables] for metric in _metrics(model)]


def _losses_by_output(model: Any) -> list[Any]:
    return list(getattr(getattr(model, "_compile_loss", None), "metrics", ()))


def _by_rows(model: Any, state: State) -> tuple[State, float | None]:
    """Weight losses by output with rows where Keras has counted batches; also give the rows of a batch, else None."""
    places = {id(metric): place for place, metric in enumerate(_metrics(model))}
    weighted, rows = list(state), None
    for loss in _losses_by_output(model):
        (total, counted), (_, seen) = state[places[id(loss)]], state[places[id(model._loss_tracker)]]
        if counted and seen != counted:
            rows = float(seen / counted)
            weighted[places[id(loss)]] = [np.asarray(total * rows), np.asarray(seen)]
    return weighted, rows


def _total(states: list[State]) -> State:
    """Add the ranks' sums, in their order and in double precision."""
    return [
        [np.sum([np.asarray(part, np.float64) for part in parts], axis=0) for parts in zip(*metric, strict=True)]
        for metric in zip(*states, strict=True)
    ]


class _Reason(str):
    """Why a metric is no sum; stands for its result."""


def _results(model: Any, state: State) -> tuple[dict[str, Value], dict[str, str], set[str]]:
    """Compute the metrics that are sums from the given state; the model keeps its own.

    Returns:
        The metrics by name; for those that are no sums the reason; and the names of those that are variables.
    """
    before = _state(model)
    try:
        with _others_replaced(model):
            _assign(model, state)
            results = _flat(model.get_metrics_result())
            values = numbers(results)  # at once, because a metric may give its variable
    finally:
        _assign(model, before)
    reasons = {name: str(value) for name, value in results.items() if isinstance(value, _Reason)}
    return values, reasons, {name for name in values if hasattr(results[name], "assign")}


@contextlib.contextmanager
def _others_replaced(model: Any) -> Iterator[None]:
    """Let the metrics that are no sums give the reason as their result, so that Keras itself gives it their names."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for metric in _metrics(model):
            if reason := additive.why_not(metric):
                result = tf.nest.map_structure(lambda _, text=reason: _Reason(text), metric.result())
                replaced.append((metric, vars(metric).get("result")))
                metric.result = lambda result=result: result
        yield
    finally:
        for metric, result in replaced:
            if result is None:
                del metric.result
            else:  # Keras 2 has wrapped it
                metric.result = result


def _assign(model: Any, state: State) -> None:
    for metric, values in zip(_metrics(model), state, strict=True):
        for variable, value in zip(metric.variables, values, strict=True):
            variable.assign(value.astype(tf.as_dtype(variable.dtype).as_numpy_dtype))


def _behind(model: Any, local: dict[str, Value], prefix: str, state: State | None) -> _Sums | None:
    """Give the sums with the names of the numbers that come from them: a callback may have used the metrics since."""
    if not state or len(state) != len(_metrics(model)):
        return None
    try:
        results, _, variables = _results(model, state)
    except ValueError:  # Keras: some of the model's metrics have never been used
        return None
    names = {name for name, value in results.items() if prefix + name in local and _close(local[prefix + name], value)}
    # Keras hands on a variable that is a result, and reads it after the validation
    names |= {name for name in variables if prefix == "" and _close(local.get(name), local.get(f"val_{name}", np.nan))}
    if not names:
        return None
    weighted, rows = _by_rows(model, state)
    return _Sums(weighted, frozenset(names), rows)


def _close(logged: Value | None, value: Value) -> bool:
    return (
        logged is not None
        and np.shape(logged) == np.shape(value)
        and np.allclose(logged, value, rtol=1e-6, atol=0, equal_nan=True)
    )


def _exact(model: Any, ranks: list[Any]) -> tuple[dict[str, Value], dict[str, str]]:
    """Compute what can be computed from all ranks' sums; and say why the rest cannot, by name."""
    exact: dict[str, Value] = {}
    reasons: dict[str, str] = {}
    if any(described != ranks[0][2] for _, _, described in ranks):
        return exact, reasons
    for prefix in ("", "val_"):
        behind = [sums.get(prefix) for metrics, sums, _ in ranks if _has(metrics, prefix)]
        if not behind or not all(behind):  # the total would lack a rank that has numbers but not their sums
            continue
        results, others, _ = _results(model, _total([sums.state for sums in behind]))
        names = frozenset.intersection(*(sums.names for sums in behind))
        exact |= {prefix + name: value for name, value in results.items() if name in names}
        reasons |= {prefix + name: reason for name, reason in others.items()}
        rows = {sums.rows for sums in behind}
        if len(rows) > 1 or any(count is not None and not count.is_integer() for count in rows):
            reasons |= {prefix + loss.name: _BY_BATCH for loss in _losses_by_output(model)}
    return exact, reasons
