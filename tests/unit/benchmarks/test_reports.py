"""The whole report of each benchmark, on the terminal and as Markdown, from the results that are kept."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.studies import page
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.hitopk import results as hitopk
from hvd_ext.bench import breakdown, data_table, lars, results, table
from tests.unit.bench.rows import FACTS, KEPT, ROWS, row, training_row

Result = dict[str, Any]
# By the file of a kept result: how it is read, its tables, its page, the words about a wrong row, and what they are.
REPORTS: dict[str, tuple[Any, Callable[[Result], list[Table]], Any, Any, str]] = {
    "allreduce_nine": (
        results.load,
        lambda result: [table.allreduce_table(result)],
        page.allreduce_markdown,
        table.faults,
        "wrong result: no-op, 2 + 2 ranks, 16,000,000 bytes",
    ),
    "data": (
        lambda path: results.load(path, results.DATA),
        lambda result: [data_table.data_table(result)],
        page.data_markdown,
        data_table.data_faults,
        "wrong samples: memcpy, samples that were read before, 3.1 kB",
    ),
    "hitopk": (
        hitopk.load,
        lambda result: [hitopk.table(result)],
        hitopk.markdown,
        hitopk.faults,
        "wrong sum: hitopk@0.01, 4 + 4 ranks, 25,000,000 elements",
    ),
    "schedule": (
        lambda path: results.load(path, results.SCHEDULE),
        lambda result: [table.schedule_table(result)],
        page.schedule_markdown,
        table.schedule_faults,
        "wrong result: auto -> optimal, resnet50 x 0.0625, ratio 0.5, 2 + 2 ranks",
    ),
    "stragglers": (
        lambda path: results.load(path, results.STRAGGLERS),
        lambda result: [table.stragglers_table(result)],
        page.stragglers_markdown,
        table.stragglers_faults,
        "wrong training: full, hyperplane-200, 8 ranks",
    ),
    "topk": (
        lambda path: results.load(path, results.TOPK),
        table.topk_tables,
        page.topk_markdown,
        table.topk_faults,
        "wrong answer: no-op, gauss, 25,000,000 elements, k = 0.001 d, 1 thread",
    ),
    "training_horovod": (
        lambda path: results.load(path, results.TRAINING),
        lambda result: [table.training_table(result)],
        page.training_markdown,
        table.training_faults,
        "wrong training: no communication, mlp, 2 + 2 ranks",
    ),
}


def shown(*tables: Table) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=250)
    for one in tables:
        console.print(one)
    return stream.getvalue()


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_every_row_once_and_a_wrong_one_aloud(name: str) -> None:
    load, tables, markdown, faults, words = REPORTS[name]
    result = load(KEPT / f"{name}.json")
    assert faults(result["rows"]) == []
    # two benchmarks keep one text, the others one of each rank
    result["rows"][0].update(correct=False, wrong="rank 1: bad" if name in ("data", "topk") else ["rank 1: bad"])
    assert faults(result["rows"]) == [f"{words}: rank 1: bad"]
    drawn = tables(result)
    assert sum(one.row_count for one in drawn) == len(result["rows"])
    assert shown(*drawn).count(" WRONG") == 1
    assert f"- {words}: rank 1: bad\n" in markdown(result)


def test_reports_without_a_check_have_every_row_and_say_what_is_doubtful() -> None:
    for name, benchmark in (("lars", results.LARS), ("breakdown", results.BREAKDOWN)):
        rows = results.load(KEPT / f"{name}.json", benchmark)["rows"]
        drawn = lars.lars_table(rows) if name == "lars" else breakdown.breakdown_table(rows)
        assert drawn.row_count == len(rows)
        assert shown(drawn)
    (first, *_) = rows
    first["step_seconds"] = 1.25 * sum(first["parts"].values())
    assert breakdown.doubts([first])[0].startswith("32 pixels, dense, auto: the parts miss +20% of the step")
    study = convergence.load(KEPT / "convergence.json")
    study["rows"][0]["equal"] = False
    assert shown(convergence.table(study)).count(" UNEQUAL") == 1
    sums = hitopk.load(KEPT / "hitopk.json")
    assert "all-gather of the selected" in shown(hitopk.steps_table(sums))


ALLREDUCE = """
2 + 2 |     4,096 | no-op                 |   1 us | 0.5 us |   4 us/call |      |       |      |      |      |
      |           | ring graph            | 600 us | 300 us | 2.4 ms/call |      |  6.00 |      | 3.00 | 0.75 |
      |           | auto graph -> torus2d | 400 us | 200 us | 1.6 ms/call | 2.00 |  4.00 | 0.75 | 2.00 | 0.50 | 33.3%
      |           | MPI_Allreduce         | 200 us | 100 us | 800 us/call | 2.00 |  2.00 |      |      |      |
      |           | Horovod graph         | 800 us | 400 us | 3.2 ms/call | 4.00 |  8.00 |      | 4.00 |      |
      |           | tcp                   | 100 us |  50 us | 400 us/call |      |       |      |      |      |
      | 1,000,000 | ring graph WRONG      |   1 ms | 500 us |   1.25 s/GB |      |       |      |      |      |
"""


def test_the_table_of_allreduce_has_times_ratios_and_processor_time_per_byte_where_bytes_take_it() -> None:
    rows = [*ROWS[:3], ROWS[5], ROWS[6], row("tcp", "engine", 1e-4)]
    rows.append(row("ring", "graph", 1e-3, bytes=10**6, processor_seconds_per_gb=1.25, correct=False))
    text = shown(table.allreduce_table({"benchmark": "title", "rows": rows}))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert lines == [[cell.strip() for cell in line.split("|")] for line in ALLREDUCE.strip().splitlines()]


def test_rows_of_older_files_have_no_processor_time() -> None:
    older = [{name: value for name, value in one.items() if not name.startswith("processor")} for one in ROWS]
    assert shown(table.allreduce_table({"benchmark": "title", "rows": older})).count("/call") == 0
    line = "| 2 + 2 | 4,096 | auto graph -> torus2d | 400 us | 200 us | 2.00 | 0.75 | 2.00 | 0.50 | 33.3% |"
    assert f"{line}\n" in page.allreduce_markdown(results.result_of(FACTS, older))
    assert f"{line} - | 1.6 ms/call |\n" in page.allreduce_markdown(results.result_of(FACTS, ROWS))


def test_the_calls_that_horovod_was_tried_with_are_told() -> None:
    tried = training_row("horovod", chosen="grouped", trial_seconds={"separate": 0.3, "grouped": 0.2})
    (line,) = table.trials([training_row("ring"), tried])
    assert line == "Horovod, 2 + 2 ranks: grouped calls (separate calls 300 ms a step, grouped calls 200 ms a step)"
