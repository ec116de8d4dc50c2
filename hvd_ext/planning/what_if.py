"""What a step would take if something were changed: links, hosts, bytes, or how often and how late hosts exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from hvd_ext.compression import AnyOf, Codec
from hvd_ext.compression.quantized import Bits, Quantized
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError, TopologyError
from hvd_ext.planning import lane_prices, scaling
from hvd_ext.planning.cost import lane
from hvd_ext.planning.scaling import Row, best, on_cluster, on_line
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.topology.scale import scaled
from hvd_ext.topology.tree import Link, Tree, relinked

FASTER = (2, 10)
LOCAL_STEPS = (16, 64)


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and the step that it leads to.

    Args:
        row: the buckets of the step, the best of the bucketers; None if the change cannot be priced.
        gain: the samples per second of the job divided by those without a change.
        why_not: the reason why it cannot be priced, or "".
    """

    name: str
    row: Row | None
    iteration_s: float = 0.0
    gain: float = 0.0
    why_not: str = ""

    def as_json(self) -> dict[str, object]:
        """Converts the change to values that JSON can hold; times are in seconds."""
        if self.row is None:
            return {"what_if": self.name, "why_not": self.why_not}
        return {
            "what_if": self.name,
            **{name: getattr(self.row, name) for name in ("ranks", "bucketer", "algorithm", "buckets")},
            "iteration_seconds": self.iteration_s,
            "gain": self.gain,
        }


def on_a_cluster(
    tree: Tree,
    times: StepTimes,
    bucketers: Sequence[str] = scaling.BUCKETERS,
    algorithm: str = "auto",
    density: float = 0.01,
) -> list[Change]:
    """Prices changes of a job on a cluster, each by itself and with the best of the bucketers.

    Returns:
        The job without a change, then the changes.

    Raises:
        PlanError: there is no such bucketer or algorithm, or it cannot run on the cluster.
    """

    scaling.check(bucketers)

    def best_row(on: Tree = tree, of: StepTimes = times, wire: str | None = None, codec: Codec | None = None) -> Row:
        rows, refused = [], None
        for name in bucketers:
            try:
                rows.append(on_cluster(on, of, name, algorithm, wire=wire, codec=codec))
            except PlanError as error:
                refused = error
        if refused is not None and not rows:
            raise refused
        return best(rows)

    now = best_row()
    changes = [Change("as it is", now, now.iteration_s, 1.0)]
    for factor in FASTER:
        name = f"links between hosts {factor} times as fast"
        if len(tree.hosts()) == 1:
            changes.append(Change(name, None, why_not="there is one host"))
        else:
            changes.append(_change(name, now, best_row(faster(tree, factor))))
    try:
        changes.append(_change("one host more", now, best_row(scaled(tree, tree.size + len(tree.hosts()[0])))))
    except TopologyError as error:
        changes.append(Change("one host more", None, why_not=str(error)))
    # A model file has no shapes, so that the number of elements alone decides which tensors are compressed.
    codecs: dict[str, Codec] = {
        f"TopK({density:g})": TopK(density=density, vectors=True),
        **{f"Quantized(bits={bits})": Quantized(bits=bits, vectors=True) for bits in get_args(Bits)},
        'compression="auto"': AnyOf(vectors=True),
    }
    for name, compressed in codecs.items():
        try:
            changes.append(_change(name, now, best_row(codec=compressed)))
        except PlanError as error:
            changes.append(Change(name, None, why_not=str(error)))
    changes.append(_change("half precision on the wire", now, best_row(wire="float16")))
    if len(tree.hosts()) == 1:
        changes += [Change(f"LocalSteps(every={every})", None, why_not="there is one host") for every in LOCAL_STEPS]
    else:
        inside = max((best_row(tree.subset(host)) for host in tree.hosts()), key=lambda row: row.iteration_s)
        for codec_name, codec in (("", None), (", Quantized(bits=4)", codecs["Quantized(bits=4)"])):
            outer = best_row(of=_at_once(times), codec=codec)
            for every in LOCAL_STEPS:
                changes.append(_local(f"LocalSteps(every={every}){codec_name}", now, inside, outer, every))
    changes.append(_late(now, best_row(of=_at_once(times))))
    changes.append(_gathered(now, lane_prices.dense_table(tree, algorithm), times, bucketers))
    return changes


