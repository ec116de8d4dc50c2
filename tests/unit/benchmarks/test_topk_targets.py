"""The goals of the exact top-k, and how results are compared with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.topk_targets import TARGETS, verdict, verdicts, verdicts_of
from hvd_ext.bench import results
from hvd_ext.bench.topk import NAMES
from tests.unit.bench.rows import FACTS, topk_rows as rows_of


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((1.05, 1.15, 1.06, True), "met, and the stretch goal"),
        ((1.10, 1.15, 1.06, True), "met"),
        ((1.265, 1.15, 1.06, True), "missed by 10.0%"),
        ((60.0, 40.0, 55.0, False), "met, and the stretch goal"),
        ((40.0, 40.0, 55.0, False), "met"),
        ((30.0, 40.0, 55.0, False), "missed by 25.0%"),
    ],
)
def test_a_verdict_says_by_how_much_a_target_is_missed(figures: Any, words: str) -> None:
    assert verdict(*figures) == words


def test_the_worst_input_counts_for_a_target() -> None:
    worse = [{**one, "x_yardstick": 1.3} for one in rows_of(input="laplace")[:1]]
    found = {target["item"]: target for target in verdicts([*rows_of(), *worse])}
    assert (found["x one read pass"]["input"], found["x one read pass"]["met"]) == ("laplace", False)
    assert found["x one read pass"]["verdict"] == "missed by 13.0%"
    assert found["x the bare add, error feedback"]["verdict"] == "missed by 4.3%"
    assert found["times as fast as Algorithm 1 as printed"]["verdict"] == "met"
    assert found["times as fast as np.argpartition"]["verdict"] == "missed by 33.3%"


def test_a_target_is_about_its_lengths_threads_and_inputs() -> None:
    assert verdicts([*rows_of(elements=2_000_000), *rows_of(density=0.5)]) == []
    items = [target["item"] for target in verdicts(rows_of(threads=2))]
    assert items == ["x one read pass of as many threads"]
    assert [target["item"] for target in verdicts(rows_of(input="nan"))] == ["x one read pass, hard inputs"]
    assert {target.contestant for target in TARGETS} <= set(NAMES)


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return results.result_of(FACTS, rows, results.TOPK)


def test_each_run_of_a_file_has_verdicts_of_its_own() -> None:
    both = results.joined(result_of(rows_of()), result_of(rows_of(input="laplace")))
    one = verdicts(rows_of())
    assert verdicts_of(both["rows"]) == one + [{**target, "input": "laplace"} for target in one]


def test_the_command_shows_what_was_missed(tmp_path: Path) -> None:
    results.save(tmp_path / "a.json", result_of(rows_of()))
    done = CliRunner().invoke(app, ["topk-targets", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert "missed by 4.3%" in done.output
