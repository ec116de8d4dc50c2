"""The pages: tables written from results, and what marks select of them; the results that are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer.main

from benchmarks.studies.__main__ import app
from benchmarks.studies.markdown import excerpt
from benchmarks.studies.page import allreduce_markdown, rewritten, topk_markdown, training_markdown
from hvd_ext.bench import results
from hvd_ext.bench.results import machine, places, result_of
from hvd_ext.bench.topk import beside_ours
from hvd_ext.bench.training import against
from tests.unit.bench.test_results import FACTS, ROWS, row
from tests.unit.bench.test_topk import result_of as topk_result, row as topk_row, rows_of as topk_rows
from tests.unit.bench.test_training import row as training_row, rows_of as training_rows

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


FIELDS = {
    "algorithm",
    "ranks",
    "hosts",
    "bytes",
    "seconds_median",
    "seconds_min",
    "bound_seconds",
    "bottleneck_bytes",
    "predicted_seconds",
    "correct",
    "chosen",
    "how",
    "samples",
}


def test_kept_results_hold_machine_versions_command_and_every_sample() -> None:
    files = sorted((BENCHMARKS / "results").glob("allreduce_*.json"))
    assert files, "no kept result of the allreduce benchmark"
    for path in files:
        kept = results.load(path)
        for run in kept["runs"]:
            assert run["machine"]["cores"] >= 1
            assert run["versions"]["hvd_ext"]
            assert run["command"].startswith("python -m hvd_ext bench allreduce")
        assert {one["run"] for one in kept["rows"]} == set(range(len(kept["runs"])))
        for one in kept["rows"]:
            assert set(one) >= FIELDS
            assert one["correct"] is True
            assert 0 < one["seconds_min"] == min(one["samples"]) <= one["seconds_median"]
            assert one["ranks"] == sum(one["ranks_per_host"]) and one["hosts"] == len(one["ranks_per_host"])
        for group in places(kept["rows"]).values():
            graphs = {one["algorithm"] for one in group if one["how"] == "graph"}
            assert not graphs or "noop" in graphs


def test_the_kept_results_are_written_in_this_way() -> None:
    kept = {path.name: path.read_text() for path in (BENCHMARKS / "results").glob("*.json")}
    kept = {name: text for name, text in kept.items() if '"benchmark"' in text}
    assert kept
    assert [name for name, text in kept.items() if text != results.text_of(json.loads(text))] == []


@pytest.mark.parametrize(
    "page",
    [
        *("benchmarks/README.md", "benchmarks/results/README.md", "docs/performance.md", "docs/buckets.md"),
        "docs/data.md",
        "docs/stragglers.md",
    ],
)
def test_the_pages_show_the_kept_results(page: str) -> None:
    text = (BENCHMARKS.parent / page).read_text()
    assert rewritten(text, BENCHMARKS / "results") == text, "run: make docs"


def test_a_result_without_horovod_makes_a_page_too() -> None:
    rows = [
        {**one, "ranks": 2, "hosts": 1, "ranks_per_host": [2]} for one in ROWS if one["algorithm"] not in ("horovod",)
    ]
    text = allreduce_markdown(result_of(FACTS, rows))
    assert "| 2 | 4,096 | 1 us | 200 us | 300 us | - | 400 us | torus2d | 1.50 | - |" in text
    assert "Medians of 3 samples." in text


def test_a_page_of_several_hosts_shows_every_row_beside_its_bound() -> None:
    text = allreduce_markdown(result_of(FACTS, ROWS))
    line = "| 2 + 2 | 4,096 | auto graph -> torus2d | 400 us | 200 us | 2.00 | 0.75 | 2.00 | 0.50 | 33.3% |"
    assert f"{line} - | 1.6 ms/call |" in text
    older = [{name: one[name] for name in one if not name.startswith("processor")} for one in ROWS]
    assert f"{line}\n" in allreduce_markdown(result_of(FACTS, older))


@pytest.mark.parametrize(("yardstick", "hosts"), [("tcp", [2, 2]), ("memory", [4])])
def test_a_page_has_a_table_of_what_is_beside_the_yardstick(yardstick: str, hosts: list[int]) -> None:
    big = {"bytes": 10**6, "processor_seconds_per_gb": 1.25, "ranks_per_host": hosts, "hosts": len(hosts)}
    rows = [{**one, **big} for one in [*ROWS[2:], row(yardstick, "engine", 1e-4)]]
    text = allreduce_markdown(result_of(FACTS, rows))
    cells = " | ".join(f"{time} us (1.25 s/GB)" for time in (100, 200, 300, 800, 400))
    name = " + ".join(map(str, hosts))
    assert f"| ranks | bytes | {yardstick} | MPI_Allreduce | hvd_ext engine | Horovod graph | hvd_ext graph |" in text
    assert f"| {name} | 1,000,000 | {cells} | 3.00 | 4.00 | 0.50 |" in text
    without = [one for one in rows if one["algorithm"] not in ("auto", "horovod")]
    assert f"| {name} | 1,000,000 | 100 us (1.25 s/GB) | 200 us (1.25 s/GB) | - | - | - | - | - | - |" in (
        allreduce_markdown(result_of(FACTS, without))
    )
    assert "in brackets" not in allreduce_markdown(result_of(FACTS, ROWS))


def test_tables_are_put_between_the_marks_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result_of(FACTS, ROWS)))
    page = "a\n<!-- results: one.json -->\nold\n<!-- end of results -->\nb\n"
    text = allreduce_markdown(result_of(FACTS, ROWS))
    assert rewritten(page, tmp_path) == f"a\n<!-- results: one.json -->\n{text}<!-- end of results -->\nb\n"
    with pytest.raises(ValueError, match="marks"):
        rewritten("a page without them", tmp_path)
    with pytest.raises(OSError, match=r"none\.json"):
        rewritten(page.replace("one.json", "none.json"), tmp_path)


def test_the_page_names_every_row_once_and_a_wrong_one_aloud() -> None:
    rows = [
        *against(training_rows(2, 2)),
        training_row("ring", correct=False, wrong=["rank 1: inf"], against_horovod=None),
    ]
    run = {"date": "today", "machine": machine(), "versions": {"keras": "3"}}
    text = training_markdown({"runs": [run], "rows": [{"against_horovod_links2": None, **one} for one in rows]})
    assert text.count("\n| mlp, 17.1 MB | 2 + 2 | ") == len(rows)
    assert "- wrong training: ring, mlp, 2 + 2 ranks: rank 1: inf" in text


def test_the_page_has_targets_and_rows(tmp_path: Path) -> None:
    everything = topk_row("algorithm1", [2.0], [1.0], returned=25_000_000, input="zeros")
    results.save(tmp_path / "topk.json", topk_result(beside_ours([*topk_rows(), everything])))
    text = rewritten("<!-- results: topk.json -->\nold\n<!-- end of results -->\n", tmp_path)
    assert "| what | gauss |" in text
    assert "| hvd_ext.mstopk | x1.1 (275 ms) |" in text
    assert "| hvd_ext.topk_error_feedback | add x1.2 (300 ms) |" in text
    assert (
        "1 thread, hard inputs:\n\n| what | zeros |\n|---|---|\n| Algorithm 1 as printed, C++ | x2 (2 s, 1e+03 k) |"
        in text
    )
    assert "| x one read pass | 25,000,000 | 0.001 | 1 | 1.15 | 1.06 | 1.1 | 2.2 | gauss | met |" in text
    assert "- a note" in text
    assert "old" not in text


def test_of_one_input_and_several_lengths_the_page_has_one_table() -> None:
    rows = [one for elements in (2_000, 1_000) for one in topk_rows(elements=elements)]
    text = topk_markdown(topk_result(rows))
    assert "k = 0.001 d, 1 thread, gauss:\n\n| elements | 1,000 | 2,000 |" in text
    assert text.count("| hvd_ext.mstopk | x1.1 ") == 1


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
    assert len(text.splitlines()) <= 330
    shown = {found[1] for found in re.finditer(r"<!-- results: (\S+)", text)}
    whole = (BENCHMARKS / "results" / "README.md").read_text()
    assert {name for name in shown if f"<!-- results: {name} -->" not in whole} == set()


def test_every_study_that_a_page_or_a_script_names_is_there() -> None:
    root = BENCHMARKS.parent
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *BENCHMARKS.glob("*.*"), root / "Makefile"]
    call = re.compile(r"(?:benchmarks\.|^ *)studies ([a-z][a-z-]*)", re.MULTILINE)
    named = {name for path in files for name in call.findall(path.read_text(encoding="utf-8"))}
    assert named == set(typer.main.get_command(app).commands)
