"""The whole report of each benchmark, on the terminal and as Markdown, from the results that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.table import Table

from benchmarks.studies import page
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.data import results as data
from benchmarks.studies.hitopk import results as hitopk
from benchmarks.studies.lars import results as lars
from benchmarks.studies.schedule import results as schedule
from benchmarks.studies.stragglers import results as stragglers
from benchmarks.studies.topk import results as topk
from hvd_ext.bench import results, table
from tests.unit.bench.rows import FACTS, KEPT, ROWS
from tests.unit.drawing import printed

Result = dict[str, Any]
# By the file of a kept result: its tables, the words about a wrong row, and what they are.
REPORTS: dict[str, tuple[Callable[[Result], list[Table]], Any, str]] = {
    "allreduce_nine": (
        lambda result: [table.allreduce_table(result)],
        table.faults,
        "result: no-op, 2 + 2 ranks, 16,000,000 bytes",
    ),
    "data": (
        lambda result: [data.table(result)],
        data.faults,
        "samples: memcpy, samples that were read before, 3.1 kB",
    ),
    "hitopk": (
        lambda result: [hitopk.table(result)],
        hitopk.faults,
        "sum: hitopk@0.01, 4 + 4 ranks, 25,000,000 elements",
    ),
    "schedule": (
        lambda result: [schedule.table(result)],
        schedule.faults,
        "result: auto -> optimal, resnet50 x 0.0625, ratio 0.5, 2 + 2 ranks",
    ),
    "stragglers": (
        lambda result: [stragglers.table(result)],
        stragglers.faults,
        "training: full, hyperplane-200, 8 ranks",
    ),
    "topk": (topk.tables, topk.faults, "answer: no-op, gauss, 25,000,000 elements, k = 0.001 d, 1 thread"),
    "training_horovod": (
        lambda result: [table.training_table(result)],
        table.training_faults,
        "training: no communication, mlp, 2 + 2 ranks",
    ),
}


def kept(name: str) -> Result:
    return json.loads((KEPT / f"{name}.json").read_text())


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_every_row_once_and_a_wrong_one_aloud(name: str) -> None:
    tables, faults, words = REPORTS[name]
    result = kept(name)
    assert faults(result["rows"]) == []
    # two benchmarks keep one text, the others one of each rank
    result["rows"][0].update(correct=False, wrong="rank 1: bad" if name in ("data", "topk") else ["rank 1: bad"])
    assert faults(result["rows"]) == [f"wrong {words}: rank 1: bad"]
    drawn = tables(result)
    assert sum(one.row_count for one in drawn) == len(result["rows"])
    assert printed(*drawn).count(" WRONG") == 1
    assert f"- wrong {words}: rank 1: bad\n" in page.MARKDOWN[result["benchmark"]](result)


def test_reports_without_a_check_have_every_row_and_say_what_is_doubtful() -> None:
    rows = kept("lars")["rows"]
    assert lars.table(rows).row_count == len(rows)
    study = kept("convergence")
    study["rows"][0]["equal"] = False
    assert printed(convergence.table(study)).count(" UNEQUAL") == 1
    assert "all-gather of the selected" in printed(hitopk.steps_table(kept("hitopk")))


def test_rows_of_older_files_have_no_processor_time() -> None:
    older = [{name: value for name, value in one.items() if not name.startswith("processor")} for one in ROWS]
    line = "| 2 + 2 | 4,096 | auto graph -> torus2d | 400 us | 200 us | 2.00 | 0.75 | 2.00 | 0.50 | 33.3% |"
    assert f"{line}\n" in page.allreduce_markdown(results.result_of(FACTS, older))
    assert f"{line} - | 1.6 ms/call |\n" in page.allreduce_markdown(results.result_of(FACTS, ROWS))
