"""The door for sparse collectives: the choice, its dense companion, the break-even between them, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hvd_ext.compression.topk import TopK
from hvd_ext.errors import InvalidError, PlanError
from hvd_ext.job import runtime
from hvd_ext.options import Options, Sum
from hvd_ext.planning import ir, planner, registry, sparse_planner
from hvd_ext.planning.cost import Sparsity
from hvd_ext.planning.explain import draw
from hvd_ext.planning.explain_sparse import explain
from hvd_ext.planning.layout import Layout, layout
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.schedules import gtopk, hitopk, naive_allgather
from hvd_ext.planning.sparse_planner import LEAST_DENSITY, sparse_plan, sparse_price
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Tree, from_hosts
from tests.unit.planning.clusters import even_tree, one_host
from tests.unit.planning.test_explain import command

SLOW = Link(1e-4, 8e-8)
TREE = from_hosts("aabbb", between=SLOW)


@pytest.mark.parametrize("name", registry.sparse_names())
def test_the_break_even_lies_where_the_prices_meet(name: str) -> None:
    chosen = sparse_plan(TREE, name, 1 << 22, 0.01, 8.0)
    nbytes, dense_s = 1 << 22, dict(chosen.candidates)["dense"]
    assert isinstance(dense_s, float)
    assert [candidate for candidate, _ in chosen.candidates] == [*registry.sparse_names(), "dense"]
    assert dict(chosen.candidates)[name] == sparse_price(chosen.plan, TREE, nbytes, Sparsity(0.01, 8.0)).seconds
    assert 0.01 < chosen.dense_above < 1
    sparsities = [Sparsity(chosen.dense_above * factor, 8.0) for factor in (0.97, 1.03)]
    below, above = (sparse_price(chosen.plan, TREE, nbytes, sparsity).seconds for sparsity in sparsities)
    assert below < dense_s < above
    assert chosen.algorithm == chosen.plan.algorithm == chosen.dense.algorithm == name
    assert chosen.why.startswith("at density 0.01 ")
    assert f"dense from density {chosen.dense_above:.3g} on" in chosen.why


@pytest.mark.parametrize(("density", "gather"), [(0.001, "sparse"), (0.95, "dense")])
def test_the_last_step_gathers_what_is_cheaper(density: float, gather: str) -> None:
    sparsity = Sparsity(density, 8.0)
    cheapest = min(hitopk.variants(TREE), key=lambda plan: sparse_price(plan, TREE, 1 << 22, sparsity).seconds)
    assert sparse_plan(TREE, "hitopk", 1 << 22, density, 8.0).plan == cheapest == hitopk.build(TREE, gather=gather)


def test_the_dense_plan_is_taken_at_every_density_where_nothing_is_saved_and_at_1_where_it_never_pays() -> None:
    for tree in (one_host(1), one_host(4)):
        assert sparse_plan(tree, "hitopk").dense_above == LEAST_DENSITY
        assert "; dense at every density" in sparse_plan(tree, "hitopk").why
    assert sparse_plan(TREE, "gtopk", 1 << 22, 0.01, 1e6).dense_above < 1e-5
    assert sparse_plan(TREE, "hitopk", 1 << 22, 0.01, 0.5).dense_above == 1.0


def test_buckets_of_near_sizes_take_one_choice() -> None:
    assert sparse_plan(TREE, "hitopk", 9_000_001, 0.01) is sparse_plan(TREE, "hitopk", 8 << 20, 0.01)
    assert sparse_plan(TREE, "hitopk", 0, 0.01) is sparse_plan(TREE, "hitopk", 4096, 0.01)


def racks(host: Link) -> Tree:
    """Two racks of two hosts of two ranks, joined by a slow link; `host` joins the hosts of a rack."""
    return even_tree(2, 2, 2, links=(SLOW, host, SHARED_MEMORY))


def test_selection_below_racks_pays_where_their_hosts_are_near() -> None:
    near, far = racks(SHARED_MEMORY), racks(SLOW)
    for tree, height in ((near, 2), (far, 1)):
        best = sparse_plan(tree, "hitopk", 1 << 22, 0.05, height=None)
        named = sparse_plan(tree, "hitopk", 1 << 22, 0.05, height=height)
        assert (best.plan, best.dense) == (named.plan, named.dense)
        other = sparse_plan(tree, "hitopk", 1 << 22, 0.05, height=3 - height)
        assert dict(best.candidates)["hitopk"] < dict(other.candidates)["hitopk"]  # type: ignore[operator]
    assert sparse_plan(near, "hitopk", 1 << 22, 0.05).plan == sparse_plan(near, "hitopk", 1 << 22, 0.05, height=1).plan
    assert planner.prove(sparse_plan(near, "hitopk", 1 << 22, 0.05, height=2).plan)


@pytest.mark.parametrize("tree", [even_tree(4, 5), even_tree(9, 8), from_hosts(["a"] * 30 + ["b"] * 40)])
def test_larger_clusters_are_priced_as_well(tree: Tree) -> None:
    chosen = sparse_plan(tree, "hitopk", 1 << 24, 0.001)
    prices = {name: price for name, price in chosen.candidates if isinstance(price, float)}
    assert 0 < prices["hitopk"] < prices["dense"]
    assert 0.001 < chosen.dense_above <= 1


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda: sparse_plan(TREE, "hitop"),
            r"'hitop': with compression=.* it must be one of gtopk, .*; did you mean 'hitopk'\?",
        ),
        (
            lambda: registry.sparse("ring"),
            r"'ring': with compression=hvd_ext.TopK\(...\) or another codec it must be one of gtopk, hitopk",
        ),
        (
            lambda: planner.allreduce_plan(TREE, "hitopk"),
            r"'hitopk': it sends selected elements only; give compression=.*two_level",
        ),
        (lambda: registry.card("rin"), r"algorithm 'rin': must be one of .*; did you mean 'ring'\?"),
        (lambda: sparse_plan(TREE, "hitopk", 100, 0), r"density \(0\): must be above 0"),
        (lambda: sparse_plan(TREE, "hitopk", height=-1), r"height \(-1\): must be a number of levels of branches"),
    ],
)
def test_wrong_names_and_numbers_are_refused(ask: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ask()


@pytest.fixture
def no_choices() -> Iterator[None]:
    """Forgets all choices before a test that changes a schedule, and after it."""
    caches = (sparse_planner._chosen, sparse_planner.companion)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_choices")
def test_a_schedule_that_does_not_apply_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gtopk, "supports", lambda tree: "it has a day off", raising=False)
    with pytest.raises(PlanError, match=r"'gtopk' on 5 ranks on 2 hosts \(2 \+ 3\): it has a day off; choose another"):
        sparse_plan(TREE, "gtopk")
    assert dict(sparse_plan(TREE, "hitopk").candidates)["gtopk"] == "it has a day off"
    found, _ = explain(TREE, 1 << 20, 0.01)
    assert found.entries[-1].verdict == "does not apply: it has a day off"


@pytest.mark.usefixtures("no_choices")
def test_plans_that_keep_their_residuals_in_different_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hitopk, "dense", naive_allgather.dense)
    words = r"hitopk: rank 0 selects in \[\(0.0, 0.5\)\] of the buffer and folds in \[\(0.0, 1"
    with pytest.raises(PlanError, match=words):
        sparse_plan(TREE, "hitopk")


class FakeEngine:
    """Takes rows and counts plans."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.added: list[tuple[ir.Rows, int]] = []

    def add_plan(self, rows: ir.Rows, units: int) -> int:
        self.added.append((rows, units))
        return len(self.added)

    def open_channel(
        self, name: str, layout: Layout, handle_of: Callable[[LogicalPlan], int], *, on_device: bool
    ) -> int:
        assert not on_device
        self.opened = [handle_of(plan) for one in layout.buckets for plan in (one.plan, one.dense) if plan is not None]
        return 0


