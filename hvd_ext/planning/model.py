"""The logical plan: a collective as levels of group calls, in the words of the papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hvd_ext.errors import PlanError

Kind = Literal[
    "reduce_scatter",
    "all_gather",
    "reduce",
    "broadcast",
    "exchange",
    "all_to_all",
    "select",
    "fold",
    "scatter",
    "sparse_allreduce",
    "sparse_all_gather",
    "sparse_merge",
    "sparse_broadcast",
]
Method = Literal["ring", "recursive", "direct"]
Collective = Literal["allreduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all"]

ROOTED: tuple[Kind, ...] = ("reduce", "broadcast", "sparse_broadcast")
# Kinds of one rank, that send nothing.
LOCAL: tuple[Kind, ...] = ("select", "fold", "scatter")
# Kinds that send the entries of sparse vectors.
SPARSE: tuple[Kind, ...] = ("sparse_allreduce", "sparse_all_gather", "sparse_merge", "sparse_broadcast")
_PAIRS: tuple[Kind, ...] = ("exchange", "sparse_merge")
_ONE_SPAN: tuple[Kind, ...] = (*ROOTED, *_PAIRS, *LOCAL, "sparse_allreduce")


@dataclass(frozen=True, slots=True)
class Span:
    """The units [begin, begin + count) of a buffer; count 0 is an empty span."""

    begin: int
    count: int

    @property
    def end(self) -> int:
        """The first unit after the span."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call of a group of ranks on a range of the buffer.

    - reduce_scatter: spans[i] ends, reduced over all ranks of the group, on ranks[i].
    - all_gather: spans[i] is held by ranks[i] and ends on all ranks of the group.
    - reduce: spans[0] ends, reduced over all ranks of the group, on `root`.
    - broadcast: spans[0] is held by `root` and ends on all ranks of the group.
    - exchange: two ranks give each other spans[0], and both end with the sum.
    - all_to_all: spans[i] is held by ranks[i] and cut into one equal part for each rank of the group, in its order;
      part j ends on ranks[j].

    Those of sparse plans, where each rank has a sparse vector (tf_ops/plan/ir.def):

    - select: spans[0] of ranks[0] goes through error feedback; its vector becomes the k largest elements.
    - fold: spans[0] of ranks[0] goes through error feedback, whole: nothing is selected.
    - sparse_allreduce: spans[0] becomes, on all ranks of the group, the sum of the entries of their vectors, added up
      in the order of the group, so that all get the same bits.
    - sparse_all_gather: as all_gather, but only elements that are not 0 travel.
    - sparse_merge: ranks[1] gives its vector to ranks[0], whose vector becomes the k largest entries of the sum.
    - sparse_broadcast: the vector of `root` becomes that of all ranks of the group.
    - scatter: spans[0] of ranks[0] becomes the entries of its vector, and 0 elsewhere.

    A root outside `ranks` does not contribute to a reduce: it hands over through ranks[-1], its nearest member of the
    group (FlexReduce needs this where a learner's target range leaves its current range).

    Args:
        kind: what the call does.
        ranks: the group in the order of its ring.
        spans: one per rank (reduce_scatter, all_gather, all_to_all, sparse_all_gather) or one (the other kinds).
        root: the rank where a reduce ends and a broadcast starts; -1 for the other kinds.
        method: how the call is lowered: a ring (chains of neighbours), recursive halving or doubling (a circulant
            pattern for any number of ranks), or direct (everybody to the owner in one round). A ring of an all_to_all
            goes to the next rank, then to the next but one, ...; an exchange and the sparse kinds have one way only.
    """

    kind: Kind
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    root: int = -1
    method: Method = "ring"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.method not in get_args(Method):
            raise PlanError(
                f"call ({self.kind}, {self.method}): the kind is one of {', '.join(get_args(Kind))} and the method one "
                f"of {', '.join(get_args(Method))}"
            )
        rooted = self.kind in ROOTED
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"{self.kind} on ranks {self.ranks}: a group has at least one rank and each rank once")
        one_span = self.kind in _ONE_SPAN
        if len(self.spans) != (1 if one_span else len(self.ranks)):
            raise PlanError(
                f"{self.kind} on ranks {self.ranks}: it takes {'one span' if one_span else 'one span per rank'}, got "
                f"{len(self.spans)}"
            )
        if self.kind in _PAIRS and len(self.ranks) != 2:
            raise PlanError(f"{self.kind} on ranks {self.ranks}: it joins two ranks, got {len(self.ranks)}")
        if self.kind in LOCAL and len(self.ranks) != 1:
            raise PlanError(f"{self.kind} on ranks {self.ranks}: it is of one rank, got {len(self.ranks)}")
        if self.kind == "all_to_all" and (
            self.method == "recursive" or any(span.count % len(self.ranks) for span in self.spans)
        ):
            raise PlanError(
                f"all_to_all on ranks {self.ranks} ({self.method}): it is a ring or direct, and each span is cut into "
                f"{len(self.ranks)} equal parts"
            )
        if rooted != (self.root >= 0):
            raise PlanError(
                f"{self.kind} with root {self.root}: {', '.join(ROOTED)} have a root, the other kinds have none"
            )
        if self.kind == "sparse_broadcast" and self.root not in self.ranks:
            raise PlanError(f"sparse_broadcast on ranks {self.ranks}: its root is one of them, got {self.root}")


@dataclass(frozen=True, slots=True)
class Level:
    """Calls that run side by side; on a rank that takes part in several of them, their spans are disjoint.

    Args:
        calls: the calls, in any order.
        name: what the level is for, in explanations ("reduce in hosts").
    """

    calls: tuple[Call, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class LogicalPlan:
    """A collective as levels of calls, for all ranks, in units: it holds for every size of buffer and every dtype.

    Args:
        algorithm: the schedule that made it.
        collective: what it computes. An all_gather or reduce_scatter has one unit per rank: unit r belongs to rank r.
            An all_to_all has P^2 units: unit s * P + r goes from rank s to rank r.
        size: number of ranks.
        units: equal parts into which the buffer is divided.
        levels: one after the other; each rank goes on as soon as its own calls of a level are done.
        note: a remark of the schedule ("no factorisation follows the topology: falls back to ring").
        root: the rank that a broadcast starts from and a reduce ends on.
    """

    algorithm: str
    collective: Collective
    size: int
    units: int
    levels: tuple[Level, ...]
    note: str = ""
    root: int = 0

    def __post_init__(self) -> None:
        if self.collective not in get_args(Collective):
            raise PlanError(f"plan of {self.collective!r}: a collective is one of {', '.join(get_args(Collective))}")
        if self.size < 1 or self.units < 1 or not 0 <= self.root < self.size:
            raise PlanError(
                f"{self.algorithm}: size {self.size}, units {self.units}, root {self.root}: a plan has at least one "
                "rank and one unit, and its root is one of the ranks"
            )
        seen: set[int] = set()  # groups that were looked at, by id(): large plans share their tuples
        for level in self.levels:
            for call in level.calls:
                known = id(call.ranks) in seen
                seen.add(id(call.ranks))
                outside = not known and (min(call.ranks) < 0 or max(call.ranks) >= self.size)
                if outside or call.root >= self.size:
                    raise PlanError(
                        f"{self.algorithm}, level {level.name!r}: {call.kind} on ranks {call.ranks}, root {call.root}: "
                        f"ranks are in [0, {self.size})"
                    )
                for span in call.spans:
                    if span.begin < 0 or span.count < 0 or span.end > self.units:
                        raise PlanError(
                            f"{self.algorithm}, level {level.name!r}: {call.kind} on units [{span.begin}, {span.end}): "
                            f"units are in [0, {self.units})"
                        )


def is_sparse(plan: LogicalPlan) -> bool:
    """Whether a plan sends entries of sparse vectors, or keeps a residual.

    Args:
        plan: any.

    Returns:
        True if a call is of a kind of sparse plans; such plans run as one segment, on float32.
    """
    return any(call.kind in (*LOCAL, *SPARSE) for level in plan.levels for call in level.calls)


def reversed_level(level: Level, name: str = "") -> Level:
    """The level that undoes a reduction: reduce_scatter becomes all_gather, reduce becomes broadcast, on the same
    groups.

    Args:
        level: calls of reduce_scatter and reduce.
        name: of the new level.

    Returns:
        The mirrored level.

    Raises:
        PlanError: a call is not a reduction.
    """
    mirror: dict[Kind, Kind] = {"reduce_scatter": "all_gather", "reduce": "broadcast"}
    for call in level.calls:
        if call.kind not in mirror:
            raise PlanError(f"level {level.name!r} has a call of {call.kind}: only reductions can be mirrored")
    return Level(tuple(Call(mirror[c.kind], c.ranks, c.spans, c.root, c.method) for c in level.calls), name)
