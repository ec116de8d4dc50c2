"""bench lars: ratios and goals of rows; what is measured, on a small model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.studies.lars import jobs, results, worker
from benchmarks.studies.lars.worker import LAMB, NORMS, PTO, UPDATE
from hvd_ext.planning.models.layer import Layer


def row(part: str, contestant: str, seconds: list[float], cpu: list[float], ranks: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {
        **{"ranks": ranks, "ranks_per_host": [ranks], "threads": 1, "model": "resnet50", "tensors": 161},
        **{"elements": 25_557_032, "part": part, "contestant": contestant, "chosen": None},
        **{"seconds_samples": seconds, "cpu_samples": cpu},
    }
    return {**found, **jobs.summary(found)}


ROWS = [
    row(NORMS, "read", [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
    row(NORMS, "ours", [1.1, 2.4, 5.2], [1.0, 1.0, 1.0]),
    row(NORMS, "l2_loss", [3.0, 3.0, 3.0], [2.0, 2.0, 2.0]),
    row(UPDATE, "ours", [1.0], [1.0]),
    row(UPDATE, "ops", [4.0], [4.0]),
    row(UPDATE, "sgd", [1.0], [1.0]),
    row(LAMB, "ours", [1.0], [1.0]),
    row(LAMB, "ops", [4.0], [4.0]),
    row(LAMB, "keras", [1.0], [1.0]),
    row(PTO, "alone", [4.0, 4.0], [4.0, 4.0]),
    row(PTO, "together", [3.0, 3.0], [1.0, 1.0]),
    row(PTO, "auto", [3.3, 3.3], [1.0, 1.0]),
]


def test_goals_compare_the_samples_of_the_same_turns_and_say_where_one_is_missed() -> None:
    lines = results.goals(ROWS)
    assert lines[0].endswith("time 1.20 of one pass over the same bytes (goal 1.30: reached)")
    assert "CPU 0.50 of norms: tf.nn.l2_loss" in lines[1]
    assert lines[1].endswith("(goal 0.33: missed)")
    assert [line.rpartition(" ")[2] for line in lines[2:]] == ["reached)"] * 3 + ["missed)"] * 2
    assert lines[6].startswith("resnet50 on 2 ranks: norms: auto, time 1.10 of the better way")
    four = results.goals([{**one, "ranks": 4, "ranks_per_host": [4]} for one in ROWS])
    assert "divided among the ranks, CPU 0.25 of norms: each rank all (goal 0.35: reached)" in four[6]
    assert not [line for line in results.goals([{**one, "ranks": 1} for one in ROWS]) if "auto" in line]


def test_the_models_are_those_of_the_papers() -> None:
    sizes = {
        name: [elements for layer in make() for _, elements in layer.tensors] for name, make in worker.MODELS.items()
    }
    assert (len(sizes["resnet50"]), sum(sizes["resnet50"])) == (161, 25_557_032)
    assert 105e6 < sum(sizes["transformer"]) < 115e6


def test_the_contestants_of_a_part_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [Layer("dense", (("dense/kernel", 70_000), ("dense/bias", 30)), 1.0)]
    monkeypatch.setitem(worker.MODELS, "small", lambda: small)
    bench = worker.Bench("small", 1)
    both = [np.linalg.norm(np.asarray(one)) for one in bench._both()]
    found = {name: call() for name, call in bench.calls(NORMS).items()}
    np.testing.assert_allclose(found["ours"], np.square(both), rtol=1e-5)
    np.testing.assert_allclose(found["l2_loss"], np.square(both) / 2, rtol=1e-4)
    np.testing.assert_allclose(found["norm"], both, rtol=1e-4)
    weights = [np.asarray(one).copy() for one in bench._weights]
    for call in (bench.calls(UPDATE) | bench.calls(LAMB)).values():
        call()
    assert all((np.asarray(one) != before).any() for one, before in zip(bench._weights, weights, strict=True))