def test_the_runtime_prepares_both_plans_once() -> None:
    engine = FakeEngine(3)
    job = runtime.Runtime(cast(Any, engine), TREE, Options(), tuple("aabbb"))
    tensors = [Tensor("x", (1 << 10, 1 << 10), "float32")]
    (bucket,) = layout(TREE, tensors, Sum, codec=TopK(0.01)).buckets
    chosen = sparse_plan(TREE, "hitopk", 1 << 22, 0.01)
    assert (bucket.plan, bucket.dense) == (chosen.plan, chosen.dense)
    assert bucket.selection is not None
    assert bucket.selection.dense_above == chosen.dense_above
    assert bucket.segment_nbytes == 1 << 22
    assert bucket.plan.algorithm == "hitopk"
    job.open("x", Layout(tuple(tensors), (bucket,)))
    assert [job.plans[handle] for handle in engine.opened] == [chosen.plan, chosen.dense]
    # Another density that takes the same plans adds none.
    job.open("x", layout(TREE, tensors, Sum, codec=TopK(0.02)))
    assert len(engine.added) == 2


def test_a_layout_adds_up_to_the_height_that_is_asked_for() -> None:
    tree, tensors = racks(SHARED_MEMORY), [Tensor("x", (1 << 10, 1 << 10), "float32")]
    layouts = [layout(tree, tensors, Sum, codec=TopK(0.01, height=height)) for height in (1, 2, None)]
    in_hosts, in_racks, best = (one.buckets[0].choice for one in layouts)
    assert in_hosts is not None
    assert in_racks == sparse_plan(tree, "hitopk", 1 << 22, 0.01, height=2)
    assert in_racks.plan != in_hosts.plan
    assert best == sparse_plan(tree, "hitopk", 1 << 22, 0.01, height=None)


