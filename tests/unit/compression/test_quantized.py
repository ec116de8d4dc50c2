"""The options of `Quantized`, and its plans."""

from __future__ import annotations

import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.compression import from_text
from hvd_ext.compression.density import Schedule
from hvd_ext.errors import InvalidError, PlanError
from hvd_ext.planning import ir, planner
from hvd_ext.planning.layout import layout
from hvd_ext.planning.schedules import hitopk
from hvd_ext.planning.sparse_planner import needs, sparse_plan
from hvd_ext.planning.tensors import Tensor
from hvd_ext.planning.verify_sparse import check_order
from hvd_ext.topology import presets
from hvd_ext.topology.tree import Link, Tree


def cluster(*hosts: int) -> Tree:
    return presets.cluster(hosts, Link(5e-6, 1 / 5e9), Link(50e-6, 8 / 1e8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 2}, r"Quantized, bits \(2\): must be 8, 4 or 1"),
        ({"bits": True}, r"Quantized, bits \(True\)"),
        ({"block": 100}, r"Quantized, block \(100\): must be a multiple of 64 from 64 to 4096"),
        ({"block": 8192}, r"Quantized, block \(8192\)"),
        ({"dense_steps": -1}, r"Quantized, dense_steps \(-1\): must be a whole number of steps from 0"),
        ({"height": 0}, r"Quantized, height \(0\): must be a whole number from 1, or None"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.Quantized(**options)  # type: ignore[arg-type]


def test_the_density_is_that_of_the_bits_and_the_scales() -> None:
    assert hvd.Quantized().density == (8 + 16 / 256) / 32
    assert hvd.Quantized(1, 64).density == 1.25 / 32
    assert hvd.Quantized(4, 64, dense_steps=3).schedule == Schedule((0, 3), (1.0, 4.25 / 32))
    assert from_text("quantized:4,block=128") == hvd.Quantized(4, 128)


def test_the_layout_has_the_bits_and_the_block() -> None:
    tensors = [Tensor("kernel", (512, 512), "float32"), Tensor("bias", (512,), "float32")]
    selections = [bucket.selection for bucket in layout(cluster(2, 2), tensors, 1, codec=hvd.Quantized(4, 128)).buckets]
    (selection,) = [selection for selection in selections if selection is not None]
    assert (selection.codec, selection.bits, selection.block) == ("quantized", 4, 128)


@pytest.mark.parametrize("hosts", [(2, 2, 2), (3, 2, 1), (1, 1, 1, 1), (4, 2, 2, 3, 1)], ids=str)
def test_a_plan_that_sends_sums_is_proven_and_chosen_from_three_hosts_on(hosts: tuple[int, ...]) -> None:
    tree = cluster(*hosts)
    plan = hitopk.build(tree, exchange="two_shot")
    planner.prove(plan)
    assert needs(plan) == {"RESELECT"}
    chosen = sparse_plan(tree, "hitopk", 1 << 24, 0.25, rows=hvd.Quantized.rows)
    assert needs(chosen.plan) == {"RESELECT"}
    assert not needs(sparse_plan(tree, "hitopk", 1 << 24, 0.25, rows=frozenset()).plan)


def test_two_hosts_send_their_own_sums_only() -> None:
    assert not needs(sparse_plan(cluster(3, 2), "hitopk", 1 << 24, 0.25, rows=hvd.Quantized.rows).plan)


@pytest.mark.parametrize(
    ("units", "words"),
    [((4, 8), "its residual is that of a SELECT before it"), ((1, 2), "it must not overlap another RESELECT")],
)
def test_a_selection_from_sums_lies_in_the_selected_units_and_overlaps_no_other(
    units: tuple[int, int], words: str
) -> None:
    begin, end = units
    rows = np.array([[0, ir.SELECT, 0, 0, 6], [0, ir.RESELECT, 0, 0, 2], [0, ir.RESELECT, 0, begin, end - begin]])
    with pytest.raises(PlanError, match=words):
        check_order(rows, 0, "plan")
    check_order(rows[:2], 0, "plan")