def on_a_line(
    price: lane.Table, times: StepTimes, bucketers: Sequence[str] = scaling.BUCKETERS, ranks: int = 1
) -> list[Change]:
    """Prices changes where the price of an allreduce is given, each by itself and with the best of the bucketers.

    Returns:
        The job without a change, then the changes.

    Raises:
        PlanError: there is no such bucketer.
    """

    def best_row(of: lane.Table = price, when: StepTimes = times) -> Row:
        return best([on_line(of, when, name, ranks) for name in bucketers])

    now = best_row()
    changes = [Change("as it is", now, now.iteration_s, 1.0)]
    changes += [_change(f"bytes {factor} times as fast", now, best_row(_cheaper(price, factor))) for factor in FASTER]
    fixed = "--allreduce-cost holds for one number of ranks"
    changes.append(Change("one host more", None, why_not=fixed))
    changes.append(Change("TopK", None, why_not="--allreduce-cost is the price of dense gradients"))
    changes.append(_change("half precision on the wire", now, best_row(_cheaper(price, 2))))
    changes.append(_late(now, best_row(when=_at_once(times))))
    changes.append(_gathered(now, price, times, bucketers))
    return changes


def winner(changes: Sequence[Change]) -> Change:
    """Finds the change that brings the most samples per second; the first of equals."""
    return max(changes, key=lambda change: change.gain)


def faster(tree: Tree, factor: float) -> Tree:
    """Makes a cluster whose links between hosts, and between racks, are faster by a factor; latencies stay."""

    def quick(link: Link) -> Link:
        return replace(link, beta_s_per_byte=link.beta_s_per_byte / factor)

    return replace(tree, root=relinked(tree.root, quick, between_hosts=True))


def _change(name: str, now: Row, row: Row) -> Change:
    return Change(name, row, row.iteration_s, row.ranks / row.iteration_s / (now.ranks / now.iteration_s))


def _at_once(times: StepTimes) -> StepTimes:
    """The step of which all gradients are there from the begin, because they are those of the step before."""
    return replace(times, ready_s=(0.0,) * len(times.tensors), forward_s=0.0, update_s=None)


def _late(now: Row, communication: Row) -> Change:
    iteration_s = max(now.alone_s, communication.exposed_s)
    return Change("updates one step late", communication, iteration_s, now.iteration_s / iteration_s)


def _local(name: str, now: Row, inside: Row, outer: Row, every: int) -> Change:
    """Prices local steps: hosts reduce alone, and an outer step in which all bytes travel follows each `every` steps.

    Args:
        inside: the steps of the host that takes longest.
        outer: the outer step, which is exposed communication only.
    """
    iteration_s = inside.iteration_s + outer.exposed_s / every
    return Change(name, replace(outer, ranks=now.ranks), iteration_s, now.iteration_s / iteration_s)


def _cheaper(price: lane.Table, factor: float) -> lane.Table:
    """The price if a byte took the factor less, with the same start-up time."""
    return replace(price, nbytes=price.nbytes * factor)


def _gathered(now: Row, price: lane.Table, times: StepTimes, bucketers: Sequence[str]) -> Change:
    """Prices reductions behind the backward pass and gathers behind the next forward pass, half of a bucket each."""
    half = replace(price, hold_s=price.hold_s / 2, total_s=price.total_s / 2)
    rows = [on_line(half, times, name, now.ranks) for name in bucketers]
    steps = [gathered_s(row, half) for row in rows]
    iteration_s, number = min((step_s, number) for number, step_s in enumerate(steps))
    row = replace(rows[number], algorithm=now.algorithm)
    return Change("gathers behind the next forward pass", row, iteration_s, now.iteration_s / iteration_s)


def gathered_s(row: Row, gather: lane.Table) -> float:
    """The time of a step whose buckets are reduced as in a row, and gathered behind the next forward pass.

    The gathers begin when all reductions have ended, with the buckets of the first layers; a layer's forward pass waits
    for its bucket. The forward pass is divided over the tensors as the backward pass is.

    Returns:
        From the end of one forward pass to that of the next, seconds.
    """
    times, sizes = row.times, [tensor.nbytes for tensor in row.times.tensors]
    order = sorted(range(row.buckets), key=lambda bucket: min(row.members[bucket]))
    parts = gather.parts([sum(sizes[place] for place in row.members[bucket]) for bucket in order])
    _, ends = lane.recursion([row.alone_s + row.exposed_s] * len(parts), parts)
    here = {place: end for bucket, end in zip(order, ends, strict=True) for place in row.members[bucket]}
    begin_s = [times.forward_s, *(times.ready_s[place] for place in times.order)]
    backward = {place: times.ready_s[place] - before for place, before in zip(times.order, begin_s, strict=False)}
    scale = times.forward_s / max(times.computed_s - times.forward_s, 1e-30)
    clock_s = row.alone_s
    for place in range(len(sizes)):
        clock_s = max(clock_s, here[place]) + backward[place] * scale
    return clock_s - times.forward_s
