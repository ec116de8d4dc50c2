"""The benchmark of top-k without its processes: what it refuses, how samples are compared, shown and drawn."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import hvd_ext.bench
from hvd_ext.bench import plots, results, topk
from hvd_ext.bench.results import machine
from hvd_ext.bench.table import topk_faults, topk_tables
from hvd_ext.bench.topk import FOR_HARD, NAMES, ONE_THREAD, Request, beside_ours, measure, summary
from hvd_ext.bench.topk_worker import Task
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import JobError


def row(contestant: str, samples: list[float], yardsticks: list[float], **more: Any) -> dict[str, Any]:
    raw = {
        "contestant": contestant,
        "beside": "add" if contestant in ("feedback", "separate") else "pass",
        "input": "gauss",
        "elements": 25_000_000,
        "density": 0.001,
        "k": 25_000,
        "threads": 1,
        "returned": 25_000,
        "recall": 1.0,
        "correct": True,
        "wrong": "",
        "rounds": list(range(len(samples))),
        "samples": samples,
        "yardstick_samples": yardsticks,
        "cpu_samples": [2 * one for one in samples],
        "cpu_yardstick_samples": yardsticks,
        **more,
    }
    return {"run": 0, **raw, **summary(raw)}


def rows_of(**more: Any) -> list[dict[str, Any]]:
    """Ours at 1.1 passes, error feedback at 1.2 additions; Algorithm 1 takes 45 times and NumPy 20 times as long."""
    passes = [0.25, 0.5, 0.25]
    times = {"exact": 1.1, "feedback": 1.2, "algorithm1": 49.5, "numpy": 22.0}
    return beside_ours([row(name, [x * one for one in passes], passes, **more) for name, x in times.items()])


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    run = {"date": "now", "machine": machine(), "versions": {"numpy": "2"}, "notes": ["a note"]}
    return results.result_of(run, rows, results.TOPK)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": ("cauchy",)}, r"input \('cauchy'\).*gauss.*sparse"),
        ({"contestants": ("faiss",)}, r"contestant \('faiss'\).*exact.*numpy"),
        ({"contestants": ("tf", "tf")}, "contestants.*once"),
        ({"densities": ()}, "densities: name at least one"),
        ({"densities": (0.0,)}, r"density \(0\)"),
        ({"densities": (1.5,)}, r"density \(1.5\)"),
        ({"elements": (0,)}, r"elements \(0\)"),
        ({"elements": (2**31,)}, r"elements \(2147483648\)"),
        ({"threads": (2, 0)}, r"threads \(0\)"),
        ({"repetitions": 0}, r"repetitions \(0\)"),
        ({"seconds_per_row": 0.0}, r"seconds per row \(0\)"),
        ({"timeout_s": -1.0}, r"timeout \(-1\)"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Request(**changes)


def test_hard_inputs_and_several_threads_have_fewer_contestants(tmp_path: Path) -> None:
    request = Request(inputs=("gauss", "nan"), threads=(1, 2), densities=(0.01,))
    one, two = request.task(tmp_path, 1), request.task(tmp_path, 2)
    assert set(one.contestants["gauss"]) == set(NAMES)
    assert set(one.contestants["nan"]) == set(FOR_HARD)
    assert set(two.contestants["gauss"]) == set(NAMES) - set(ONE_THREAD)
    assert request.groups() == 4
    assert Task.read(one.write()) == one


def test_a_ratio_is_the_median_of_pairs_and_not_that_of_medians() -> None:
    cpu = {"cpu_samples": [2.0, 2.0, 4.0], "cpu_yardstick_samples": [1.0, 2.0, 1.0]}
    found = summary({"samples": [2.0, 9.0, 40.0], "yardstick_samples": [1.0, 3.0, 2.0], "elements": 4, **cpu})
    assert found["x_yardstick"] == 3.0  # of 2, 3 and 20; the medians' ratio is 4.5
    assert found["x_yardstick_cpu"] == 2.0
    assert found["x_yardstick_min"] == 2.0
    assert (found["seconds_median"], found["seconds_min"]) == (9.0, 2.0)
    assert (found["yardstick_seconds_median"], found["yardstick_seconds_min"]) == (2.0, 1.0)
    assert found["ns_per_element"] == pytest.approx(2.25e9)


def test_ours_is_compared_in_the_rounds_that_both_were_called_in() -> None:
    exact = row("exact", [1.0, 2.0, 4.0], [1.0] * 3)
    slow = row("torch", [10.0, 80.0], [1.0] * 2, rounds=[0, 2])
    other = row("torch", [10.0], [1.0], input="laplace")
    assert [one["x_ours"] for one in beside_ours([exact, slow, other])] == [1.0, 15.0, None]


def test_a_file_is_read_again_and_another_run_is_put_behind(tmp_path: Path) -> None:
    one = result_of(rows_of())
    results.save(tmp_path / "a.json", one)
    assert results.load(tmp_path / "a.json", results.TOPK) == json.loads(json.dumps(one))
    both = results.joined(one, one)
    assert {(len(both["runs"]), found["run"]) for found in both["rows"]} == {(2, 0), (2, 1)}
    with pytest.raises(InvalidError, match="must be a result of bench allreduce"):
        results.load(tmp_path / "a.json")


def test_the_tables_show_ratios_and_what_is_wrong() -> None:
    rows = rows_of()
    rows[0].update(correct=False, wrong="index 7 is 8 instead of 7")
    console = Console(file=io.StringIO(), width=200)
    for table in topk_tables(result_of(rows)):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("25,000,000 elements, k = 0.001 d, 1 thread", "WRONG", "+ 1.20", "45.00"):
        assert words in text
    assert topk_faults(rows) == [
        "wrong answer: hvd_ext.mstopk, gauss, 25,000,000 elements, k = 0.001 d, 1 thread: index 7 is 8 instead of 7"
    ]


def test_the_plot_has_a_bar_for_each_row_beside_the_pass(tmp_path: Path, seen: list[Any]) -> None:
    def axes_of(*arguments: Any) -> list[Any]:
        plots.draw_topk(arguments[0], tmp_path / "x.png", *arguments[1:])
        return seen[-1].axes

    (axis,) = axes_of([*rows_of(), *rows_of(input="laplace"), *rows_of(input="nan")])
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
    assert heights["hvd_ext.mstopk"] == pytest.approx([1.1, 1.1])
    assert "hvd_ext.topk_error_feedback" not in heights  # it stands beside another yardstick
    assert axis.get_yscale() == "log"
    sizes = [one for elements in (1, 2, 3) for one in rows_of(elements=elements)]
    assert [len(drawn.get_title()) > 0 for drawn in axes_of(sizes)] == [True] * 3
    (axis,) = axes_of(sizes, "sizes")
    lines = {line.get_label(): list(line.get_xdata()) for line in axis.get_lines()}
    assert lines["hvd_ext.mstopk"] == lines["one prefetched read pass"] == [1, 2, 3]
    assert axis.get_title() == "k = 0.001 d, 1 thread, gauss"
    with pytest.raises(InvalidError, match=r"kind \('lines'\): must be one of bars, sizes"):
        axes_of(sizes, "lines")
    results.save(tmp_path / "a.json", result_of(rows_of()))
    arguments = ["plot-topk", str(tmp_path / "a.json"), "--output", str(tmp_path / "x.png")]
    assert CliRunner().invoke(hvd_ext.bench.app, arguments).exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidError, match="nothing to draw"):
        axes_of(rows_of(input="nan"))


WORKER = """
import json, sys
task = json.loads(sys.argv[1])
print("the last words")
with open(task["folder"] + "/events", "a") as file:
    say = lambda **event: print(json.dumps(event), file=file)
    say(kind="hello", gpus={gpus!r}, torch=False, cores=[0])
    for name in task["inputs"]:
        row = {{"contestant": "exact", "input": name, "elements": 8, "density": 0.5, "k": 4, "threads": task["threads"],
               "beside": "pass", "returned": 4, "recall": 1, "correct": {correct}, "wrong": "", "rounds": [0],
               "samples": [2.0], "yardstick_samples": [1.0], "cpu_samples": [2.0], "cpu_yardstick_samples": [1.0]}}
        say(kind="row", row=row)
