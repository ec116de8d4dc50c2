"""The logical plan refuses what makes no sense; ir.def is read as it is; the digest tells plans apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import ir
from hvd_ext.planning.model import Call, Level, LogicalPlan, Span, reversed_level
from hvd_ext.planning.planner import allreduce_plan
from hvd_ext.topology.tree import from_hosts
from tests.unit.planning.clusters import one_host, sparse_plans, uneven_hosts

ONE = (Span(0, 1),)


def call(*arguments: Any) -> Callable[[], object]:
    """Hides wrong values from the type checker."""
    return lambda: Call(*arguments)


def plan(*arguments: Any) -> Callable[[], object]:
    return lambda: LogicalPlan(*arguments)


def reduced(group: tuple[int, ...], span: Span) -> tuple[Level, ...]:
    return (Level((Call("reduce", group, (span,), 0),), "up"),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (call("gossip", (0, 1), ONE, 0), r"call \(gossip, ring\): the kind must be one of reduce_scatter"),
        (call("reduce", (0, 1), ONE, 0, "pigeon"), r"call \(reduce, pigeon\): .* of ring, recursive, direct"),
        (call("reduce", (0, 1, 0), ONE, 0), "a group must have at least one rank, and each rank once"),
        (call("reduce", (), ONE, 0), "a group must have at least one rank, and each rank once"),
        (call("reduce", (0, 1), ONE * 2, 0), "it takes one span, got 2"),
        (call("all_gather", (0, 1), ONE), "it takes one span per rank, got 1"),
        (call("broadcast", (0, 1), ONE), "broadcast with root -1: reduce, broadcast, .* have a root"),
        (call("all_gather", (0,), ONE, 0), "all_gather with root 0: .* the other kinds have none"),
        (call("exchange", (0, 1, 2), ONE), r"exchange on ranks \(0, 1, 2\): it must join two ranks, got 3"),
        (call("sparse_merge", (0,), ONE), r"sparse_merge on ranks \(0,\): it must join two ranks, got 1"),
        (call("fold", (0, 1), ONE), r"fold on ranks \(0, 1\): it must have one rank, got 2"),
        (call("select", (0,), ONE * 2), "select on ranks .*: it takes one span, got 2"),
        (call("sparse_all_gather", (0, 1), ONE), "it takes one span per rank, got 1"),
        (call("sparse_broadcast", (0, 1), ONE, 2), r"sparse_broadcast on ranks \(0, 1\): its root must be one of"),
        (call("exchange", (0, 1), ONE * 2), "exchange on ranks .*: it takes one span, got 2"),
        (call("all_to_all", (0, 1), (Span(0, 2), Span(2, 3))), r"each span must divide into 2 equal parts"),
        (call("all_to_all", (0, 1), (Span(0, 2),) * 2, -1, "recursive"), "must be a ring or direct"),
        (plan("x", "gossip", 1, 1, ()), "plan of 'gossip': a collective must be one of allreduce"),
        (plan("x", "allreduce", 0, 1, ()), "x: size 0, units 1, root 0: a plan must have at least one rank"),
        (lambda: LogicalPlan("x", "broadcast", 2, 1, (), root=2), "its root must be one of the ranks"),
        (plan("x", "reduce", 2, 1, reduced((0, 2), ONE[0])), r"x, level 'up': .*: ranks must be in \[0, 2\)"),
        (
            plan("x", "reduce", 2, 1, reduced((0, 1), Span(0, 2))),
            r"x, level 'up': reduce on units \[0, 2\): units must be in \[0, 1\)",
        ),
        (lambda: reversed_level(Level((Call("broadcast", (0, 1), ONE, 0),), "up")), "only reductions can be mirrored"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()


def test_ir_def_gives_version_columns_and_opcodes() -> None:
    assert ir.VERSION == 3
    assert ir.COLUMNS == {"ROUND": 0, "OPCODE": 1, "PEER": 2, "BEGIN": 3, "COUNT": 4}
    dense = ("SEND", "RECV", "RECV_REDUCE")
    sparse = ("SELECT", "SEND_SPARSE", "RECV_SPARSE", "CLEAR", "SCATTER_ADD", "PACK", "MERGE", "TAKE", "FOLD")
    assert {name: number for number, name in enumerate((*dense, *sparse, "RESELECT"), 1)} == ir.OPCODES


@pytest.mark.parametrize("lost", ["#define HVD_EXT_PLAN_VERSION", "HVD_EXT_OPCODE(", "HVD_EXT_COLUMN(PEER"])
def test_an_incomplete_ir_def_is_refused(lost: str) -> None:
    text = ir.definition().read_text(encoding="utf-8")
    with pytest.raises(PlanError, match=r"it must define a version, columns 0, 1, 2, ... and opcodes"):
        ir.parse(text.replace(lost, "// "))


def test_a_missing_ir_def_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(ir, "__file__", f"{tmp_path}/a/b/ir.py")
    with pytest.raises(PlanError, match=r"ir\.def is missing .* install hvd_ext again"):
        ir.definition()


def test_digests_differ_where_plans_differ() -> None:
    tree = uneven_hosts(6)
    base = allreduce_plan(tree, "two_level").plan
    first = base.levels[0]
    call = first.calls[0]

    def with_first(*calls: Call) -> LogicalPlan:
        return replace(base, levels=(replace(first, calls=(*calls, *first.calls[1:])), *base.levels[1:]))

    others = [
        allreduce_plan(tree, "ring").plan,
        allreduce_plan(uneven_hosts(7), "two_level").plan,
        replace(base, units=base.units + 1),
        replace(base, root=1),
        replace(base, collective="reduce"),
        replace(base, levels=base.levels[1:]),
        with_first(),
        with_first(replace(call, method="direct")),
        with_first(replace(call, root=call.ranks[-1])),
        *sparse_plans(from_hosts("aabbb")),
    ]
    digests = {ir.digest(plan) for plan in (base, *others)}
    assert len(digests) == 1 + len(others)
    assert ir.digest(base, ir.VERSION + 1) not in digests
    assert all(0 <= digest < 2**63 for digest in digests)


def test_the_digest_ignores_remarks() -> None:
    plan = allreduce_plan(one_host(4), "ring").plan
    renamed = replace(plan, note="a remark", levels=tuple(replace(level, name="x") for level in plan.levels))
    assert ir.digest(renamed) == ir.digest(plan)
