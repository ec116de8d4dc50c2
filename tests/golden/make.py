"""Writes the golden plans: python tests/golden/make.py

A golden plan holds what may not change unnoticed: the rows of all ranks and the digest. The Python tests compare them
with what the planner makes today, and hand them to the engine's decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvd_ext.planning import ir, planner, registry
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import Call, Level, LogicalPlan, Method, Span, reversed_level
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Node, Tree, from_hosts, leaf

FOLDER = Path(__file__).resolve().parent / "plans"


def fig4() -> Tree:
    """BlueConnect's Fig. 1 and 4: 12 learners, 3 on each of 4 nodes, 2 nodes on each of 2 switches."""
    nodes = [Node(name, SHARED_MEMORY, tuple(leaf(3 * i + j) for j in range(3))) for i, name in enumerate("ABCD")]
    switches = (Node("s10", ETHERNET, tuple(nodes[:2])), Node("s11", ETHERNET, tuple(nodes[2:])))
    return Tree(Node("s20", ETHERNET, switches))


def plans() -> Iterator[tuple[str, LogicalPlan]]:
    """The golden plans by name: at least one for each schedule, collective and method."""
    one, even, fig2 = from_hosts("aaaa"), from_hosts("aabb"), from_hosts("aabbb")
    dealt = from_hosts("abcab")
    hosts = (Node("h", SHARED_MEMORY, (leaf(4), leaf(0), leaf(2))), Node("i", SHARED_MEMORY, (leaf(1),)))
    deep = Tree(Node("c", ETHERNET, (Node("r", ETHERNET, hosts), leaf(3))))
    for name, tree in {"one": one, "even": even, "fig2": fig2, "dealt": dealt, "deep": deep}.items():
        for algorithm in registry.names():
            if registry.supports(registry.get(algorithm), tree) is None:
                yield f"{algorithm}_{name}", planner.allreduce_plan(tree, algorithm).plan
        for algorithm in registry.sparse_names():
            schedule = registry.sparse(algorithm)
            for number, plan in enumerate(schedule.variants(tree)):
                yield f"{algorithm}_{name}" + (f"_variant{number}" if number else ""), plan
            yield f"{algorithm}_{name}_dense", schedule.dense(tree)
    yield "blueconnect_fig4", planner.allreduce_plan(fig4(), "blueconnect").plan
    yield "ring_single", planner.allreduce_plan(from_hosts("a"), "ring").plan
    yield "all_gather_dealt", planner.all_gather_plan(dealt)
    yield "reduce_scatter_dealt", planner.reduce_scatter_plan(dealt)
    yield "all_to_all_dealt", planner.all_to_all_plan(dealt)
    yield "broadcast_fig2_root3", planner.broadcast_plan(fig2, 3)
    methods: tuple[Method, ...] = ("recursive", "direct")
    for method in methods:
        spans = tuple(Span(rank, 1) for rank in range(6))
        down = Level((Call("reduce_scatter", tuple(range(6)), spans, method=method),))
        yield f"{method}_of_6", LogicalPlan(method, "allreduce", 6, 6, (down, reversed_level(down)))


def describe(plan: LogicalPlan) -> dict[str, Any]:
    """A plan as JSON has it: rows[rank] is a list of rows in the columns of ir.def."""
    return {
        "algorithm": plan.algorithm,
        "collective": plan.collective,
        "size": plan.size,
        "units": plan.units,
        "root": plan.root,
        "version": ir.VERSION,
        "digest": ir.digest(plan),
        "rows": [rows_of(plan, rank).tolist() for rank in range(plan.size)],
    }


def main() -> None:
    """Rewrites the folder."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, plan in plans():
        described = describe(plan)
        rows = ",\n".join("  " + json.dumps(rank) for rank in described.pop("rows"))
        text = json.dumps(described, indent=1).removesuffix("\n}") + ',\n "rows": [\n' + rows + "\n ]\n}\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
