"""The logical plan: a collective as levels of group calls, in the words of the papers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
Method = Literal["ring", "recursive", "direct", "two_shot"]
Collective = Literal["allreduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "all_to_all"]

ROOTED: tuple[Kind, ...] = ("reduce", "broadcast", "sparse_broadcast")
# Calls of these kinds run on one rank and send nothing.
LOCAL: tuple[Kind, ...] = ("select", "fold", "scatter")
# Calls of these kinds send the entries of sparse vectors.
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

    - reduce_scatter: ranks[i] gets spans[i], reduced over all ranks of the group.
    - all_gather: all ranks of the group get spans[i] from ranks[i].
    - reduce: `root` gets spans[0], reduced over all ranks of the group.
    - broadcast: all ranks of the group get spans[0] from `root`.
    - exchange: two ranks send each other spans[0], and both get the sum.
    - all_to_all: spans[i] of ranks[i] is cut into one equal part for each rank of the group, and ranks[j] gets part j.

    The following kinds belong to sparse plans, in which each rank has a sparse vector (tf_ops/plan/ir.def):

    - select: spans[0] of ranks[0] goes through error feedback, and the k largest elements become the rank's vector.
    - fold: spans[0] of ranks[0] goes through error feedback as a whole; nothing is selected.
    - sparse_allreduce: on all ranks of the group spans[0] becomes the sum of the entries of their vectors. All ranks
      add them up in the order of the group, so that they get the same bits. By the method "two_shot" each rank adds up
      one piece of the span, makes a vector of the sum, and sends it to all; what that vector leaves out goes back to
      the residual (the two stages of 1-bit Adam, Tang et al., ICML 2021, and CGX's scatter-reduce-allgather).
    - sparse_all_gather: like all_gather, but only non-zero elements are sent.
    - sparse_merge: ranks[1] sends its vector to ranks[0], whose vector becomes the k largest entries of the sum.
    - sparse_broadcast: the vector of `root` becomes the vector of all ranks of the group.
    - scatter: spans[0] of ranks[0] is set to the entries of the rank's vector, and to 0 elsewhere.

    A reduce may have a root outside `ranks`. This root does not contribute; ranks[-1], the member of the group nearest
    to it, sends it the result. FlexReduce needs this where a learner's target range leaves its current range.

    Args:
        ranks: the group in the order of its ring.
        spans: one span per rank for reduce_scatter, all_gather, all_to_all and sparse_all_gather, else one span.
        root: the rank where a reduce ends or a broadcast starts; -1 for the other kinds.
        method: how the call is lowered: as a ring (chains of neighbours), as recursive halving or doubling (a circulant
            pattern for any number of ranks), or direct (all ranks send to the owner in one round). An all_to_all in a
            ring sends to the next rank, then to the one after it, and so on. Exchanges and the sparse kinds have only
            one way, and ignore the method.
    """

    kind: Kind
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    root: int = -1
    method: Method = "ring"

    @property
    def target(self) -> int:
        """The place in the group at which a reduction to the root ends; its last one if the root is outside of it."""
        return self.ranks.index(self.root) if self.root in self.ranks else len(self.ranks) - 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.method not in get_args(Method):
            raise PlanError(
                f"call ({self.kind}, {self.method}): the kind must be one of {', '.join(get_args(Kind))} and the "
                f"method one of {', '.join(get_args(Method))}"
            )
        rooted = self.kind in ROOTED
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise PlanError(
                f"{self.kind} on ranks {self.ranks}: a group must have at least one rank, and each rank once"
            )
        one_span = self.kind in _ONE_SPAN
        if len(self.spans) != (1 if one_span else len(self.ranks)):
            raise PlanError(
                f"{self.kind} on ranks {self.ranks}: it takes {'one span' if one_span else 'one span per rank'}, got "
                f"{len(self.spans)}"
            )
        if self.kind in _PAIRS and len(self.ranks) != 2:
            raise PlanError(f"{self.kind} on ranks {self.ranks}: it must join two ranks, got {len(self.ranks)}")
        if self.kind in LOCAL and len(self.ranks) != 1:
            raise PlanError(f"{self.kind} on ranks {self.ranks}: it must have one rank, got {len(self.ranks)}")
        if self.kind == "all_to_all" and (
            self.method == "recursive" or any(span.count % len(self.ranks) for span in self.spans)
        ):
            raise PlanError(
                f"all_to_all on ranks {self.ranks} ({self.method}): must be a ring or direct, and each span must "
                f"divide into {len(self.ranks)} equal parts"
            )
        if rooted != (self.root >= 0):
            raise PlanError(
                f"{self.kind} with root {self.root}: {', '.join(ROOTED)} have a root, the other kinds have none"
            )
        if self.kind == "sparse_broadcast" and self.root not in self.ranks:
            raise PlanError(f"sparse_broadcast on ranks {self.ranks}: its root must be one of them, got {self.root}")


