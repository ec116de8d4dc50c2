"""The pages: what marks select of the results, and that the kept results are whole and on the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks.studies.__main__ import app
from benchmarks.studies.markdown import excerpt
from benchmarks.studies.page import allreduce_markdown, rewritten, whole
from hvd_ext.bench import cli, results
from hvd_ext.bench.results import places, result_of
from tests.unit.bench.rows import FACTS, KEPT, ROWS, row

BENCHMARKS = Path(__file__).parents[1]


def test_kept_results_hold_machine_versions_command_and_every_sample() -> None:
    files = sorted(KEPT.glob("allreduce_*.json"))
    assert files, "no kept result of the allreduce benchmark"
    for path in files:
        kept = results.load(path)
        for run in kept["runs"]:
            assert run["machine"]["cores"] >= 1
            assert run["versions"]["hvd_ext"]
            assert run["command"].startswith("python -m hvd_ext bench allreduce")
        assert {one["run"] for one in kept["rows"]} == set(range(len(kept["runs"])))
        for one in kept["rows"]:
            assert set(one) >= set(row("", "", 0.0)) - {"processor_seconds_per_call", "processor_seconds_per_gb"}
            assert one["correct"] is True
            assert 0 < one["seconds_min"] == min(one["samples"]) <= one["seconds_median"]
            assert one["ranks"] == sum(one["ranks_per_host"]) and one["hosts"] == len(one["ranks_per_host"])
        for group in places(kept["rows"]).values():
            graphs = {one["algorithm"] for one in group if one["how"] == "graph"}
            assert not graphs or "noop" in graphs


def test_the_kept_results_are_written_in_this_way() -> None:
    kept = {path.name: path.read_text() for path in KEPT.glob("*.json")}
    kept = {name: text for name, text in kept.items() if '"benchmark"' in text}
    assert kept
    assert [name for name, text in kept.items() if text != results.text_of(json.loads(text))] == []


@pytest.mark.parametrize(
    "page",
    [
        "docs/performance.md",
        "docs/topk_performance.md",
        "docs/compression.md",
        "docs/local_steps.md",
        "docs/buckets.md",
        "docs/data.md",
        "docs/elastic.md",
        "docs/recipe.md",
        "docs/stragglers.md",
    ],
)
def test_the_pages_show_the_kept_results(page: str) -> None:
    text = (BENCHMARKS.parent / page).read_text()
    assert rewritten(text, KEPT) == text, "run: make docs"


def test_the_page_of_all_tables_has_every_result_of_a_benchmark() -> None:
    named = {line.removeprefix("# ") for line in whole(KEPT).splitlines() if line.startswith("# ")}
    others = {"demo", "gpu", "gpu_training", "images_baseline"}  # with pages of their own
    assert named == {path.stem for path in KEPT.glob("*.json")} - others


def test_tables_are_put_between_the_marks_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result_of(FACTS, ROWS)))
    page = "a\n<!-- results: one.json -->\nold\n<!-- end of results -->\nb\n"
    text = allreduce_markdown(result_of(FACTS, ROWS))
    assert rewritten(page, tmp_path) == f"a\n<!-- results: one.json -->\n{text}<!-- end of results -->\nb\n"
    with pytest.raises(ValueError, match="marks"):
        rewritten("a page without them", tmp_path)
    with pytest.raises(OSError, match=r"none\.json"):
        rewritten(page.replace("one.json", "none.json"), tmp_path)


WHOLE = """facts

| ranks | what | median | x bound |
|---|---|---|---|
| 2 + 2 | ring | 2 s | 1.5 |
| 2 + 2 | tree | 1 s | 1.1 |
| 3 + 2 | ring | 3 s | 1.6 |

of threads:

| what | median |
|---|---|
| ring | 9 s |
"""


def test_a_mark_may_select_rows_and_columns_of_a_table(tmp_path: Path) -> None:
    assert excerpt(WHOLE, "rows: ring; 2 + 2 / 3 + 2 | columns: median; ranks") == (
        "| median | ranks |\n|---|---|\n| 2 s | 2 + 2 |\n| 3 s | 3 + 2 |\n"
    )
    assert excerpt(WHOLE, "table: of threads").endswith("| what | median |\n|---|---|\n| ring | 9 s |\n")
    assert excerpt(WHOLE, "across: ranks; what; x bound") == (
        "| ranks | ring | tree |\n|---|---|---|\n| 2 + 2 | 1.5 | 1.1 |\n| 3 + 2 | 1.6 | - |\n"
    )
    (tmp_path / "one.json").write_text(json.dumps(result_of(FACTS, ROWS)))
    page = "<!-- results: one.json | rows: no-op | columns: ranks; what -->\nold\n<!-- end of results -->\n"
    assert rewritten(page, tmp_path) == page.replace("old\n", "| ranks | what |\n|---|---|\n| 2 + 2 | no-op |\n")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("rows: star", "no row has a cell 'star'"),
        ("rows: ring; 2 + 2 / 4 + 4", "no row has a cell '4 + 4'"),
        ("columns: mean", "no table of the result has this title and these columns"),
        ("table: of processes", "no table of the result"),
        ("row: ring", "'row' must be one of table, rows, columns, across"),
        ("across: ranks; what", "must name three columns"),
        ("across: what; what; ranks", "two rows have the same what and what"),
    ],
)
def test_a_mark_that_selects_what_is_not_there_is_an_error(wanted: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        excerpt(WHOLE, wanted)


def test_the_page_of_performance_is_short_enough_to_be_read() -> None:
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    assert len(text.splitlines()) <= 300


def test_every_study_that_a_page_or_a_script_names_is_there() -> None:
    root = BENCHMARKS.parent
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *BENCHMARKS.glob("*.*"), root / "Makefile"]
    call = re.compile(r"(?:benchmarks\.|^ *)studies ([a-z][a-z-]*)", re.MULTILINE)
    named = {name for path in files for name in call.findall(path.read_text(encoding="utf-8"))}
    assert named == set(typer.main.get_command(app).commands)


def test_every_command_of_the_script_that_measures_all_is_there_with_its_options() -> None:
    groups: dict[str, Any] = {"bench": typer.main.get_command(cli.app), "studies": typer.main.get_command(app)}
    script = (BENCHMARKS / "measure.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    calls = re.findall(r"(?:hvd_ext (bench)|\.(studies)|^ *(studies)) ([a-z-]+)(.*)", script, re.MULTILINE)
    assert len(calls) > 40
    for *names, command, rest in calls:
        commands = groups["".join(names)].commands
        assert command in commands, command
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", rest)) <= known, command
