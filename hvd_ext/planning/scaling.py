"""The iteration time of a model on clusters of several sizes, bucketer by bucketer, with the speed-up of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_ext.compression import Codec
from hvd_ext.errors import PlanError
from hvd_ext.planning import buckets
from hvd_ext.planning.cost import lane
from hvd_ext.planning.layout import layout
from hvd_ext.planning.prediction import Prediction, of_lane, predict
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.topology.scale import scaled
from hvd_ext.topology.tree import Tree

# The bucketers that `simulate` compares: those of MG-WFBP (Section V), buckets of a fixed size, and the optimum.
BUCKETERS = ("wfbp", "single", "by_size", "mgwfbp", "optimal")
_AVERAGE = 1  # tf_ops/kernels/reduce.h; an average costs what a sum does


@dataclass(frozen=True, slots=True)
class Row:
    """A step of a model on a cluster, with the buckets of one bucketer and the algorithm of one name.

    Args:
        algorithm: the name that was asked for, a schedule's or "auto"; "T = A + B n" for a price without a cluster.
        used: the algorithms of the buckets, each once.
        members: the places of the tensors of each bucket, the buckets in the order in which they start.
    """

    ranks: int
    bucketer: str
    algorithm: str
    used: tuple[str, ...]
    times: StepTimes
    members: tuple[tuple[int, ...], ...]
    predicted: Prediction

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self.members)

    @property
    def exposed_s(self) -> float:
        """The communication after the end of the backward pass, t_c^no of MG-WFBP's Table I, seconds."""
        return self.predicted.exposed_s

    @property
    def alone_s(self) -> float:
        """The step of one rank, without communication, seconds."""
        return self.times.computed_s + (self.times.update_s or 0.0)

    @property
    def iteration_s(self) -> float:
        """The time of the step, seconds."""
        return self.predicted.step_s

    @property
    def speedup(self) -> float:
        """The samples per second divided by those of one rank (MG-WFBP's Eq. 4)."""
        return self.ranks * self.efficiency

    @property
    def efficiency(self) -> float:
        """The speed-up divided by the number of ranks."""
        return self.alone_s / self.iteration_s if self.iteration_s else 1.0

    def as_json(self) -> dict[str, object]:
        """Converts the row to values that JSON can hold; times are in seconds."""
        return {
            "ranks": self.ranks,
            "bucketer": self.bucketer,
            "algorithm": self.algorithm,
            "buckets": self.buckets,
            "iteration_seconds": self.iteration_s,
            "exposed_seconds": self.exposed_s,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "used": list(self.used),
        }


def on_cluster(
    tree: Tree,
    times: StepTimes,
    bucketer: str,
    algorithm: str = "auto",
    *,
    bucket_nbytes: int = buckets.DEFAULT_BUCKET_NBYTES,
    wire: str | None = None,
    codec: Codec | None = None,
    sparse_algorithm: str = "hitopk",
) -> Row:
    """Predicts a step on a cluster, as `layout` with these arguments lays it out.

    Raises:
        PlanError: there is no such bucketer or algorithm, or it cannot run on the cluster.
    """
    laid_out = layout(
        tree,
        times.tensors,
        _AVERAGE,
        algorithm=algorithm,
        bucket_nbytes=bucket_nbytes,
        wire=wire,
        codec=codec,
        sparse_algorithm=sparse_algorithm,
        buckets=bucketer,
        times=times,
    )
    predicted = predict(tree, laid_out, times)
    used = tuple(dict.fromkeys(bucket.plan.algorithm for bucket in laid_out.buckets))
    members = tuple(bucket.tensors for bucket in laid_out.buckets)
    return Row(tree.size, bucketer, algorithm, used, times, members, predicted)


def on_line(
    price: lane.Table,
    times: StepTimes,
    bucketer: str,
    ranks: int = 1,
    bucket_nbytes: int = buckets.DEFAULT_BUCKET_NBYTES,
) -> Row:
    """Predicts a step whose allreduces follow one another at a given price, without a cluster.

    Args:
        price: the price of a bucket, such as lane.line(a, b) for MG-WFBP's Eq. 9.
        bucketer: the name of a bucketer, or "auto" for the one with the shortest step.

    Raises:
        PlanError: there is no such bucketer.
    """
    request = buckets.Request(times.tensors, bucket_nbytes, ready_s=times.ready_s, price=lambda _: price)
    if bucketer == "auto":
        able = [name for name in buckets.SIMPLEST_FIRST if buckets.supports(buckets.get(name), request) is None]
        return replace(best([on_line(price, times, name, ranks, bucket_nbytes) for name in able]), bucketer=bucketer)
    made = buckets.plan(request, bucketer)
    ready_s = [max(times.ready_s[place] for place in bucket.tensors) for bucket in made]
    parts = price.parts([bucket.nbytes for bucket in made])
    predicted = of_lane(times, ready_s, lambda ready_s: lane.recursion(ready_s, parts))
    return Row(ranks, bucketer, "T = A + B n", (), times, tuple(bucket.tensors for bucket in made), predicted)


def rows(
    tree: Tree,
    times: StepTimes,
    bucketers: Sequence[str] = BUCKETERS,
    algorithms: Sequence[str] = ("auto",),
    ranks: Sequence[int] = (),
    bucket_nbytes: int = buckets.DEFAULT_BUCKET_NBYTES,
) -> list[Row]:
    """Predicts a step on clusters of the same kind with several numbers of ranks, by default that of the cluster.

    The computation is the same for each number of ranks (weak scaling).

    Returns:
        A row for each number of ranks, bucketer and algorithm.

    Raises:
        TopologyError: the cluster cannot have that number of ranks.
        PlanError: there is no such bucketer or algorithm, or an algorithm cannot run on the cluster.
    """
    check(bucketers)
    trees = [scaled(tree, count) for count in ranks or (tree.size,)]
    return [
        on_cluster(cluster, times, bucketer, algorithm, bucket_nbytes=bucket_nbytes)
        for cluster in trees
        for algorithm in algorithms
        for bucketer in bucketers
    ]


def check(bucketers: Sequence[str]) -> None:
    """Checks the names of bucketers before anything is priced.

    Raises:
        PlanError: there is no such bucketer.
    """
    for name in bucketers:
        if name != "auto":
            buckets.get(name)


def best(rows: Sequence[Row]) -> Row:
    """Finds the row with the shortest step; of equals the one with the fewest buckets.

    Raises:
        PlanError: there is no row.
    """
    if not rows:
        raise PlanError("rows: there is none to choose from")
    return min(rows, key=lambda row: (row.iteration_s, row.buckets))
