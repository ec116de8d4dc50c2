"""The price of a bucket in a lane, and the times of the buckets of a step in it.

The engine starts a bucket while the one before it is still under way. So the price T of a bucket has two parts: `hold`,
after which the next bucket may begin, and `tail`, what the bucket's last segment takes after that. For the buckets of a
lane in their order, with r_j the time at which bucket j is ready:

    begin_j = max(begin_{j-1} + hold_{j-1}, r_j)        delivered_j = begin_j + hold_j + tail_j

MG-WFBP (Eq. 9 and 20) has the same with tail = 0: its messages follow one another.

Hold and tail come from equal buckets back to back, as many as overfill the window (two, unless a bucket has fewer
segments than the window): with T_m the time of m of them, hold = (T_m - T_1) / (m - 1), and tail = T_1 - hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_ext.planning.cost.levels import bottleneck, load_of
from hvd_ext.planning.cost.simulate import MOST_MESSAGES, WINDOW, Segments, program_of
from hvd_ext.planning.cost.sparse import DENSE, Sparsity
from hvd_ext.planning.limits import MOST_SIMULATED
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.simulation.events import Play, Program, Run
from hvd_ext.topology.tree import Tree

_Floats = NDArray[np.float64]
Travelling = TypeVar("Travelling")

# The largest number of windows of a bucket that are played; the rest has the pace of their second half. A price needs
# less precision than `simulate` has, and a table needs many.
PLAYED_WINDOWS = 4
LEAST_NBYTES, MOST_NBYTES = 1 << 10, 1 << 28  # the range of tables; smaller buckets cost what the smallest costs


@dataclass(frozen=True, slots=True)
class Parts:
    """The price of a bucket in a lane.

    Args:
        hold_s: how long the bucket holds the lane before the next one may begin, seconds.
        tail_s: what its last segment takes after that, seconds.
    """

    hold_s: float
    tail_s: float

    @property
    def seconds(self) -> float:
        """The time of the bucket in a lane of its own."""
        return self.hold_s + self.tail_s


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The price of a bucket for any size: straight lines between points, and on beyond the last one.

    Args:
        nbytes: the sizes of the points, ascending.
        hold_s: the hold of each point, never falling.
        total_s: hold and tail of each point, never falling.
    """

    nbytes: _Floats
    hold_s: _Floats
    total_s: _Floats

    def parts_s(self, nbytes: _Floats | Sequence[float]) -> tuple[_Floats, _Floats]:
        """The hold and the tail of buckets of these sizes, seconds; both are 0 for an empty bucket."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        hold_s, total_s = (self._at(values, sizes) for values in (self.hold_s, self.total_s))
        return hold_s, np.maximum(total_s - hold_s, 0.0)

    def parts(self, nbytes: _Floats | Sequence[float]) -> list[Parts]:
        """The prices of buckets of these sizes."""
        hold_s, tail_s = self.parts_s(nbytes)
        return list(map(Parts, hold_s.tolist(), tail_s.tolist()))

    def _at(self, values: _Floats, sizes: _Floats) -> _Floats:
        seconds = np.interp(sizes, self.nbytes, values)
        if len(self.nbytes) > 1:
            slope = (values[-1] - values[-2]) / (self.nbytes[-1] - self.nbytes[-2])
            seconds = seconds + slope * np.maximum(sizes - self.nbytes[-1], 0.0)
        return np.where(sizes > 0, seconds, 0.0)


def table(points: Sequence[tuple[float, Parts]]) -> Table:
    """Makes a table of ascending sizes in bytes and prices; a larger bucket never costs less than a smaller one."""
    return Table(
        np.array([nbytes for nbytes, _ in points], dtype=np.float64),
        np.maximum.accumulate([parts.hold_s for _, parts in points]),
        np.maximum.accumulate([parts.seconds for _, parts in points]),
    )


def line(a_s: float, b_s_per_byte: float) -> Table:
    """The price T = a + b M of MG-WFBP's Eq. 9: one message after the other, without a tail."""
    return table([(nbytes, Parts(a_s + b_s_per_byte * nbytes, 0.0)) for nbytes in (0.0, 1.0)])


def doubling(price: Callable[[int], Parts]) -> Table:
    """Makes the table of the powers of two from LEAST_NBYTES to MOST_NBYTES."""
    sizes = [1 << bits for bits in range(LEAST_NBYTES.bit_length() - 1, MOST_NBYTES.bit_length())]
    return table([(nbytes, price(nbytes)) for nbytes in sizes])


