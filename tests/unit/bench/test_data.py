"""The benchmark of data without processes: what it refuses, how rows are joined, judged, shown and drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.studies.page import data_markdown
from hvd_ext.bench import data, data_goals, results
from hvd_ext.bench.cli import app
from hvd_ext.bench.data import CONTESTANTS, NAMES, PACKAGES, PARTS, Request, rows_of
from hvd_ext.bench.data_goals import CPU, FIRST_BATCH, FIRST_WAIT, GOALS, LATER_WAIT, MEMORY, TRAINING, UNITS, judged
from hvd_ext.bench.data_plot import COLOURS, draw_data
from hvd_ext.bench.data_ranks import NOTHING, beside_nothing
from hvd_ext.bench.data_table import data_faults, data_table, figure, missed
from hvd_ext.bench.data_worker import MODULES, Task
from hvd_ext.errors import InvalidError
from tests.unit.drawing import assert_colours_differ

# CPU seconds of a sample, by place and contestant.
HITS = {
    "27.6 kB": {"memcpy": 4e-6, "datacache": 6e-6, "cache": 8e-6, "decode": 1e-3},
    "3.1 kB": {"memcpy": 0.5e-6, "datacache": 3e-6, "cache": 5e-6, "decode": 2e-4},
}


def event(part_place: str, contestant: str, quantity: str, samples: list[float], **facts: Any) -> dict[str, Any]:
    return {"place": part_place, "contestant": contestant, "quantity": quantity, "samples": samples, "facts": facts}


def rows(wrong: str = "") -> list[dict[str, Any]]:
    events = [
        event(place, name, CPU, [0.9 * cpu_s, cpu_s, 1.3 * cpu_s], wrong="sample 3 is gone" if name == wrong else "")
        for place, found in HITS.items()
        for name, cpu_s in found.items()
    ]
    return [{**row, "correct": not row["wrong"]} for row in judged(rows_of("hits", events))]


def of(found: list[dict[str, Any]], place: str, contestant: str) -> dict[str, Any]:
    (row,) = (row for row in found if (row["place"], row["contestant"]) == (place, contestant))
    return row


@pytest.mark.parametrize(
    "given",
    [
        {"parts": ("disk",)},
        {"parts": ("hits", "hits")},
        {"parts": ()},
        {"contestants": ("torch",)},
        {"repetitions": 0},
        {"scale": 0.0},
        {"scale": 1.5},
        {"timeout_s": 0.0},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_measured_is_refused_with_the_rule(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=r"must (be|name)"):
        Request(**given)


def test_every_part_has_a_module_contestants_and_names() -> None:
    assert set(PARTS) == set(MODULES) == set(CONTESTANTS)
    assert {name for names in CONTESTANTS.values() for name in names} == set(NAMES)
    assert {goal.part for goal in GOALS} == set(PARTS)
    assert {goal.quantity for goal in GOALS} <= set(UNITS)


def test_what_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PACKAGES", {"grain": ("no_such_package", "Grain is left out"), **PACKAGES})
    monkeypatch.setitem(data.PACKAGES, "grain", ("no_such_package", "Grain is left out"))
    request = Request(parts=("hits",), contestants=("memcpy", "grain"))
    assert request.of("hits") == ("memcpy",)
    assert request.notes() == ["Grain is left out"]
    assert Request(parts=("half",)).notes() == []
    assert len(Request(parts=("half",), scale=0.5).notes()) == 1


def test_a_task_arrives_as_it_was_sent() -> None:
    task = Task("hits", "folder", 0.25, 3, ("memcpy", "cache"), {"side": 32})
    assert Task.read(task.write()) == task
    assert (task.count(1000, 10), task.count(10, 10)) == (250, 20)


def test_samples_of_several_processes_are_one_row_and_the_first_fault_stays() -> None:
    told = [
        event("photographs", "decode", FIRST_BATCH, [0.5], count=10),
        event("photographs", "decode", FIRST_BATCH, [0.7], count=10, wrong="9 samples"),
        event("photographs", "decode", FIRST_BATCH, [0.6], count=10, wrong=""),
        event("photographs", "cache", FIRST_BATCH, []),
    ]
    (row,) = rows_of("second", told)
    assert row["samples"] == [0.5, 0.7, 0.6]
    assert (row["wrong"], row["unit"], row["count"]) == ("9 samples", "s", 10)


def test_goals_are_medians_of_the_ratios_of_turns() -> None:
    found = rows()
    memcpy, cache = of(found, "27.6 kB", "datacache")["goals"]
    assert (memcpy["over"], memcpy["most"], memcpy["met"]) == ("memcpy", 1.8, True)
    assert memcpy["measured"] == pytest.approx(1.5) and cache["measured"] == pytest.approx(0.75)
    (small,) = of(found, "3.1 kB", "datacache")["goals"]
    assert (small["measured"], small["met"]) == (pytest.approx(0.6), False)
    assert all(not row["goals"] for row in found if row["contestant"] != "datacache")
    assert [line for line in missed(found) if "3.1 kB" in line and "at most 0.5: MISSED" in line] == missed(found)


def test_a_goal_over_what_was_not_measured_is_left_out() -> None:
    (row,) = judged(rows_of("hits", [event("27.6 kB", "datacache", CPU, [1e-5])]))
    assert row["goals"] == []


def test_memory_counts_beside_the_job_without_data() -> None:
    facts = {"data_bytes": 100_000_000, "ranks": 4}
    told = [
        event("summed PSS", NOTHING, MEMORY, [1.00e9, 1.01e9, 1.02e9], **facts),
        event("summed PSS", "datacache", MEMORY, [1.20e9, 1.21e9, 1.19e9], **facts),
        event("summed PSS", "cache", MEMORY, [1.5e9] * 3, **facts),
    ]
    found = {row["contestant"]: row for row in judged(beside_nothing(rows_of("ranks", told)))}
    assert set(found) == {"datacache", "cache"}
    assert found["datacache"]["median"] == pytest.approx(0.19e9)
    (goal,) = found["datacache"]["goals"]
    assert (goal["most"], goal["met"]) == (pytest.approx(190e6), True)
    (goal,) = judged([{**found["cache"], "contestant": "datacache"}])[0]["goals"]
    assert goal["met"] is False


def test_waiting_is_compared_with_our_first_epoch_and_training_with_reading_every_time() -> None:
    told = [
        event("2 hosts", "datacache", FIRST_WAIT, [0.08, 0.09, 0.1]),
        event("2 hosts", "datacache", LATER_WAIT, [0.008, 0.0045, 0.02]),
        event("2 hosts", "datacache", TRAINING, [4.0, 4.0, 4.0]),
        event("2 hosts", "decode", TRAINING, [9.0, 7.0, 10.0]),
    ]
    found = {row["quantity"]: row for row in judged(rows_of("slow", told)) if row["contestant"] == "datacache"}
    (wait,) = found[LATER_WAIT]["goals"]
    assert (wait["over"], wait["measured"], wait["met"]) == (FIRST_WAIT, pytest.approx(0.1), True)
    (speed,) = found[TRAINING]["goals"]
    assert (speed["least"], speed["measured"], speed["met"]) == (2.0, 2.25, True)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(0.0000075, "s", "7.5 us"), (-0.002, "s", "-2 ms"), (2e7, "bytes", "20 MB"), (12, "bytes", "12 B")]
    + [(0.5004, "share", "0.5004"), (1024, "samples", "1,024")],
)
def test_figures_have_their_units(value: float, unit: str, words: str) -> None:
    assert figure(value, unit) == words


def test_the_tables_name_every_row_once_and_a_wrong_one_aloud() -> None:
    found = rows(wrong="cache")
    run = {"date": "", "versions": {}, "machine": dict.fromkeys(("processor", "cores", "memory_gib", "system"), 1)}
    run["machine"]["load_before"] = 0.0
    result = results.result_of(run | {"notes": ["Grain is left out"]}, found, results.DATA)
    console = Console(width=260, record=True, file=io.StringIO())
    console.print(data_table(result))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert sum("DataCache" in line for line in lines) == 2
    assert sum("cache() WRONG" in line for line in lines) == 2
    faults = data_faults(found)
    assert faults[0] == "wrong samples: cache(), samples that were read before, 27.6 kB: sample 3 is gone"
    written = data_markdown(result)
    assert written.count("| DataCache |") == 2 and f"- {faults[0]}" in written and "- Grain is left out" in written


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
    from hvd_ext.bench import data_plot

    figures: list[Any] = []
    finish = data_plot.finish
    monkeypatch.setattr(data_plot, "finish", lambda figure, *rest: (figures.append(figure), finish(figure, *rest)))
    return figures


def test_a_plot_has_bars_over_a_copy_of_the_bytes(tmp_path: Path, seen: list[Any]) -> None:
    draw_data(rows(), tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert_colours_differ({"contestants": list(COLOURS.values())})
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["27.6 kB", "3.1 kB"]
    _, labels = axis.get_legend_handles_labels()
    assert set(labels) == {"DataCache", "cache()", "decode from disk", "memcpy"}
    heights = sorted(bar.get_height() for bar in axis.patches)
    assert heights == pytest.approx([1.5, 2, 6, 10, 250, 400])
    with pytest.raises(InvalidError, match="nothing to draw"):
        draw_data([row for row in rows() if row["contestant"] != "memcpy"], tmp_path / "y.png")


def test_several_files_become_one_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
    for name in ("a.json", "b.json"):
        results.save(tmp_path / name, results.result_of({}, rows(), results.DATA))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    done = CliRunner().invoke(app, ["plot-data", *files, "--output", str(tmp_path / "x.png"), "--only", "cache"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_command_refuses_what_it_cannot_measure() -> None:
    done = CliRunner().invoke(app, ["data", "--parts", "hits,disks"])
    assert done.exit_code == 1 and "must be one of hits" in done.output
    done = CliRunner().invoke(app, ["data", "--append"])
    assert done.exit_code == 2


@pytest.mark.slow
def test_the_command_measures_a_part_in_a_process_and_keeps_every_sample(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    words = ["data", "--parts", "half", "--scale", "1/32", "--repetitions", "2", "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    kept = results.load(file, results.DATA)
    (row,) = kept["rows"]
    assert (row["part"], row["contestant"], row["quantity"]) == ("half", "datacache", data_goals.HITS)
    assert len(row["samples"]) == 2 and all(0.3 < one < 0.6 for one in row["samples"])
    assert row["correct"] and len(row["goals"]) == 1
    assert "scale 0.03125" in kept["runs"][0]["notes"][0]
