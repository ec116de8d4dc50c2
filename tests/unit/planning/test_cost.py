"""Prices of plans agree with the papers' closed forms where both apply."""

from __future__ import annotations

import pytest

from hvd_ext.planning import registry
from hvd_ext.planning.cost import chain_s, profile, ring_s, slowest
from hvd_ext.planning.planner import allreduce_plan
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, from_hosts
from tests.unit.planning.clusters import even_tree, one_host

MEGABYTE = 1 << 20


def test_the_ring_is_equation_2() -> None:
    assert ring_s(800.0, 4, Link(2.0, 0.5)) == 3 * (2.0 + 200 * 0.5)
    assert ring_s(800.0, 1, Link(2.0, 0.5)) == 0


def test_a_chain_carries_the_buffer_once() -> None:
    assert chain_s(800.0, 4, Link(2.0, 0.5)) == 3 * 2.0 + 400.0
    assert chain_s(800.0, 1, Link(2.0, 0.5)) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_a_ring_on_one_host_is_priced_as_its_closed_form(size: int) -> None:
    tree = one_host(size)
    plan = allreduce_plan(tree, "ring").plan
    assert profile(plan, tree).price_s(MEGABYTE) == pytest.approx(registry.get("ring").cost(tree, MEGABYTE))


def test_a_ring_over_hosts_waits_for_the_network() -> None:
    tree = even_tree(3, 4)
    plan = allreduce_plan(tree, "ring").plan
    assert slowest(tree) == ETHERNET
    assert profile(plan, tree).price_s(12 * MEGABYTE) == pytest.approx(2 * ring_s(12 * MEGABYTE, 12, ETHERNET))


@pytest.mark.parametrize("degrees", [(2, 2), (3, 4), (4, 8), (2, 2, 3)])
def test_flexreduce_on_even_trees_is_priced_as_its_closed_form(degrees: tuple[int, ...]) -> None:
    """Eq. 10: the reduces of one branch are a ring, and their shares of the links above it add up."""
    tree = even_tree(*degrees)
    plan = allreduce_plan(tree, "flexreduce").plan
    assert profile(plan, tree).price_s(48 * MEGABYTE) == pytest.approx(
        registry.get("flexreduce").cost(tree, 48 * MEGABYTE)
    )


@pytest.mark.parametrize("name", registry.names())
def test_pipelining_never_costs_more_and_never_beats_the_busiest_port(name: str) -> None:
    tree = even_tree(3, 4)
    plan = allreduce_plan(tree, name).plan
    whole = profile(plan, tree).price_s(8 * MEGABYTE)
    piped = profile(plan, tree).price_s(8 * MEGABYTE, 64 << 10)
    assert piped <= whole * (1 + 1e-9)
    assert profile(plan, tree).price_s(1000, 64 << 10) == profile(plan, tree).price_s(1000)
    # Each of three hosts must send 2 / 3 of the buffer up and 2 / 3 of the result.
    assert piped > 2 * 2 / 3 * 8 * MEGABYTE * ETHERNET.beta_s_per_byte


def test_two_levels_pay_for_the_master_of_the_largest_host() -> None:
    tree = from_hosts(["a"] * 5 + ["b"] * 2)
    expected = 2 * chain_s(MEGABYTE, 5, SHARED_MEMORY) + 2 * ring_s(MEGABYTE, 2, ETHERNET)
    assert registry.get("two_level").cost(tree, MEGABYTE) == pytest.approx(expected)


def test_a_plan_without_rows_costs_nothing() -> None:
    tree = one_host(1)
    assert profile(allreduce_plan(tree, "ring").plan, tree).price_s(MEGABYTE, 64) == 0
