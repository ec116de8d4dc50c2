"""What benchmarks make of their samples: ratios, where we are slower, the file, and the tables on the terminal."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.bench import allreduce, breakdown, results, table
from hvd_ext.bench.results import joined, places, ratios, result_of
from hvd_ext.bench.table import losses
from hvd_ext.errors import InvalidError
from tests.unit.bench.rows import FACTS, KEPT, ROWS, row, training_row, training_rows
from tests.unit.drawing import printed


def beside(**some: float) -> dict[str, Any]:
    """Give the ratios of a row, of which most are None."""
    names = ("bound", "predicted", "yardstick", "mpi", "horovod", "saving")
    return {name: pytest.approx(some[name]) if name in some else None for name in names}


def test_ratios_compare_like_with_like() -> None:
    seen = {(one["algorithm"], one["how"]): ratios(one, ROWS) for one in ROWS}
    assert seen["auto", "graph"] == beside(bound=2.0, predicted=0.75, mpi=2.0, horovod=0.5, saving=1 / 3)
    # Horovod has no call without TensorFlow, and the ring was measured in a graph only
    assert seen["auto", "engine"] == beside(mpi=1.5)
    assert seen["auto", "eager"]["horovod"] == pytest.approx(2.0)
    assert seen["ring", "graph"]["saving"] is None
    assert seen["horovod", "graph"] == beside(bound=4.0, mpi=4.0)
    assert seen["mpi", "engine"]["mpi"] is seen["noop", "graph"]["mpi"] is None


def test_in_a_graph_the_price_has_what_a_graph_takes_without_communication() -> None:
    engine = row("ring", "engine", 3e-4, predicted_seconds=2e-4)
    rows = allreduce.with_dispatch([row("noop", "graph", 5e-4), *ROWS[1:], engine])
    prices = [one["predicted_seconds"] for one in rows if one["predicted_seconds"] is not None]
    assert prices == pytest.approx([3e-4 + 5e-4, 2e-4])
    assert allreduce.with_dispatch(ROWS[1:]) == ROWS[1:]  # without a graph nothing is added


@pytest.mark.parametrize("yardstick", results.YARDSTICKS)
def test_every_row_that_sums_is_compared_with_the_yardstick_and_the_yardstick_with_none(yardstick: str) -> None:
    rows = [*ROWS, row(yardstick, "engine", 1e-4, bound_seconds=5e-5)]
    seen = {(one["algorithm"], one["how"]): ratios(one, rows) for one in rows}
    sums = {
        **{("ring", "graph"): 6.0, ("auto", "graph"): 4.0, ("auto", "engine"): 3.0, ("auto", "eager"): 5.0},
        **{("mpi", "engine"): 2.0, ("horovod", "graph"): 8.0, ("horovod", "eager"): 2.5},
    }
    assert {key: one["yardstick"] for key, one in seen.items() if one["yardstick"]} == pytest.approx(sums)
    assert seen[yardstick, "engine"] == beside(bound=2.0)
    assert losses(rows) == losses(ROWS)


def test_rows_of_other_sizes_clusters_and_runs_are_never_compared() -> None:
    mine = row("ring", "graph", 1e-3)
    changes: list[dict[str, Any]] = [{"bytes": 4}, {"ranks_per_host": [3, 1]}, {"run": 1}]
    groups = places([*(row("mpi", "engine", 1e-3, **change) for change in changes), mine])
    assert len(groups) == 4
    assert [ratios(mine, group)["mpi"] for group in groups.values() if mine in group] == [None]


def test_losses_are_counted_and_the_worst_is_told_with_its_place() -> None:
    more = [row("two_level", "engine", 6e-4), row("flexreduce", "engine", 1e-4)]
    assert losses(ROWS + more) == [
        "slower than MPI_Allreduce in 2 of 3 rows, at worst x3.00 (two_level engine, 2 + 2 ranks, 4,096 bytes)",
        "slower than Horovod in 1 of 3 rows, at worst x2.00 (auto eager -> torus2d, 2 + 2 ranks, 4,096 bytes)",
    ]
    graphs = [one for one in ROWS if one["how"] == "graph" or one["algorithm"] == "mpi"]
    assert losses(graphs)[0].startswith("slower than MPI_Allreduce in 2 of 2 rows")


def test_a_run_is_described_with_what_changes_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("hvd_ext.__main__", None))
    monkeypatch.setattr("sys.argv", ["x", "bench", "allreduce", "--bytes", "4"])
    run = results.begin_run("a launcher", {"HOROVOD_CYCLE_TIME": "0", "HVD_EXT_LAUNCHER": "x", "PATH": "y"})
    assert run["command"] == "python -m hvd_ext bench allreduce --bytes 4"
    assert run["environment"] == {"HOROVOD_CYCLE_TIME": "0"}
    assert run["launcher"] == "a launcher"
    assert run["machine"]["cores"] >= 1 and run["versions"]["hvd_ext"]
    # without an environment it is that of the jobs: what a launcher tells its ranks does not reach them
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_hnp_uri": "x", "HOROVOD_CYCLE_TIME": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kept = results.begin_run("a launcher")["environment"]
    assert kept["HOROVOD_CYCLE_TIME"] == "2"
    assert "OMPI_MCA_orte_hnp_uri" not in kept


def test_a_file_has_a_row_a_line_and_reads_back_as_it_was_behind_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    one, two = result_of({"command": "a"}, [row("ring", "graph", 1.0)]), result_of(FACTS, ROWS)
    whole = {**joined(joined(one, two), two), "none": [], "study": {"a": [1, 2]}}
    results.save(path, whole)
    assert list(tmp_path.iterdir()) == [path]
    assert results.load(path) == json.loads(json.dumps(whole))
    assert [one["run"] for one in whole["rows"]] == [0] + [1] * len(ROWS) + [2] * len(ROWS)
    assert whole["runs"] == [{"command": "a"}, FACTS, FACTS]
    lines = path.read_text().splitlines()
    assert sum(line.startswith('  {"run": ') for line in lines) == 1 + 2 * len(ROWS)
    assert len(lines) == 1 + 2 * len(ROWS) + 3 + 9


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "something else"}', "{"])
def test_a_file_that_is_no_result_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InvalidError, match=r"file \(.*file\.json\): it must be a result of \"allreduce"):
        results.load(path)
    with pytest.raises(InvalidError, match='it must be a result of .*digits"; it cannot be read'):
        results.load(tmp_path / "none", results.TRAINING)


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
    text = printed(table.allreduce_table({"benchmark": "title", "rows": rows}))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert lines == [[cell.strip() for cell in line.split("|")] for line in ALLREDUCE.strip().splitlines()]


def test_rows_of_older_files_have_no_processor_time() -> None:
    older = [{name: value for name, value in one.items() if not name.startswith("processor")} for one in ROWS]
    assert printed(table.allreduce_table({"benchmark": "title", "rows": older})).count("/call") == 0


def test_a_wrong_training_is_a_row_and_a_line() -> None:
    rows = [{"run": 0, **one} for one in training_rows(2, 2)]
    rows[1] |= {"correct": False, "wrong": ["rank 1: bad"]}
    assert printed(table.training_table({"benchmark": "title", "rows": rows})).count(" WRONG") == 1
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
