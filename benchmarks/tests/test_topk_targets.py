"""The goals of the exact top-k, and how results are compared with them."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.topk.jobs import NAMES
from benchmarks.studies.topk.results import BENCHMARK
from benchmarks.studies.topk.targets import TARGETS, verdict, verdicts, verdicts_of
from benchmarks.tests.rows import topk_rows as rows_of
from hvd_ext.bench import results
from tests.unit.bench.rows import FACTS


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


def test_a_verdict_knows_a_stretch_goal_of_both_directions() -> None:
    assert verdict(1.05, 1.15, 1.06, True) == verdict(60.0, 40.0, 55.0, False) == "met, and the stretch goal"


def test_each_run_of_a_file_has_verdicts_of_its_own_and_the_command_shows_them(tmp_path: Path) -> None:
    one, two = (results.result_of(FACTS, rows_of(input=name), BENCHMARK) for name in ("gauss", "laplace"))
    both = results.joined(one, two)
    of_one = verdicts(rows_of())
    assert verdicts_of(both["rows"]) == of_one + [{**target, "input": "laplace"} for target in of_one]
    results.save(tmp_path / "a.json", one)
    done = CliRunner().invoke(app, ["topk-targets", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert "missed by 4.3%" in done.output
