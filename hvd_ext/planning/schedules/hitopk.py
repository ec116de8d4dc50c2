"""HiTopKComm: each host reduces all elements, its ranks select in their shards, and hosts exchange the selections."""

from __future__ import annotations

from dataclasses import replace

from hvd_ext.planning import sparse_stages
from hvd_ext.planning.model import Call, Level, LogicalPlan, Method, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="hitopk",
    idea="Each host adds up, its ranks select in their shards, and only the selected elements leave the host.",
    drawing="""\
P = 2 + 3 ranks, n = 6 elements; shards are 3 + 3 and 2 + 2 + 2:
  0: a b c . . .    select    pieces ab, c, d, ef     0..5 all have
  1: . . . d e f      in      0 <-> 2   1 <-> 3       a b c d e f,
  2: a b . . . .     each     0 <-> 3   1 <-> 4       by an all-gather
  3: . . c d . .                                      in each host
  4: . . . . e f""",
    rounds="2 (p - 1) in hosts of at most p ranks, 1 between hosts, and local work",
    bytes="(m - 1) * K entries by each of m hosts, K = density * n; in hosts 2 (p - 1) / p * n, or less: entries",
    limits="none; on one host nothing is selected; nothing is pipelined within a buffer",
    source="CommLib Section 3.2, Algorithm 2, Eq. 4-10; hosts of unequal size: FlexReduce's ranges",
    sparse=True,
)


def build(
    tree: Tree, *, gather: str = "dense", exchange: Method = "direct", height: int = sparse_stages.HOSTS
) -> LogicalPlan:
    """The four steps of Algorithm 2; for a single party the dense plan, because a selection would save nothing.

    Args:
        gather: the last step: "dense" gathers whole shards back through the levels, and "sparse" sends the non-zero
            elements of each rank's shard to all other ranks of its party.
        exchange: between the parties: "direct" sends each selection to all that need it, and "two_shot" to the rank
            that adds up a piece and sends a selection of the sum, which is fewer bytes from three parties on.
        height: the height of the parties: 1 for hosts, 2 for racks of hosts.
    """
    members = sparse_stages.parties(tree, height)
    if len(members) == 1:
        return sparse_stages.dense_plan("hitopk", tree, height)
    units = sparse_stages.units_of(members, len(members) if exchange == "two_shot" else 1)
    up, shards = sparse_stages.up(tree, height, units)
    selects = sparse_stages.local("select", tree.ranks, shards)
    middle = (selects, sparse_stages.exchange(members, shards, exchange))
    plan = LogicalPlan("hitopk", "allreduce", tree.size, units, (*up, *middle))
    if not up:
        return plan
    if gather == "dense":
        down = [reversed_level(level, level.name.replace("reduce-scatter", "all-gather")) for level in reversed(up)]
        again = ", sums are selected again" if exchange == "two_shot" else ""
        return replace(plan, levels=(*plan.levels, *down), note=f"whole shards are gathered in hosts{again}")
    spans = {rank: Span(begin, end - begin) for rank, (begin, end) in shards.items()}
    calls = [
        Call("sparse_all_gather", party.ranks, tuple(spans[rank] for rank in party.ranks), method="direct")
        for party in members
        if len(party.ranks) > 1
    ]
    down = [Level(tuple(calls), "all-gather in hosts")]
    return replace(plan, levels=(*plan.levels, *down), note="what is not 0 is gathered in hosts")


def dense(tree: Tree, height: int = sparse_stages.HOSTS) -> LogicalPlan:
    """The plan of a step in which nothing is selected: FlexReduce, with folds when a party has been reduced."""
    return sparse_stages.dense_plan("hitopk", tree, height)


def variants(tree: Tree, height: int = sparse_stages.HOSTS) -> tuple[LogicalPlan, ...]:
    """The plans from which the planner takes the cheapest: that of build(), one that gathers non-zero elements, and one
    that sends selections of sums.

    The second one needs several parties that are hosts, and a host with several ranks; the third three parties.
    """
    plan, members = build(tree, height=height), sparse_stages.parties(tree, height)
    several = len(members) > 1 and any(len(party.ranks) > 1 for party in members)
    in_hosts = all(party.height <= sparse_stages.HOSTS for party in members)
    plans = (plan, build(tree, gather="sparse", height=height)) if several and in_hosts else (plan,)
    return (*plans, build(tree, exchange="two_shot", height=height)) if len(members) > 2 else plans
