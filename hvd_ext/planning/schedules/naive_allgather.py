"""Naive all-gather: every rank selects by itself and sends its elements to all others."""

from __future__ import annotations

from hvd_ext.planning import sparse_stages
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.registry import Card
from hvd_ext.topology.tree import Tree

card = Card(
    name="naive_allgather",
    idea="Each rank selects k elements of its whole buffer and sends them to all others.",
    drawing="""\
P = 3:  0: select k     0 -> 1, 2     each rank adds up the
        1: select k     1 -> 0, 2     selections of 0, 1, 2
        2: select k     2 -> 0, 1     in this order""",
    rounds="1, of P - 1 messages, between two of local work",
    bytes="(P - 1) * k entries sent by each rank",
    limits="none; the ranks of a host send the same way each for itself, so that it carries p (P - p) * k entries",
    source="CommLib Section 3.2, Eq. 3; Renggli et al. 2019",
    sparse=True,
)


def build(tree: Tree) -> LogicalPlan:
    """A plan of one unit; for one rank it is the dense plan."""
    if tree.size == 1:
        return dense(tree)
    members = sparse_stages.parties(tree, 0)
    shards = dict.fromkeys(tree.ranks, (0, 1))
    levels = sparse_stages.local("select", tree.ranks, shards), sparse_stages.exchange(members, shards)
    return LogicalPlan("naive_allgather", "allreduce", tree.size, 1, levels)


def dense(tree: Tree, height: int = 0) -> LogicalPlan:
    """The plan of a step in which nothing is selected: every rank folds its whole buffer before FlexReduce."""
    return sparse_stages.dense_plan("naive_allgather", tree, 0)


def variants(tree: Tree, height: int = 0) -> tuple[LogicalPlan, ...]:
    """The plan of build(); every rank selects by itself, whatever the height."""
    return (build(tree),)
