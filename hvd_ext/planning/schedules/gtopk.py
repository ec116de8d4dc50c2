"""gTop-k: selections are merged along a binomial tree, and all ranks get the k largest elements of the last merge."""

from __future__ import annotations

from hvd_ext.planning import sparse_stages
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="gtopk",
    idea="Ranks add up their selections in pairs and keep the k largest elements; all ranks get those of the last sum.",
    drawing="""\
P = 4:  1 -> 0, 3 -> 2     merge: keep k of 2 k     0 -> 2     the k elements
        2 -> 0             merge                    0 -> 1, 2 -> 3""",
    rounds="2 * ceil(log2 P), and local work",
    bytes="2 k entries by a rank at most in each round; 2 * ceil(log2 P) * k by the root",
    limits="none; what a merge drops stays in the residual of the rank that merges",
    source="Shi et al. 2019, gTop-k S-SGD",
    sparse=True,
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of one unit, in which neighbours in the tree merge first; for one rank it is the dense plan."""
    if tree.size == 1:
        return dense(tree)
    ranks, buffer = tree.ranks, (Span(0, 1),)
    levels = [sparse_stages.local("select", ranks, dict.fromkeys(ranks, (0, 1)))]
    for step in range((tree.size - 1).bit_length()):
        half = 1 << step
        pairs = [(ranks[i], ranks[i + half]) for i in range(0, tree.size - half, 2 * half)]
        calls = [Call("sparse_merge", pair, buffer, method="direct") for pair in pairs]
        levels.append(Level(tuple(calls), f"merge at distance {half}"))
    levels.append(Level((Call("sparse_broadcast", ranks, buffer, ranks[0], "recursive"),), "give all the last k"))
    levels.append(Level(tuple(Call("scatter", (rank,), buffer) for rank in ranks), "scatter"))
    return LogicalPlan("gtopk", "allreduce", tree.size, 1, tuple(levels))


def dense(tree: Tree, height: int = 0) -> LogicalPlan:
    """The plan of a step in which nothing is selected: every rank folds its whole buffer before FlexReduce."""
    return sparse_stages.dense_plan("gtopk", tree, 0)


def variants(tree: Tree, height: int = 0) -> tuple[LogicalPlan, ...]:
    """The plan of build(); every rank selects by itself, whatever the height."""
    return (build(tree),)
