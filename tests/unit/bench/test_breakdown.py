"""bench breakdown: what a variant leaves out, and what a part is."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_ext.bench import breakdown, breakdown_worker as worker
from hvd_ext.bench.breakdown_worker import COMMUNICATION, COMPUTE, INPUT, PARTS, SCHEMES, SELECTION, UPDATE, WHOLE

SECONDS = {COMPUTE: 0.04, INPUT: 0.08, SELECTION: 0.09, COMMUNICATION: 0.07, UPDATE: 0.095, WHOLE: 0.1}


def row(scheme: str = "hitopk", pixels: int = 32, **seconds: float) -> dict[str, Any]:
    found = SECONDS | seconds
    return {
        "ranks": 3,
        "hosts": 2,
        "ranks_per_host": [2, 1],
        "scheme": scheme,
        "pixels": pixels,
        "step_seconds": found[WHOLE],
        "parts": worker.parts_of(found),
    }


def test_a_part_is_what_a_step_saves_without_it() -> None:
    parts = worker.parts_of(SECONDS)
    assert list(parts) == list(PARTS)
    expected = {COMPUTE: 0.04, INPUT: 0.02, SELECTION: 0.01, COMMUNICATION: 0.02, UPDATE: 0.005}
    assert parts == pytest.approx(expected)
    assert breakdown.missed(row()) == pytest.approx(0.1 - sum(expected.values()))
    dense = {name: value for name, value in SECONDS.items() if name != SELECTION}
    assert worker.parts_of(dense) == pytest.approx({**expected, SELECTION: 0.0, COMMUNICATION: 0.03})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_variant_leaves_out_what_it_is_named_after(scheme: str) -> None:
    found = worker.variants(scheme)
    sparse = SCHEMES[scheme][1] is not None
    assert set(found) == {WHOLE, COMPUTE, INPUT, COMMUNICATION, UPDATE} | ({SELECTION} if sparse else set())
    for name, variant in found.items():
        if name == WHOLE:
            assert not variant.left_out
        elif name == COMPUTE:
            assert variant.left_out == set(PARTS) - {COMPUTE}
        else:
            assert name in variant.left_out
        if COMMUNICATION in variant.left_out:
            assert (variant.algorithm, variant.selector) == (None, None)  # so that schemes share it
    if sparse:
        assert found[SELECTION].selector == "random"
        assert found[WHOLE].selector == SCHEMES[scheme][1]
    assert worker.variants("dense")[COMPUTE] == found[COMPUTE]
