"""Two levels: reduce to a master on each host, a ring over the masters, broadcast in the hosts."""

from __future__ import annotations

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="two_level",
    idea="One master per host sums up its host, the masters run a ring among themselves, and give the result back.",
    drawing="""\
P = 4 on 2 hosts, masters 0 and 2:
  1 -> 0      0 <=> 2      0 -> 1
  3 -> 2      (ring)       2 -> 3""",
    rounds="2 (p - 1) + 2 (m - 1) for m hosts of at most p ranks",
    bytes="n by each rank inside its host, 2 (m - 1) / m * n over each link between hosts",
    limits="none; the other ranks of a host idle while the masters talk, and a master's port carries everything",
    source="BlueConnect Section 2.3, Fig. 2, Eq. 7; Jia et al. 2018",
)


def build(tree: Tree) -> LogicalPlan:
    """A plan with one unit per host; the master of a host is its first rank in tree order."""
    hosts = tree.hosts()
    units = len(hosts)
    masters = tuple(host[0] for host in hosts)
    buffer = (Span(0, units),)
    inside = Level(
        tuple(Call("reduce", host, buffer, host[0]) for host in hosts if len(host) > 1), "reduce to a master per host"
    )
    between = Level(
        (Call("reduce_scatter", masters, tuple(Span(i, 1) for i in range(units))),), "reduce-scatter over the masters"
    )
    down = [inside] if inside.calls else []
    down += [between] if units > 1 else []
    names = {inside.name: "broadcast from the masters", between.name: "all-gather over the masters"}
    up = [reversed_level(level, names[level.name]) for level in reversed(down)]
    return LogicalPlan("two_level", "allreduce", tree.size, units, (*down, *up))
