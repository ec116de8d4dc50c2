"""The tables of the benchmarks on the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from hvd_ext.bench import breakdown, results, table
from tests.unit.bench.rows import KEPT, ROWS, row, training_row, training_rows


def shown(*tables: Table) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(*tables)
    return console.file.getvalue()  # type: ignore[attr-defined]


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


def test_a_wrong_training_is_a_row_and_a_line() -> None:
    rows = [{"run": 0, **one} for one in training_rows(2, 2)]
    rows[1] |= {"correct": False, "wrong": ["rank 1: bad"]}
    assert shown(table.training_table({"benchmark": "title", "rows": rows})).count(" WRONG") == 1
    assert table.training_faults(rows) == ["wrong training: auto, mlp, 2 + 2 ranks: rank 1: bad"]


def test_parts_of_a_step_that_do_not_add_up_are_doubtful() -> None:
    rows = results.load(KEPT / "breakdown.json", results.BREAKDOWN)["rows"]
    assert breakdown.breakdown_table(rows).row_count == len(rows)
    first = rows[0] | {"step_seconds": 1.25 * sum(rows[0]["parts"].values())}
    assert breakdown.doubts([first])[0].startswith("32 pixels, dense, auto: the parts miss +20% of the step")


def test_the_calls_that_horovod_was_tried_with_are_told() -> None:
    tried = training_row("horovod", chosen="grouped", trial_seconds={"separate": 0.3, "grouped": 0.2})
    (line,) = table.trials([training_row("ring"), tried])
    assert line == "Horovod, 2 + 2 ranks: grouped calls (separate calls 300 ms a step, grouped calls 200 ms a step)"
