"""The door for the runtime: choice, grain, proof; and the registry behind it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import hvd_ext.planning
import hvd_ext.simulation
import hvd_ext.topology
from hvd_ext.errors import PlanError
from hvd_ext.planning import planner, registry
from hvd_ext.planning.cost import level_profile, profile, simulate
from hvd_ext.planning.cost.loads import Ports, exchanged_s_per_byte
from hvd_ext.planning.grain import segment_nbytes
from hvd_ext.planning.limits import MOST_SIMULATED, size_class, stands_for
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span
from hvd_ext.planning.planner import Choice
from hvd_ext.topology.tree import ETHERNET, Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import dense_plans, even_tree, large_tree, one_host, uneven_hosts


def test_the_registry_finds_every_module_of_the_folder() -> None:
    folder = Path(hvd_ext.planning.__path__[0]) / "schedules"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {*registry.names(), *registry.sparse_names()} == files
    assert {"ring", "two_level", "flexreduce"} <= set(registry.names())
    assert set(registry.sparse_names()) == {"gtopk", "hitopk", "naive_allgather"}


@pytest.mark.parametrize("name", [*registry.names(), *registry.sparse_names()])
def test_every_card_is_filled_in_and_its_drawing_fits_a_terminal(name: str) -> None:
    card = registry.card(name)
    assert card.name == name
    assert card.sparse == (name in registry.sparse_names())
    assert all(getattr(card, field.name).strip() for field in fields(card) if field.name != "sparse")
    assert card.idea.endswith(".")
    assert all(len(line) <= 110 for line in card.drawing.splitlines())


def test_an_unknown_algorithm_is_answered_with_the_names_and_the_nearest() -> None:
    with pytest.raises(
        PlanError, match=r"algorithm 'two_levels': must be 'auto' or one of .*ring.*did you mean 'two_level'\?"
    ):
        planner.allreduce_plan(one_host(2), "two_levels")


def test_an_algorithm_that_does_not_apply_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tree: Tree) -> str | None:
        return "it needs an odd number of ranks" if tree.size % 2 == 0 else None

    monkeypatch.setattr(registry.get("two_level"), "supports", refuse, raising=False)
    tree = from_hosts(["p", "q"] * 3)  # a tree that no other test asks for: choices are cached
    with pytest.raises(
        PlanError, match=r"'two_level' on 6 ranks on 2 hosts \(3 \+ 3\): it needs an odd number of ranks"
    ):
        planner.allreduce_plan(tree, "two_level")
    chosen = planner.allreduce_plan(tree, "auto", 12345)
    assert dict(chosen.candidates)["two_level"] == "it needs an odd number of ranks"
    assert chosen.algorithm != "two_level"
    planner._cheapest.cache_clear()


def test_auto_takes_the_ring_on_one_host_and_says_what_the_others_would_cost() -> None:
    chosen = planner.allreduce_plan(one_host(4))
    assert chosen.algorithm == chosen.plan.algorithm == "ring"
    assert chosen.why.startswith("cheapest for 8388608 bytes on 4 ranks on 1 host: ring ")
    assert "halving_doubling" in chosen.why
    assert "torus2d" not in chosen.why
    assert "\n" not in chosen.why
    assert "; one choice for 5931642 to 11863283 bytes; a tie within 1% with " in chosen.why
    assert chosen.why.endswith(": ring is the simplest")
    assert [name for name, _ in chosen.candidates] == list(registry.names())


def test_auto_leaves_the_ring_where_a_slow_network_joins_several_ranks_of_each_host() -> None:
    chosen = planner.allreduce_plan(even_tree(4, 8))
    assert chosen.algorithm in {"blueconnect", "halving_doubling", "flexreduce"}
    prices = dict(chosen.candidates)
    assert prices["flexreduce"] < prices["ring"]  # type: ignore[operator]


def test_auto_prices_large_clusters_from_the_calls_of_their_levels() -> None:
    tree = large_tree(400)
    prices = dict(planner.allreduce_plan(tree).candidates)
    assert prices.pop("torus2d") == "a torus is even: every host has as many ranks as the others"
    for plan in dense_plans(tree):
        grain = segment_nbytes(plan, planner.DEFAULT_NBYTES, tree)
        price = level_profile(plan, tree).price_s(planner.DEFAULT_NBYTES, grain)
        assert prices.pop(plan.algorithm) == price
    assert not prices


def test_buckets_of_near_sizes_take_one_choice() -> None:
    classes = {0: 1, 1: 1, 2: 2, 3: 4, 724: 512, 725: 1024, 1448: 1024, 1449: 2048}
    assert {nbytes: size_class(nbytes) for nbytes in classes} == classes
    tree = even_tree(2, 3)
    assert planner.allreduce_plan(tree, "auto", 9_000_001) is planner.allreduce_plan(tree, "auto", 8 << 20)
    assert planner.allreduce_plan(tree, "auto", 1000) is not planner.allreduce_plan(tree, "auto", 8 << 20)


@pytest.mark.parametrize("tree", [even_tree(2, 3), even_tree(2, 2, 3), uneven_hosts(7)], ids=Tree.describe)
def test_a_choice_is_the_cheapest_of_all_simulated_plans(tree: Tree) -> None:
    """Leaving out what the quick price finds far too dear loses nothing."""
    for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        chosen = planner.allreduce_plan(tree, "auto", nbytes)
        names = [name for name, price_s in chosen.candidates if not isinstance(price_s, str)]
        prices = {name: planner.price(tree, name, nbytes).seconds for name in names}
        assert prices[chosen.algorithm] <= min(prices.values()) * (1 + planner.TIE), (nbytes, prices)
        assert dict(chosen.candidates)[chosen.algorithm] == prices[chosen.algorithm]


def test_of_equal_prices_the_plan_that_burdens_no_master_is_taken() -> None:
    """On a slow network two_level and flexreduce cost the same; one sends all through one rank of each host."""
    tree = from_hosts("aaaabbb", between=Link(1e-4, 8e-8))
    masters, shared = (planner.price(tree, name, 1 << 24).seconds for name in ("two_level", "flexreduce"))
    assert masters == pytest.approx(shared, rel=planner.TIE)
    chosen = planner.allreduce_plan(tree, "auto", 1 << 24)
    assert chosen.algorithm == "flexreduce"
    tie = next(part for part in chosen.why.split("; ") if "two_level" in part and part.startswith("a tie"))
    assert tie.endswith(": flexreduce loads the links less")
    assert planner.preference(tree, chosen, "two_level") == "loads the links less"
    assert planner.preference(tree, chosen, "ring") == "is cheaper at the size that stands for this one"
    even = planner.allreduce_plan(even_tree(3, 2), "auto", 1 << 23)
    same = Choice(even.plan, "blueconnect", "", (("blueconnect", 1.0), ("torus2d", 1.001)))
    assert planner.preference(even_tree(3, 2), same, "torus2d") == "is the cheaper one of equal load"


@pytest.mark.parametrize("size", [4, 8, 1 << 20, 1 << 23, 1 << 39])
def test_a_choice_says_for_which_sizes_it_stands(size: int) -> None:
    first, last = (int(number) for number in re.findall(r"\d+", stands_for(size)))
    assert [size_class(n) for n in (first - 1, first, last, last + 1)] == [size // 2, size, size, 2 * size]
    assert stands_for(size, size).startswith("one choice for 0 to ")


def test_a_plan_asked_for_by_name_is_not_priced() -> None:
    chosen = planner.allreduce_plan(even_tree(2, 3), "flexreduce")
    assert (chosen.algorithm, chosen.candidates) == ("flexreduce", ())
    assert chosen.why.startswith("asked for by name")


@pytest.mark.parametrize("degrees", [(4, 4), (4, 5)])
def test_small_clusters_are_simulated_and_larger_ones_profiled(degrees: tuple[int, int]) -> None:
    tree, nbytes = even_tree(*degrees), 8 << 20
    plan = registry.get("flexreduce").build(tree)
    grain = segment_nbytes(plan, nbytes, tree)
    expected = simulate(plan, tree, nbytes, grain).seconds
    if tree.size > MOST_SIMULATED:
        expected = profile(plan, tree).price_s(nbytes, grain)
    found = planner.price(tree, "flexreduce", nbytes)
    assert found.seconds == expected
    # Each of four hosts sends 2 * 3 / 4 of the buffer over its port; so does each rank inside, over a faster one.
    assert found.bottleneck_nbytes == pytest.approx(1.5 * nbytes)
    assert found.bottleneck_s == pytest.approx(1.5 * nbytes * ETHERNET.beta_s_per_byte)


def test_answers_are_cached() -> None:
    tree = uneven_hosts(9)
    again = from_hosts([name for _, name in sorted((r, h.name) for h in tree.root.children for r in h.ranks)])
    assert planner.allreduce_plan(tree) is planner.allreduce_plan(again)
    assert planner.all_gather_plan(tree) is planner.all_gather_plan(again)
    assert planner.broadcast_plan(tree, 3) is planner.broadcast_plan(again, 3)


def test_one_rank_has_nothing_to_do() -> None:
    tree = one_host(1)
    plans = [*dense_plans(tree), planner.allreduce_plan(tree).plan]
    plans += [planner.all_gather_plan(tree), planner.reduce_scatter_plan(tree), planner.all_to_all_plan(tree)]
    for plan in (*plans, planner.broadcast_plan(tree, 0)):
        assert rows_of(plan, 0).shape == (0, 5)
        assert planner.prove(plan)


def test_a_broadcast_crosses_to_each_host_once() -> None:
    tree = from_hosts(["a", "b", "c"] * 4)
    host = {rank: index for index, ranks in enumerate(tree.hosts()) for rank in ranks}
    for root in range(12):
        first = planner.broadcast_plan(tree, root).levels[0].calls
        assert [call.root for call in first] == [root]
        assert sorted(host[rank] for rank in first[0].ranks) == [0, 1, 2]


def test_a_broadcast_to_a_long_row_of_hosts_halves_its_way() -> None:
    tree = from_hosts([str(rank) for rank in range(40)])
    assert planner.broadcast_plan(tree, 7).levels[0].calls[0].method == "recursive"
    with pytest.raises(PlanError, match=r"broadcast from root_rank 40: the ranks are 0 \.\. 39"):
        planner.broadcast_plan(tree, 40)


def test_a_wrong_plan_is_refused_and_a_large_one_left_alone() -> None:
    half = Level((Call("reduce", (0, 1), (Span(0, 1),), 0),))
    with pytest.raises(PlanError, match="after the last round rank 1 holds in unit 0"):
        planner.prove(LogicalPlan("half", "allreduce", 2, 1, (half,)))
    assert not planner.prove(LogicalPlan("half", "allreduce", 65, 1, (half,)))


def test_the_planner_imports_no_tensorflow_no_mpi_and_no_clock() -> None:
    allowed = {"__future__", "collections", "csv", "dataclasses", "difflib", "fractions", "functools", "hashlib"}
    allowed |= {"heapq", "importlib", "io", "itertools", "math", "numpy", "pathlib", "pkgutil", "pydantic", "re"}
    allowed |= {"typing", "yaml", "hvd_ext"}
    rooms = {"planning", "simulation", "topology", "compression", "errors"}
    for package in (hvd_ext.planning, hvd_ext.simulation, hvd_ext.topology):
        for path in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                    if name.startswith("hvd_ext."):
                        assert name.split(".")[1] in rooms, f"{path.name} imports {name}"


def test_in_a_host_a_message_for_elements_that_are_being_sent_costs_a_copy_and_their_way_back() -> None:
    handover, link, nbytes = Link(3e-6, 5.9e-11), Link(2.7e-6, 3.3e-11), 1 << 18
    host = Tree(replace(one_host(2).root, link=link), handover=handover)
    chosen = {size: planner.allreduce_plan(host, nbytes=size).algorithm for size in (1 << 14, nbytes)}
    assert chosen == {1 << 14: "recursive_doubling", nbytes: "ring"}  # as measured on two cores of an AMD EPYC
    hosts = replace(from_hosts(["a", "b"]), handover=handover)
    exchanged = handover.beta_s_per_byte / 2 + link.beta_s_per_byte
    for tree, name, more in (
        (host, "recursive_doubling", exchanged),
        (host, "ring", 0.0),
        (hosts, "recursive_doubling", 0.0),
    ):
        without = replace(tree, handover=Link(0.0, 0.0))
        more_s = handover.alpha_s + nbytes * (handover.beta_s_per_byte + more)
        plan = registry.get(name).build(tree)
        by_level, by_rows = level_profile(plan, tree), profile(plan, tree)
        assert by_level.rounds_s_per_byte == pytest.approx(by_rows.rounds_s_per_byte)
        prices = [
            (planner.price(one, name, nbytes).seconds, planner.quick_price_s(one, name, nbytes))
            for one in (tree, without)
        ]
        for with_s, without_s in zip(*prices, strict=True):
            assert with_s - without_s == pytest.approx(more_s, rel=1e-6)


def test_an_exchange_pays_for_the_links_between_its_own_ranks() -> None:
    fast, slow = Link(2e-6, 1e-11), Link(8e-6, 2e-10)
    pairs = [Node(f"pair {first}", fast, (leaf(first), leaf(first + 1)), medium="NVLink") for first in (0, 2)]
    hosts = (Node("left", slow, tuple(pairs), medium="PCIe"), Node("right", Link(2e-6, 5e-10), (leaf(4),)))
    tree = Tree(Node("cluster", ETHERNET, hosts), handover=Link(3e-6, 6e-11))
    exchanged = exchanged_s_per_byte(tree, Ports(tree), np.array([0, 0, 0]), np.array([1, 2, 4]))
    assert exchanged == pytest.approx([3e-11 + fast.beta_s_per_byte, 3e-11 + slow.beta_s_per_byte, 0.0])