sys.exit({status})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(status: int = 0, correct: bool = True, gpus: tuple[str, ...] = ()) -> None:
        (tmp_path / "worker.py").write_text(WORKER.format(status=status, correct=correct, gpus=list(gpus)))
        monkeypatch.setattr(topk, "WORKER", (sys.executable, str(tmp_path / "worker.py")))

    return pretend


def test_every_number_of_threads_has_a_process_and_notes_are_said_once(worker: Any) -> None:
    worker()
    told: list[tuple[str, int]] = []
    request = Request(inputs=("gauss", "nan"), densities=(0.5,), threads=(1, 2))
    rows, notes = measure(request, lambda *what: told.append(what))
    assert [(one["threads"], one["input"], one["x_yardstick"], one["x_ours"]) for one in rows] == [
        (threads, name, 2.0, 1.0) for threads in (1, 2) for name in ("gauss", "nan")
    ]
    assert sum(ready for _, ready in told) == request.groups()
    assert notes == [topk.NO_TORCH, topk.NO_GPU]


def test_a_process_that_fails_is_told_with_its_last_words(worker: Any) -> None:
    worker(status=3)
    with pytest.raises(JobError, match=r"(?s)status 3.*the last words"):
        measure(Request())


@pytest.mark.parametrize(("correct", "status"), [(True, 0), (False, 1)])
def test_the_command_writes_its_file_and_fails_where_an_answer_is_wrong(
    worker: Any, tmp_path: Path, correct: bool, status: int
) -> None:
    worker(correct=correct, gpus=("/GPU:0",))
    file = tmp_path / "a.json"
    arguments = ["topk", "--inputs", "gauss,nan", "--densities", "0.5", "--elements", "8", "--json", str(file)]
    done = CliRunner().invoke(hvd_ext.bench.app, arguments)
    assert done.exit_code == status, done.output
    assert ("wrong answer" in done.output) is not correct
    assert "the kernels of /GPU:0 are measured by" in done.output
    written = results.load(file, results.TOPK)
    assert set(written) == {"benchmark", "runs", "rows"}
    assert {"date", "command", "machine", "versions", "environment", "notes", "evict_bytes"} <= set(written["runs"][0])
    assert len(written["rows"]) == 2


def test_the_command_refuses_densities_that_are_no_numbers() -> None:
    done = CliRunner().invoke(hvd_ext.bench.app, ["topk", "--densities", "few"])
    assert done.exit_code != 0
    assert "must be numbers" in done.output