def test_an_explanation_prices_all_and_tells_the_steps() -> None:
    found, chosen = explain(TREE, 1 << 22, 0.01, "hitopk", 6.0)
    assert chosen == sparse_plan(TREE, "hitopk", 1 << 22, 0.01, 6.0)
    names = ["reduce-scatter in hosts", "select", "all-gather of the selected", "all-gather in hosts"]
    assert [step.name for step in found.steps] == names
    assert {entry.name for entry in found.entries} == {*registry.sparse_names(), "dense", "dense step"}
    prices = [entry.price_s for entry in found.entries if entry.price_s is not None]
    assert prices == sorted(prices)
    hitopk_s = next(entry.price_s for entry in found.entries if entry.name == "hitopk")
    assert sum(step.seconds for step in found.steps) == pytest.approx(hitopk_s)
    assert found.host_nbytes == round(0.01 * (1 << 20)) * 6
    assert json.loads(json.dumps(dataclasses.asdict(found)))["steps"][1]["sent_nbytes"] == [0, 0]


def test_selection_is_compared_with_the_plan_that_runs_without_it() -> None:
    """The dense step of hitopk runs in one segment, and is far from the best dense plan."""
    tree, nbytes = from_hosts("aabbb"), 10_000_000
    found, chosen = explain(tree, nbytes, 0.3)
    entries = {entry.name: entry for entry in found.entries}
    best = planner.allreduce_plan(tree, "auto", nbytes)
    assert (found.dense_algorithm, found.dense_why) == (best.algorithm, best.why)
    assert entries["dense"].price_s == planner.price(tree, best.algorithm, nbytes).seconds
    assert entries["dense step"].price_s == sparse_price(chosen.dense, tree, nbytes, Sparsity(0.3)).seconds
    hitopk_s, dense_s, step_s = (entries[name].price_s for name in ("hitopk", "dense", "dense step"))
    assert hitopk_s and dense_s and step_s
    assert dense_s < hitopk_s < step_s, "else the two comparisons have one answer here"
    assert entries["hitopk"].verdict == f"asked for: {hitopk_s / dense_s:.2f} x dense"
    assert entries["dense step"].verdict == f"{step_s / dense_s:.2f} x dense: hitopk with nothing selected"
    assert entries["dense"].verdict == "flexreduce: the best without TopK"
    assert found.dense_from < 0.3 < found.dense_above == chosen.dense_above
    below, above = (
        sparse_price(chosen.plan, tree, nbytes, Sparsity(found.dense_from * factor)).seconds for factor in (0.97, 1.03)
    )
    assert below < dense_s < above


def test_the_page_shows_what_the_command_says() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "topk.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"`python -m hvd_ext plan (.*?)`", page)
    (line,) = re.findall(r"`(dense: no dearer .*?)`", page)
    assert line in command(*arguments.split())[1]


def test_a_tie_with_the_dense_plan_is_called_one() -> None:
    entries = {entry.name: entry for entry in explain(even_tree(2, 2, between=SLOW), 8 << 20, 0.01)[0].entries}
    assert entries["dense step"].verdict == "a tie with dense within 1%: hitopk with nothing selected"


def test_a_size_that_is_no_number_of_elements_is_refused_and_another_is_not_rounded_silently() -> None:
    with pytest.raises(InvalidError, match=r"bytes \(4194303\): must be a multiple of 4: elements are float32"):
        explain(TREE, (1 << 22) - 1, 0.01)
    assert "; one choice for 2965821 to 5931641 bytes" in sparse_plan(TREE, "hitopk", 1 << 22).why
    assert "; one choice for 0 to 5792 bytes" in sparse_plan(TREE, "hitopk", 8).why


def test_a_merge_is_drawn_at_the_rank_that_gets_the_sum() -> None:
    assert "  rank   1 |.| {0 1}" in draw(gtopk.build(TREE)).splitlines()


def test_the_command_writes_json(tmp_path: Path) -> None:
    assert command("--hosts", "2,3", "--density", "0.01", "--json", str(tmp_path / "plan.json"))[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["algorithm"] == "hitopk"
