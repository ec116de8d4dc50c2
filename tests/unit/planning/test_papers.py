"""The papers' equations with their own numbers, put in by hand, where no plan is priced beside them (test_cost.py)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest

from benchmarks.closed_forms import blueconnect, commlib, flexreduce, mgwfbp
from hvd_ext.planning.schedules import flexreduce as schedule
from hvd_ext.topology.tree import Link, Node
from tests.unit.planning.clusters import even_tree, random_tree

LINK = Link(2.0, 0.5)  # alpha 2 s, and 2 bytes per second
FAST = Link(1.0, 0.125)


def test_blueconnect_equations_1_to_4() -> None:
    assert blueconnect.ring_s(800, 4, LINK, 0.25) == 3 * 2.0 + 3 / 4 * 800 * 0.75
    assert blueconnect.recursive_s(800, 4, LINK) == 2 * 2.0 + 3 / 4 * 800 * 0.5
    assert blueconnect.broadcast_s(800, 4, LINK) == (2 + 3) * 2.0 + 2 * 3 / 4 * 800 * 0.5
    assert [size for size in range(1, 20) if blueconnect.is_recursive(size)] == [1, 2, 4, 8, 16]


def test_blueconnect_equations_5_to_7() -> None:
    assert blueconnect.one_level_s(800, 8, LINK) == 2 * 7 * (2.0 + 100 * 0.5)
    inside = (2 + 3) * 1.0 + 2 * 3 / 4 * 800 * 0.125
    masters = 2 * (1 * 2.0 + 400 * 0.5)
    assert blueconnect.two_level_s(800, 4, 2, FAST, LINK) == 2 * inside + masters


def test_blueconnect_equation_10_shares_only_the_links_of_a_node() -> None:
    """3 x 2 x 2: stage 1 has min{w0, w1 / 3}; stage 2 would also have w2 / 6 if it shared the links above (Eq. 9)."""
    first = 2 * (2 * 1.0 + 2 / 3 * 1200 * 0.125)
    second = 2 * (2.0 + 1 / 2 * 400 * 1.5)
    for cost_s, shared in ((blueconnect.torus_s, 1.5), (blueconnect.fat_tree_s, 3.0)):
        third = 2 * (2.0 + 1 / 2 * 200 * shared)
        assert cost_s(1200, [3, 2, 2], [FAST, LINK, LINK]) == pytest.approx(first + second + third)


def test_mgwfbp_table_2() -> None:
    assert mgwfbp.ring(8, LINK, 0.25) == mgwfbp.Line(2 * 7 * 2.0, 2 * 7 / 8 * 0.5 + 7 / 8 * 0.25)
    assert mgwfbp.ring(8, LINK).seconds(800) == blueconnect.one_level_s(800, 8, LINK)
    assert mgwfbp.recursive_doubling(5, LINK, 0.25) == mgwfbp.Line(2.0 * 4, 0.5 * 4 + 0.25 * 3)


def test_commlib_equations_7_to_10() -> None:
    """d = 1000, n = 4, m = 2, rho = 0.1."""
    assert commlib.reduce_scatter_s(1000, 4, FAST) == 3 * 1.0 + 4 * 3 * 1000 / 4 * 0.125
    assert commlib.select_s(1000, 4, 0.01) == 2.5
    assert commlib.inter_all_gather_s(1000, 4, 2, 0.1, LINK) == 2.0 * 1 + 4 * 1 * 0.1 * 1000 / 4 * 0.5
    assert commlib.intra_all_gather_s(1000, 4, 2, 0.1, FAST) == 1.0 * 2 + 4 * 3 * 0.1 * 1000 * 2 / 4 * 0.125


def test_flexreduce_equations_4_to_6() -> None:
    tree = even_tree(2, 3, inside=FAST)
    lowest = flexreduce.level_s(tree.root.children, 1200)
    assert lowest == blueconnect.ring_s(1200, 3, FAST), "Eq. 4"
    upper = max(blueconnect.ring_s(1200, 2, tree.root.link), blueconnect.ring_s(1200 / 3, 2, FAST))
    assert flexreduce.level_s([tree.root], 1200) == upper, "Eq. 5"
    assert flexreduce.tree_s(tree, 1200) == 2 * (lowest + upper), "Eq. 6"


def test_equation_12_is_a_ceiling_for_each_branch_and_one() -> None:
    half, third, fifth = Fraction(1, 2), Fraction(1, 3), Fraction(1, 5)
    assert flexreduce.calls_bound(fifth, [[half, half], [third, third, third]]) == 1 + 1 + 1
    assert flexreduce.calls_bound(half, [[third] * 3, [fifth] * 5]) == ceil(3 / 2) + ceil(5 / 2) + 1


def portions(node: Node) -> dict[int, Fraction]:
    """What each rank below a node holds after the node's level."""
    if not node.children:
        return {node.rank: Fraction(1)}
    below = {rank: share for child in node.children for rank, share in portions(child).items()}
    return {rank: share / len(node.children) for rank, share in below.items()}


@pytest.mark.parametrize("seed", range(20))
def test_no_learner_owns_more_calls_than_equation_12_allows(seed: int) -> None:
    tree = random_tree(seed, most_leaves=40)
    plan = schedule.build(tree)
    assert plan.units < schedule.MOST_UNITS, "shares are exact here; rounded ones may need one call more"
    reduces = iter(level for level in plan.levels if level.calls[0].kind == "reduce")
    for nodes in tree.levels():
        busy = [node for node in nodes if len(node.children) > 1]
        if not busy:
            continue
        owned: dict[int, int] = {}
        for call in next(reduces).calls:
            owned[call.root] = owned.get(call.root, 0) + 1
        for node in busy:
            after, before = portions(node), [list(portions(child).values()) for child in node.children]
            for rank in node.ranks:
                assert owned.get(rank, 0) <= flexreduce.calls_bound(after[rank], before)
