"""bench breakdown: variants and parts, requests, the table, the bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvd_ext.bench import breakdown, breakdown_worker as worker, results
from hvd_ext.bench.breakdown_worker import COMMUNICATION, COMPUTE, INPUT, PARTS, SCHEMES, SELECTION, UPDATE, WHOLE
from hvd_ext.bench.cli import app
from hvd_ext.errors import InvalidError

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


def test_the_table_has_all_parts_and_says_where_they_do_not_add_up() -> None:
    rows = [row(), row("dense", 96, whole=0.2)]
    console = Console(width=200, record=True, force_terminal=False)
    console.print(breakdown.breakdown_table(rows))
    text = console.export_text()
    assert all(word in text for word in (*PARTS, "2 + 1", "MSTopK, hitopk", "dense, auto", "40.0", "+5%"))
    assert [line.split(",")[0] for line in breakdown.doubts([row(), row(compute=0.02), row(compute=0.07)])] == [
        "32 pixels"
    ] * 2
    assert set(breakdown.NAMES) == set(SCHEMES)


def test_bars_are_drawn_from_a_file(tmp_path: Path) -> None:
    kept, drawn = tmp_path / "kept.json", tmp_path / "drawn.png"
    results.save(kept, results.result_of({}, [row(), row("dense"), row("cached", 96)], results.BREAKDOWN))
    done = CliRunner().invoke(app, ["plot-breakdown", str(kept), "--output", str(drawn)])
    assert done.exit_code == 0, done.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidError, match="nothing to draw"):
        breakdown.draw([], drawn)


WRONG: dict[str, dict[str, Any]] = {
    "scheme": {"schemes": ("dense", "other")},
    "named only once": {"schemes": ("dense", "dense")},
    "at least one of each": {"pixels": ()},
    "at least 16": {"pixels": (8,)},
    "batch": {"batch": 0},
    "steps": {"steps": 0},
    "timeout": {"timeout_s": 0},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_request_is_refused_in_words(words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        breakdown.Request(**WRONG[words])


def test_a_task_travels_as_text() -> None:
    task = worker.Task("folder", ("dense",), (32, 96), 16, 32, 5, 3)
    assert worker.Task.read(task.write()) == task
