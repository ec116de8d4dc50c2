"""Tree: two binary trees at once, each with half of the buffer; an inner node of one tree is a leaf of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="tree",
    idea="Two binary trees carry half of the buffer each, up and down; a rank that adds in one is a leaf of the other.",
    drawing="""\
P = 4 in order, one rank a host:   1st half:  0 -> 1 <- 2     2nd half:  1 -> 2 <- 3
                                                  1 <- 3                     2 <- 0
Ranks of a host form a chain to one of two masters, which stand for it in the trees.""",
    rounds="2 * ceil(log2(m + 1)) - 2, and 2 (p - 1) in hosts, for m hosts of at most p ranks",
    bytes="2 n by each host, pipelined in segments",
    limits="none; a host's link carries 2 n, the ring's 2 (P - 1) / P * n, in few rounds; racks carry more",
    source="Sanders, Speck and Traeff 2009, two-tree algorithms; NCCL's tree",
)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node of a binary tree whose places are 0 .. m - 1 from left to right."""

    place: int
    height: int
    children: tuple[_Branch, ...]

    def branches(self) -> Iterator[_Branch]:
        """This branch and all branches below it, except for leaves."""
        if self.children:
            yield self
        for child in self.children:
            yield from child.branches()


def _binary(first: int, count: int) -> _Branch:
    """The tree over [first, first + count): its even places are leaves, its odd places are not (Sanders et al.)."""
    left = (1 << (count.bit_length() - 1)) - 1
    right = count - left - 1
    children = ((_binary(first, left),) if left else ()) + ((_binary(first + left + 1, right),) if right else ())
    return _Branch(first + left, 1 + max((child.height for child in children), default=-1), children)


def hosts_of(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks at the places of the two trees: hosts, or single ranks if there is only one host."""
    hosts = tree.hosts()
    return hosts if len(hosts) > 1 else tuple((rank,) for rank in tree.ranks)


def build(tree: Tree) -> LogicalPlan:
    """A plan of two units, one for each tree; the executor pipelines segments through it."""
    hosts = hosts_of(tree)
    halves = ((Span(0, 1),), (Span(1, 1),))
    # The second tree is the first, shifted by one place, so that the inner nodes of the first are its leaves.
    masters = ([host[0] for host in hosts], [host[-1] for host in hosts[1:] + hosts[:1]])
    inside = [
        Call("reduce", chain, half, chain[-1])
        for host in hosts
        if len(host) > 1
        for half, chain in zip(halves, (host[::-1], host), strict=True)
    ]
    up = [Level(tuple(inside), "reduce in hosts")] if inside else []
    root = _binary(0, len(hosts))
    for height in range(1, root.height + 1):
        calls = [
            Call(
                "reduce",
                (*(at[child.place] for child in branch.children), at[branch.place]),
                half,
                at[branch.place],
                "direct",
            )
            for branch in root.branches()
            if branch.height == height
            for half, at in zip(halves, masters, strict=True)
        ]
        up.append(Level(tuple(calls), f"reduce, height {height}"))
    down = [reversed_level(level, level.name.replace("reduce", "broadcast")) for level in reversed(up)]
    return LogicalPlan("tree", "allreduce", tree.size, 2, (*up, *down))