@dataclass(frozen=True, slots=True)
class Level:
    """Calls that run at the same time; if a rank takes part in several of them, their spans are disjoint.

    Args:
        name: the purpose of the level, for explanations ("reduce in hosts").
    """

    calls: tuple[Call, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class LogicalPlan:
    """A collective as levels of calls, for all ranks. It is in units, and so valid for every buffer size and dtype.

    Args:
        collective: what the plan computes. An all_gather or reduce_scatter has one unit per rank: unit r belongs to
            rank r. An all_to_all has P^2 units: unit s * P + r goes from rank s to rank r.
        units: the number of equal parts into which the buffer is divided.
        levels: the levels in their order; a rank begins the next level as soon as its own calls of a level are done.
        note: a remark of the schedule ("no factorisation follows the topology: falls back to ring").
        root: the rank where a broadcast starts or a reduce ends.
    """

    algorithm: str
    collective: Collective
    size: int
    units: int
    levels: tuple[Level, ...]
    note: str = ""
    root: int = 0

    def __hash__(self) -> int:
        # The levels of 4,096 ranks take 20 ms to hash, at each look into a cache; equal hashes are compared in full.
        return hash((self.algorithm, self.collective, self.size, self.units, len(self.levels), self.note, self.root))

    def __post_init__(self) -> None:
        if self.collective not in get_args(Collective):
            raise PlanError(
                f"plan of {self.collective!r}: a collective must be one of {', '.join(get_args(Collective))}"
            )
        if self.size < 1 or self.units < 1 or not 0 <= self.root < self.size:
            raise PlanError(
                f"{self.algorithm}: size {self.size}, units {self.units}, root {self.root}: a plan must have at least "
                "one rank and one unit, and its root must be one of the ranks"
            )
        seen: set[int] = set()  # the id() of each group that was checked: large plans share their tuples
        for level in self.levels:
            for call in level.calls:
                known = id(call.ranks) in seen
                seen.add(id(call.ranks))
                outside = not known and (min(call.ranks) < 0 or max(call.ranks) >= self.size)
                if outside or call.root >= self.size:
                    raise PlanError(
                        f"{self.algorithm}, level {level.name!r}: {call.kind} on ranks {call.ranks}, root {call.root}: "
                        f"ranks must be in [0, {self.size})"
                    )
                for span in call.spans:
                    if span.begin < 0 or span.count < 0 or span.end > self.units:
                        raise PlanError(
                            f"{self.algorithm}, level {level.name!r}: {call.kind} on units [{span.begin}, {span.end}): "
                            f"units must be in [0, {self.units})"
                        )


@lru_cache(maxsize=256)
def is_sparse(plan: LogicalPlan) -> bool:
    """Whether a plan sends entries of sparse vectors or keeps a residual; it then runs as one segment, on float32."""
    return any(call.kind in (*LOCAL, *SPARSE) for level in plan.levels for call in level.calls)


def reversed_level(level: Level, name: str = "") -> Level:
    """Mirrors a level of reductions: on the same groups reduce_scatter becomes all_gather, and reduce broadcast.

    Raises:
        PlanError: a call is not a reduction.
    """
    mirror: dict[Kind, Kind] = {"reduce_scatter": "all_gather", "reduce": "broadcast"}
    for call in level.calls:
        if call.kind not in mirror:
            raise PlanError(f"level {level.name!r} has a call of {call.kind}: only reductions can be mirrored")
    return Level(tuple(Call(mirror[c.kind], c.ranks, c.spans, c.root, c.method) for c in level.calls), name)
