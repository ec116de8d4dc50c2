"""BlueConnect against its paper: Fig. 4, Algorithm 1, Eq. 3, 8 and 9, the fall-back; and the torus, its kin."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms.blueconnect import fat_tree_s
from benchmarks.closed_forms.flexreduce import even_s
from benchmarks.closed_forms.schedules import cost
from hvd_ext.planning.lower import rounds_of
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import blueconnect, torus2d
from hvd_ext.planning.stages import stages_of
from hvd_ext.planning.verify import verify
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf
from tests.golden.make import fig4
from tests.unit.planning.clusters import even_tree, one_host

A, B, C, D = ([3 * node + gpu for gpu in range(3)] for node in range(4))


def groups(plan: LogicalPlan, level: int) -> set[tuple[int, ...]]:
    return {call.ranks for call in plan.levels[level].calls}


def held(plan: LogicalPlan, level: int) -> dict[int, tuple[int, int]]:
    calls = [(call.ranks, call.spans) for call in plan.levels[level].calls]
    return {rank: (span.begin, span.end) for ranks, spans in calls for rank, span in zip(ranks, spans, strict=True)}


def test_fig_4_twelve_learners_in_three_steps_and_the_same_backwards() -> None:
    plan = blueconnect.build(fig4())
    assert plan.units == 12
    assert plan.note == "12 = 3 x 2 x 2, from the inside"
    assert groups(plan, 0) == {tuple(A), tuple(B), tuple(C), tuple(D)}
    assert groups(plan, 1) == {*zip(A, B, strict=True), *zip(C, D, strict=True)}
    assert groups(plan, 2) == {*zip(A, C, strict=True), *zip(B, D, strict=True)}
    assert [level.calls[0].method for level in plan.levels[:3]] == ["ring", "recursive", "recursive"]
    verify(plan)
    for down, up in ((0, 5), (1, 4), (2, 3)):
        assert {call.kind for call in plan.levels[up].calls} == {"all_gather"}
        assert (groups(plan, down), held(plan, down)) == (groups(plan, up), held(plan, up))


def test_fig_4_the_parts_shrink_to_a_third_a_sixth_and_a_twelfth() -> None:
    plan = blueconnect.build(fig4())
    first, second, third = (held(plan, level) for level in range(3))
    assert [first[A[i]] for i in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert [second[B[i]] for i in range(3)] == [(2, 4), (6, 8), (10, 12)]
    assert sorted(third.values()) == [(unit, unit + 1) for unit in range(12)]
    assert (third[A[0]], third[C[0]], third[B[0]], third[D[0]]) == ((0, 1), (1, 2), (2, 3), (3, 4))


def test_it_falls_back_to_one_ring_where_hosts_differ_and_says_so() -> None:
    tree = from_hosts("aabbb")
    plan = blueconnect.build(tree)
    assert plan.note == "no factorisation follows the topology (its lowest level is uneven): falls back to one ring"
    assert groups(plan, 0) == {tree.ranks}
    assert plan.levels[0].calls[0].method == "ring"
    assert cost("blueconnect", tree, 10**6) == cost("ring", tree, 10**6)


def test_even_hosts_in_uneven_racks_are_one_stage_above_the_hosts() -> None:
    hosts = [Node(f"h{i}", SHARED_MEMORY, tuple(leaf(4 * i + j) for j in range(4))) for i in range(5)]
    racks = (Node("left", ETHERNET, tuple(hosts[:2])), Node("right", ETHERNET, tuple(hosts[2:])))
    tree = Tree(Node("cluster", ETHERNET, racks))
    assert [stage.degree for stage in stages_of(tree)] == [4, 5]
    plan = blueconnect.build(tree)
    assert plan.note == "20 = 4 x 5, from the inside"
    verify(plan)
    assert torus2d.supports(tree) is None


@pytest.mark.parametrize("placement", ["aabbccdd", "abcdabcd", "abbaccdd", "dcbaabcd"])
def test_groups_follow_the_placement_of_the_ranks(placement: str) -> None:
    """Rank files put ranks on hosts in any order (Section 3.2.3)."""
    tree = from_hosts(placement)
    plan = blueconnect.build(tree)
    for call in plan.levels[0].calls:
        assert len({placement[rank] for rank in call.ranks}) == 1, "the first stage stays in the hosts"
    for call in plan.levels[1].calls:
        assert len({placement[rank] for rank in call.ranks}) == 4
    verify(plan)


def test_a_branch_with_one_child_is_no_level() -> None:
    tree = even_tree(3, 1, 2)
    assert [stage.degree for stage in stages_of(tree)] == [2, 3]
    assert [stage.degree for stage in stages_of(even_tree(4, 1))] == [4]
    assert stages_of(one_host(1)) == ()


@pytest.mark.parametrize("degrees", [(3,), (3, 3), (5, 3), (3, 3, 3), (3, 2, 4), (7, 4)])
@pytest.mark.parametrize("inside", [Link(ETHERNET.alpha_s, 1e-10), Link(ETHERNET.alpha_s, 1e-8)])
def test_flexreduce_on_symmetric_trees_costs_what_blueconnect_costs(degrees: tuple[int, ...], inside: Link) -> None:
    """FlexReduce Eq. 7-11, alpha the same everywhere: equal where both use rings; Eq. 3 saves rounds."""
    tree, nbytes = even_tree(*degrees, inside=inside), 10**7
    upwards = tuple(reversed(degrees))
    links = [inside] + [ETHERNET] * (len(degrees) - 1)
    rings = fat_tree_s(nbytes, upwards, links, ring_only=True)
    assert cost("flexreduce", tree, nbytes) == pytest.approx(rings)
    assert even_s(nbytes, upwards, links) == pytest.approx(rings)
    if not {4, 8} & set(degrees):
        assert cost("blueconnect", tree, nbytes) == pytest.approx(rings)
    else:
        assert cost("blueconnect", tree, nbytes) < rings


def test_a_torus_has_rings_in_all_dimensions() -> None:
    plan = torus2d.build(even_tree(2, 4, 8))
    assert plan.note == "2 x 4 x 8 torus"
    assert [len(level.calls[0].ranks) for level in plan.levels] == [8, 4, 2, 2, 4, 8]
    assert {call.method for level in plan.levels for call in level.calls} == {"ring"}
    assert rounds_of(plan) == 2 * (7 + 3 + 1)
    verify(plan)
