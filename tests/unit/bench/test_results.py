"""What the benchmark makes of its samples: ratios, table, words about where we are slower, and the file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd_ext.bench import results
from hvd_ext.bench.results import joined, places, ratios, result_of
from hvd_ext.bench.table import ALLREDUCE_HEADINGS, allreduce_table, faults, losses, processor, seconds
from hvd_ext.errors import InvalidError


def row(algorithm: str, how: str, median: float, **more: Any) -> dict[str, Any]:
    values = {
        "run": 0,
        "algorithm": algorithm,
        "how": how,
        "chosen": "",
        "ranks": 4,
        "hosts": 2,
        "ranks_per_host": [2, 2],
        "bytes": 4096,
        "seconds_median": median,
        "seconds_min": median / 2,
        "samples": [median / 2, median, 2 * median],
        "bound_seconds": None,
        "bottleneck_bytes": None,
        "predicted_seconds": None,
        "processor_seconds_per_call": 4 * median,
        "processor_seconds_per_gb": 4 * median / 4096 * 1e9,
        "correct": True,
    }
    return {**values, **more}


ROWS = [
    row("noop", "graph", 1e-6),
    row("ring", "graph", 6e-4),
    row("auto", "graph", 4e-4, chosen="torus2d", bound_seconds=2e-4, predicted_seconds=3e-4),
    row("auto", "engine", 3e-4, chosen="torus2d"),
    row("auto", "eager", 5e-4, chosen="torus2d"),
    row("mpi", "engine", 2e-4, bound_seconds=1e-4),
    row("horovod", "graph", 8e-4, bound_seconds=2e-4),
    row("horovod", "eager", 2.5e-4),
]
FACTS = {
    "machine": {"processor": "p", "cores": 2, "memory_gib": 4, "system": "s", "load_before": 0.1},
    "versions": {"x": "1"},
    "date": "d",
}


def test_ratios_compare_like_with_like() -> None:
    found = {(one["algorithm"], one["how"]): ratios(one, ROWS) for one in ROWS}
    assert found["auto", "graph"] == {
        **{"bound": pytest.approx(2.0), "predicted": pytest.approx(0.75), "yardstick": None},
        **{"mpi": pytest.approx(2.0), "horovod": pytest.approx(0.5), "saving": pytest.approx(1 / 3)},
    }
    # Horovod has no call without TensorFlow, and the ring was measured in a graph only
    assert found["auto", "engine"] == {
        "bound": None,
        "predicted": None,
        "yardstick": None,
        "mpi": pytest.approx(1.5),
        "horovod": None,
        "saving": None,
    }
    assert found["auto", "eager"]["horovod"] == pytest.approx(2.0)
    assert found["ring", "graph"]["saving"] is None
    assert found["horovod", "graph"] == {
        "bound": pytest.approx(4.0),
        "predicted": None,
        "yardstick": None,
        "mpi": pytest.approx(4.0),
        "horovod": None,
        "saving": None,
    }
    assert found["mpi", "engine"]["mpi"] is found["noop", "graph"]["mpi"] is None


@pytest.mark.parametrize("yardstick", results.YARDSTICKS)
def test_every_row_that_sums_is_compared_with_the_yardstick_and_the_yardstick_with_nobody(yardstick: str) -> None:
    rows = [*ROWS, row(yardstick, "engine", 1e-4, bound_seconds=5e-5)]
    found = {(one["algorithm"], one["how"]): ratios(one, rows) for one in rows}
    assert {key: one["yardstick"] for key, one in found.items()} == pytest.approx(
        {
            **{("noop", "graph"): None, (yardstick, "engine"): None, ("ring", "graph"): 6.0, ("auto", "graph"): 4.0},
            **{("auto", "engine"): 3.0, ("auto", "eager"): 5.0, ("mpi", "engine"): 2.0},
            **{("horovod", "graph"): 8.0, ("horovod", "eager"): 2.5},
        }
    )
    assert found[yardstick, "engine"] == {
        **{"bound": pytest.approx(2.0), "predicted": None, "yardstick": None},
        **{"mpi": None, "horovod": None, "saving": None},
    }
    assert losses(rows) == losses(ROWS)


def test_rows_of_other_sizes_clusters_and_runs_are_never_compared() -> None:
    mine = row("ring", "graph", 1e-3)
    others = [
        row("mpi", "engine", 1e-3, bytes=4),
        row("mpi", "engine", 1e-3, ranks_per_host=[3, 1]),
        row("mpi", "engine", 1e-3, run=1),
    ]
    groups = places([*others, mine])
    assert len(groups) == 4
    assert [ratios(mine, group)["mpi"] for group in groups.values() if mine in group] == [None]


def drawn(rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(allreduce_table({"benchmark": "title", "rows": rows}))
    return stream.getvalue()


def test_the_table_has_a_row_per_contestant_and_says_what_auto_has_chosen() -> None:
    text = drawn(ROWS)
    assert allreduce_table({"benchmark": "title", "rows": ROWS}).row_count == len(ROWS)
    for words in (
        "auto graph -> torus2d",
        "MPI_Allreduce",
        "Horovod eager",
        "no-op",
        "2 + 2",
        "400 us",
        "0.50",
        "33.3%",
    ):
        assert words in text


@pytest.mark.parametrize("yardstick", results.YARDSTICKS)
def test_the_table_shows_the_yardstick_and_what_each_row_takes_of_it(yardstick: str) -> None:
    rows = [row("auto", "engine", 3e-4, bytes=10**6), row(yardstick, "engine", 1.25e-4, bytes=10**6)]
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in drawn(rows).splitlines() if "│" in line]
    assert [line[2] for line in lines] == ["auto engine", yardstick]
    place = ALLREDUCE_HEADINGS.index("x yardstick")
    assert [line[place] for line in lines] == ["2.40", ""]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"bytes": 4096, "processor_seconds_per_call": 1.5e-5, "processor_seconds_per_gb": 3662.0}, "15 us/call"),
        ({"bytes": 65_536, "processor_seconds_per_call": 1e-4, "processor_seconds_per_gb": 1.526}, "1.53 s/GB"),
        ({"bytes": 10**9, "processor_seconds_per_call": 0.5, "processor_seconds_per_gb": 0.5}, "0.5 s/GB"),
        ({"processor_seconds_per_gb": None}, ""),
    ],
)
def test_processor_time_is_told_per_byte_where_bytes_take_it_and_else_per_call(more: dict[str, Any], text: str) -> None:
    one = row("ring", "graph", 1e-3, **more)
    assert processor(one) == text
    assert text in drawn([one])


def test_rows_of_older_files_have_no_processor_time() -> None:
    older = {name: value for name, value in row("ring", "graph", 1e-3).items() if not name.startswith("processor")}
    assert processor(older) == ""
    assert "ring graph" in drawn([older])


def test_a_wrong_result_is_shown_and_told_with_its_place() -> None:
    wrong = row("ring", "graph", 1e-3, correct=False, wrong=["rank 1: element 7 is 3, must be 4"])
    assert "ring graph WRONG" in drawn([wrong])
    assert faults([*ROWS, wrong]) == [
        "wrong result: ring graph, 2 + 2 ranks, 4,096 bytes: rank 1: element 7 is 3, must be 4"
    ]
    assert faults(ROWS) == faults([row("ring", "graph", 1e-3, correct=None)]) == []


def test_losses_are_counted_and_the_worst_is_told_with_its_place() -> None:
    more = [row("two_level", "engine", 6e-4), row("flexreduce", "engine", 1e-4)]
    assert losses(ROWS + more) == [
        "slower than MPI_Allreduce in 2 of 3 rows, at worst x3.00 (two_level engine, 2 + 2 ranks, 4,096 bytes)",
        "slower than Horovod in 1 of 3 rows, at worst x2.00 (auto eager -> torus2d, 2 + 2 ranks, 4,096 bytes)",
    ]
    graphs = [one for one in ROWS if one["how"] == "graph" or one["algorithm"] == "mpi"]
    assert losses(graphs)[0].startswith("slower than MPI_Allreduce in 2 of 2 rows")


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (1e-3, "1 ms")])
def test_times_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_run_is_described_with_what_changes_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "bench", "allreduce", "--bytes", "4"])
    run = results.begin_run("a launcher", {"HOROVOD_CYCLE_TIME": "0", "HVD_EXT_LAUNCHER": "x", "PATH": "y"})
    assert run["command"] == "python -m hvd_ext bench allreduce --bytes 4"
    assert run["environment"] == {"HOROVOD_CYCLE_TIME": "0"}
    assert run["launcher"] == "a launcher"
    assert run["machine"]["cores"] >= 1 and run["versions"]["hvd_ext"]


def test_what_a_launcher_tells_its_ranks_is_not_kept_with_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "x")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    kept = results.begin_run("a launcher")["environment"]
    assert kept["HOROVOD_CYCLE_TIME"] == "2"
    assert "OMPI_MCA_orte_hnp_uri" not in kept


def test_results_are_put_behind_each_other_and_rows_know_their_run(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    one, two = result_of({"command": "a"}, [row("ring", "graph", 1.0)]), result_of({"command": "b"}, ROWS)
    results.save(path, joined(joined(one, two), two))
    kept = results.load(path)
    assert [run["command"] for run in kept["runs"]] == ["a", "b", "b"]
    assert [one["run"] for one in kept["rows"]] == [0] + [1] * len(ROWS) + [2] * len(ROWS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "something else"}', "{"])
def test_a_file_that_is_no_result_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InvalidError, match=r"file \(.*file\.json\): it must be a result of bench allreduce"):
        results.load(path)
    with pytest.raises(InvalidError, match="cannot be read"):
        results.load(tmp_path / "none")


def test_results_are_plain_json() -> None:
    assert json.loads(json.dumps(result_of(FACTS, ROWS)))["rows"][0]["algorithm"] == "noop"


def test_a_file_has_a_row_a_line_and_reads_back_as_it_was(tmp_path: Path) -> None:
    whole = {**result_of(FACTS, ROWS), "none": [], "study": {"a": [1, 2]}}
    results.save(tmp_path / "a.json", whole)
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert json.loads("\n".join(lines)) == json.loads(json.dumps(whole))
    assert sum(line.startswith('  {"run": 0,') for line in lines) == len(ROWS)
    assert len(lines) == len(ROWS) + len(whole["runs"]) + 9