def parts_of(plan: LogicalPlan, tree: Tree, nbytes: int, segment_nbytes: int, sparsity: Sparsity = DENSE) -> Parts:
    """The price of a bucket in a lane.

    Args:
        nbytes: the bytes of the bucket as sent.
    """
    if not nbytes or tree.size == 1:
        return Parts(0.0, 0.0)
    segments = max(-(-nbytes // segment_nbytes), 1)
    each, buckets = nbytes / segments, max(WINDOW // segments, 1) + 1
    if tree.size > MOST_SIMULATED:
        load = load_of(plan, tree, sparsity)
        handover_s = tree.handover.alpha_s + nbytes * tree.handover.beta_s_per_byte  # in no lane: it comes before
        alone_s = load.price_s(nbytes, segment_nbytes) - handover_s
        waits_s = alone_s / WINDOW if segments < WINDOW else 0.0
        hold_s = min(max(nbytes * load.pace_s_per_byte(each), waits_s), alone_s)
        return Parts(hold_s, alone_s - hold_s)
    least_s = each * bottleneck(plan, tree, sparsity).busiest_s_per_byte
    row = Segments(program_of(plan, tree, sparsity), each, least_s, WINDOW, PLAYED_WINDOWS * WINDOW)
    alone_s = row.first_s(segments)
    hold_s = (row.first_s(buckets * segments) - alone_s) / (buckets - 1)
    hold_s = min(max(hold_s, segments * least_s), alone_s)  # while queues still grow, a lane seems faster than its port
    return Parts(hold_s, alone_s - hold_s)


@dataclass(frozen=True, slots=True)
class InLane:
    """A bucket in a lane.

    Args:
        nbytes: the bytes of the bucket as sent.
        ready_s: the time at which its last tensor is ready, seconds.
        price: gives its price, which is asked for where the lane is not played.
        is_bucket: whether it is a bucket, and not something else that travels beside them.
    """

    plan: LogicalPlan
    nbytes: int
    segment_nbytes: int
    ready_s: float
    price: Callable[[], Parts]
    sparsity: Sparsity = DENSE
    is_bucket: bool = True

    @property
    def segments(self) -> int:
        """The number of its segments."""
        return -(-self.nbytes // self.segment_nbytes)


def messages_of(buckets: Sequence[InLane], tree: Tree) -> float:
    """Counts the messages of a play of a lane; infinite in clusters of more than 16 ranks, which are not played."""
    if tree.size > MOST_SIMULATED:
        return float("inf")
    return sum(bucket.segments * len(program.messages) for bucket, program in _programs(buckets, tree))


def _programs(buckets: Sequence[InLane], tree: Tree) -> list[tuple[InLane, Program]]:
    """The buckets that are not empty, with their programs."""
    sent = [bucket for bucket in buckets if bucket.nbytes]
    known: dict[tuple[int, Sparsity], Program] = {}  # by the id() of the plan, whose hash takes long
    for bucket in sent:
        key = (id(bucket.plan), bucket.sparsity)
        known[key] = known.get(key) or program_of(bucket.plan, tree, bucket.sparsity)
    return [(bucket, known[id(bucket.plan), bucket.sparsity]) for bucket in sent]


def times_in_lane(
    buckets: Sequence[InLane], tree: Tree, most_messages: int = MOST_MESSAGES
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The times at which the buckets of a lane begin and end.

    Args:
        buckets: the buckets in the order in which they start.
        most_messages: the largest number of messages that are played; lanes with more, and clusters of more than 16
            ranks, have the times of the prices.

    Returns:
        For each bucket the time at which it begins, and the time at which it has ended on all ranks, seconds.
    """
    if messages_of(buckets, tree) > most_messages:
        begins_s, ends_s = recursion([bucket.ready_s for bucket in buckets], [bucket.price() for bucket in buckets])
        return tuple(begins_s), tuple(ends_s)
    runs = [
        Run(program, bucket.nbytes / bucket.segments, bucket.segments, bucket.ready_s)
        for bucket, program in _programs(buckets, tree)
    ]
    played = iter(zip(*Play(runs, WINDOW).seconds(), strict=True) if runs else ())
    begins_s, ends_s, free_s = [], [], 0.0
    for bucket in buckets:
        # an empty bucket has no segments, and ends when it may begin
        free_s, end_s = next(played) if bucket.nbytes else (max(free_s, bucket.ready_s),) * 2
        begins_s.append(free_s)
        ends_s.append(end_s)
    return tuple(begins_s), tuple(ends_s)


def in_turn(
    buckets: Iterable[tuple[float, Travelling]], loads: Iterable[tuple[float, Travelling]]
) -> list[tuple[float, Travelling]]:
    """Puts what else uses a lane between its buckets: each load goes before the first bucket that is ready later.

    Args:
        buckets: the time at which each bucket is ready, in the order in which they start, and the bucket.
        loads: the same of what is no bucket, in any order.
    """
    scheduled = list(buckets)
    for since, load in sorted(loads, key=lambda pair: pair[0]):
        later = (number for number, (ready_s, _) in enumerate(scheduled) if ready_s > since)
        scheduled.insert(next(later, len(scheduled)), (since, load))
    return scheduled


def recursion(ready_s: Sequence[float], parts: Sequence[Parts]) -> tuple[list[float], list[float]]:
    """The times of the buckets of a lane by their prices, as in the module's docstring.

    Args:
        ready_s: the time at which each bucket is ready, in the order in which they start.

    Returns:
        The times at which the buckets begin, and those at which they are delivered, seconds.
    """
    begins_s, ends_s, free_s = [], [], 0.0
    for ready, price in zip(ready_s, parts, strict=True):
        begin_s = max(free_s, ready)
        free_s = begin_s + price.hold_s
        begins_s.append(begin_s)
        ends_s.append(free_s + price.tail_s)
    return begins_s, ends_s
