"""The predicted time of a step with a layout: its computation, and the buckets in their lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hvd_ext.errors import PlanError
from hvd_ext.planning import contention, lane_prices, planner, registry
from hvd_ext.planning.bucket_layout import BucketLayout, Layout
from hvd_ext.planning.cost import lane
from hvd_ext.planning.cost.lane import InLane, Parts
from hvd_ext.planning.cost.simulate import MOST_MESSAGES
from hvd_ext.planning.sparse_planner import sparsity_on
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import Tree

LaneTimes = tuple[Sequence[float], Sequence[float]]  # when buckets begin, and when they end


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a step, seconds; times of buckets count from the begin of the step.

    Args:
        exposed_s: the time of communication that is not hidden behind computation.
        ready_s: for each bucket, the time at which its last gradient is ready.
        begins_s: for each bucket, the time at which it begins.
        ends_s: for each bucket, the time at which it has ended on all ranks.
    """

    step_s: float
    exposed_s: float
    ready_s: tuple[float, ...]
    begins_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def predict(
    tree: Tree,
    layout: Layout,
    times: StepTimes,
    *,
    density: float | None = None,
    most_messages: int = MOST_MESSAGES,
) -> Prediction:
    """Predicts the time of a step.

    Args:
        density: the density of the step, where top-k gradients are sent; None for that of an ordinary step.
        most_messages: the largest number of messages that are played. Lanes with more, and clusters of more than 16
            ranks, have the times that follow from the buckets' prices.

    Returns:
        The prediction. The update of the weights follows the last bucket and the backward pass.

    Raises:
        PlanError: the times are those of another model.
    """
    return in_lane(tree, lane_of(tree, layout, times, density), times, most_messages)


def in_lane(
    tree: Tree, scheduled: Sequence[InLane], times: StepTimes, most_messages: int = MOST_MESSAGES
) -> Prediction:
    """Predicts the time of a step from what travels in its lane, from lane_of()."""

    def run(ready_s: Sequence[float]) -> LaneTimes:
        loads = [replace(load, ready_s=ready) for load, ready in zip(scheduled, ready_s, strict=True)]
        return lane.times_in_lane(loads, tree, most_messages=most_messages)

    predicted = of_lane(times, [load.ready_s for load in scheduled], run)
    buckets = [number for number, load in enumerate(scheduled) if load.is_bucket]
    return replace(
        predicted,
        ready_s=tuple(predicted.ready_s[number] for number in buckets),
        begins_s=tuple(predicted.begins_s[number] for number in buckets),
        ends_s=tuple(predicted.ends_s[number] for number in buckets),
    )


def lane_of(tree: Tree, layout: Layout, times: StepTimes, density: float | None = None) -> list[InLane]:
    """Describes the buckets of a layout in their lane, and the rows that travel beside them.

    Raises:
        PlanError: the times are those of another model.
    """
    ready_s = ready_of(times, layout.tensors)
    scheduled = [
        _in_lane(tree, bucket, nbytes, max((ready_s[place] for place in bucket.tensors), default=0.0), density)
        for bucket, nbytes in zip(layout.buckets, layout.nbytes, strict=True)
    ]
    if not times.rows:
        return scheduled
    gathered = planner.all_gather_plan(tree)
    rows = [
        InLane(
            gathered, nbytes, max(nbytes, 1), since, partial(lane_prices.gather_parts, tree, nbytes), is_bucket=False
        )
        for since, nbytes in times.rows
    ]
    both = lane.in_turn([(load.ready_s, load) for load in scheduled], [(load.ready_s, load) for load in rows])
    return [load for _, load in both]


def of_lane(times: StepTimes, ready_s: Sequence[float], run: Callable[[Sequence[float]], LaneTimes]) -> Prediction:
    """Predicts a step from what travels in its lane.

    Args:
        ready_s: for each bucket, and each of what else travels, the time at which it is ready if nothing delays the
            computing.
        run: gives the times at which all that begins and ends, from the times at which it is ready.
    """
    begins_s, ends_s = run(ready_s)
    computed_s = times.computed_s
    if times.contention and ends_s:
        # one iteration: with the delayed times the lane is busy at others, which would delay the computing otherwise
        spans = contention.busy(begins_s, ends_s)
        ready_s = [contention.delayed(seconds, spans, times.contention) for seconds in ready_s]
        computed_s = contention.delayed(computed_s, spans, times.contention)
        begins_s, ends_s = run(ready_s)
    exposed_s = max(max(ends_s, default=0.0) - computed_s, 0.0)
    step_s = computed_s + exposed_s + (times.update_s or 0.0)
    return Prediction(step_s, exposed_s, tuple(ready_s), tuple(begins_s), tuple(ends_s))


def ready_of(times: StepTimes, tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """The times at which tensors are ready.

    Args:
        times: the times of a model. If its tensors are others, or in another order, they are found by name.

    Raises:
        PlanError: the times do not have a tensor, or it has another number of elements there.
    """
    if len(tensors) == len(times.tensors) and all(
        tensor.name == other.name for tensor, other in zip(tensors, times.tensors, strict=True)
    ):
        pairs = list(zip(times.tensors, times.ready_s, strict=True))
    else:
        by_name = {timed.name: (timed, ready_s) for timed, ready_s in zip(times.tensors, times.ready_s, strict=True)}
        missing = next((tensor.name for tensor in tensors if tensor.name not in by_name), None)
        if missing is not None:
            raise PlanError(f"step times: tensor {missing!r} is missing; the times are those of another model")
        pairs = [by_name[tensor.name] for tensor in tensors]
    for tensor, (timed, _) in zip(tensors, pairs, strict=True):
        if timed.elements != tensor.elements:
            raise PlanError(
                f"step times: tensor {tensor.name!r} has {timed.elements} elements there and {tensor.elements} here; "
                "the times are those of another model"
            )
    return tuple(ready_s for _, ready_s in pairs)


def _in_lane(tree: Tree, bucket: BucketLayout, nbytes: int, ready_s: float, density: float | None) -> InLane:
    selection, sent = bucket.selection, nbytes // 2 if bucket.wire is not None else nbytes
    if selection is None or bucket.dense is None:
        price = partial(_dense_parts, tree, bucket, sent)
        return InLane(bucket.plan, sent, bucket.segment_nbytes, ready_s, price)
    density = selection.density if density is None else density
    plan = bucket.dense if density >= selection.dense_above else bucket.plan
    sparsity = sparsity_on(tree, density, selection.entry_nbytes)
    price = partial(lane_prices.sparse_parts, plan, tree, sent, sparsity)
    return InLane(plan, sent, max(bucket.segment_nbytes, sent), ready_s, price, sparsity)


def _dense_parts(tree: Tree, bucket: BucketLayout, nbytes: int) -> Parts:
    plan = bucket.plan
    if plan.algorithm in registry.names():
        return lane_prices.dense_table(tree, plan.algorithm).parts([nbytes])[0]
    return lane.parts_of(plan, tree, nbytes, bucket.segment_nbytes)
