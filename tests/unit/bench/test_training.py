"""The training benchmark without jobs: what it refuses, how rows are compared, shown and drawn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvd_ext.bench import plots, results
from hvd_ext.bench.cli import app
from hvd_ext.bench.jobs import Launcher
from hvd_ext.bench.table import training_faults, training_table, trials
from hvd_ext.bench.training import HOROVODS, Request, against, check_alike, measure
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import JobError


def row(algorithm: str, step_s: float = 1.0, hosts: tuple[int, ...] = (2, 2), **more: Any) -> dict[str, Any]:
    alone = algorithm == "compute"
    return {
        "algorithm": algorithm,
        "chosen": "",
        "model": "mlp",
        "batch": 64,
        "ranks": sum(hosts),
        "hosts": len(hosts),
        "ranks_per_host": list(hosts),
        "bytes": 17_100_840,
        "samples_per_second": sum(hosts) * 64 / step_s,
        "step_seconds_median": step_s,
        "step_seconds_min": step_s,
        "compute_seconds": 0.25,
        "exposed_communication_seconds": None if alone else step_s - 0.25,
        "bound_seconds": None if alone else 0.5,
        "correct": None if alone else True,
        "samples": [step_s],
        **more,
    }


def rows_of(*hosts: int) -> list[dict[str, Any]]:
    times = {"compute": 0.25, "auto": 1.0, "ring": 1.5, "horovod": 2.0, "horovod-links2": 1.8}
    return against([row(name, step_s, hosts) for name, step_s in times.items()])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithms": ("rings",)}, "'rings'.*auto.*ring.*horovod, horovod-links2"),
        ({"algorithms": ("compute",)}, "'compute'"),
        ({"algorithms": ("ring", "ring")}, "'ring'.*once"),
        ({"algorithms": ()}, "at least one"),
        ({"model": "resnet"}, "'resnet'.*mlp, cnn"),
        ({"width": -1}, r"width \(-1\)"),
        ({"batch": 0}, r"batch \(0\)"),
        ({"ranks": (2, 0)}, r"ranks \(0\)"),
        ({"repetitions": 0}, r"repetitions \(0\)"),
        ({"steps": 4}, r"steps \(4\): must be at least 5, one for each repetition"),
        ({"timeout_s": 0.0}, r"timeout \(0\)"),
        ({"warmup": -1}, r"warmup \(-1\)"),
        ({"buckets": ("wfbp", "wfbp")}, "'wfbp'.*once"),
        ({"buckets": ("wfbp",), "options": {"buckets": "auto"}}, "say --buckets"),
        ({"options": {"algorithm": "ring"}}, "say --algorithms"),
        ({"options": {"compression": "fp8"}}, "compression"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Request(**changes)


@pytest.mark.parametrize(("steps", "repetitions"), [(10, 5), (10, 3), (3, 3), (7, 1)])
def test_all_turns_together_have_the_steps_and_none_is_empty(steps: int, repetitions: int) -> None:
    request = Request(steps=steps, repetitions=repetitions)
    turns = [request.steps_of(repetition) for repetition in range(repetitions)]
    assert sum(turns) == steps
    assert max(turns) - min(turns) <= 1 <= min(turns)


def test_horovod_alone_needs_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ext.bench.training.has_horovod", lambda: False)
    with pytest.raises(InvalidError, match="Horovod is not installed"):
        measure(Request(algorithms=tuple(HOROVODS)), Launcher(), lambda *_: None)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ext.bench.training.importlib.util.find_spec", lambda name: name == "sklearn" or None)
    with pytest.raises(InvalidError, match="tf_keras is not installed"):
        measure(Request(algorithms=("multiworker",)), Launcher(), lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bytes": 4}, "bytes: 4"),
        ({"start": "b"}, "start: b"),
        ({"first_losses": [2.0, 2.1]}, "rank 1 is 2.1, ours has 2.5"),
    ],
)
def test_jobs_that_train_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    opened = {"bytes": 8, "start": "a", "first_losses": [2.0, 2.5]}
    check_alike(["ours", "theirs"], [opened, dict(opened)])
    with pytest.raises(JobError, match=words):
        check_alike(["ours", "theirs"], [opened, {**opened, **changes}])


def test_speeds_are_compared_with_both_horovods() -> None:
    found = {one["algorithm"]: one for one in rows_of(2, 2)}
    assert (found["auto"]["against_horovod"], found["auto"]["against_horovod_links2"]) == (2.0, pytest.approx(1.8))
    assert found["horovod"]["against_horovod"] == 1.0
    assert found["compute"]["against_horovod"] is None
    (alone,) = against([row("ring")])
    assert (alone["against_horovod"], alone["against_horovod_links2"]) == (None, None)


def test_the_table_names_every_row_once_and_a_wrong_one_aloud() -> None:
    wrong = {**row("ring"), "correct": False, "wrong": ["rank 1: its weights differ"]}
    horovod = row("horovod", chosen="grouped", trial_seconds={"separate": 0.3, "grouped": 0.2})
    rows = against([row("compute", 0.25), row("auto", chosen="blueconnect"), wrong, horovod])
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(training_table(results.result_of({}, rows, results.TRAINING)))
    text = console.export_text()
    named = ["mlp, 17.1 MB", "2 + 2", "no communication", "auto -> blueconnect", "ring WRONG", "Horovod (grouped)"]
    for words in named:
        assert sum(words in line for line in text.splitlines() if line.startswith("│")) == 1
    assert training_faults(rows) == ["wrong training: ring, mlp, 2 + 2 ranks: rank 1: its weights differ"]
    (line,) = trials(rows)
    assert line == "Horovod, 2 + 2 ranks: grouped calls (separate calls 300 ms a step, grouped calls 200 ms a step)"


def test_files_of_other_benchmarks_are_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    kept = results.result_of({"date": "today"}, rows_of(2, 2), results.TRAINING)
    results.save(mine, kept)
    assert results.load(mine, results.TRAINING) == kept
    results.save(other, results.result_of({}, []))
    for path, words in ((other, "something else"), (tmp_path / "none.json", "cannot be read")):
        with pytest.raises(InvalidError, match=words):
            results.load(path, results.TRAINING)


def test_bars_are_the_time_of_an_epoch_by_cluster_and_the_later_row_counts(tmp_path: Path, seen: list[Any]) -> None:
    rows = [*rows_of(3, 2), *rows_of(2, 2), *rows_of(2, 2, 2), row("auto", 0.5)]
    plots.draw_training(rows, tmp_path / "x.png")
    (axis,) = seen[0].axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2 + 2", "3 + 2", "2 + 2 + 2"]
    _, labels = axis.get_legend_handles_labels()
    assert labels == ["ring", "auto", "Horovod", "Horovod, 2 TCP links", "computation of it"]
    bars = dict(zip(labels, [group for group in axis.containers if group.get_label() in labels], strict=True))
    heights = [bar.get_height() for bar in sorted(bars["auto"], key=lambda bar: bar.get_x())]
    assert heights == pytest.approx([1797 / (4 * 64) * 0.5, 1797 / (5 * 64), 1797 / (6 * 64)])
    computation = [bar.get_height() for bar in bars["computation of it"]]
    assert max(computation) == pytest.approx(1797 / (4 * 64) * 0.25)
    with pytest.raises(InvalidError, match="nothing to draw"):
        plots.draw_training([row("compute")], tmp_path / "y.png")


def test_several_files_become_one_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
    for name, hosts in (("a.json", (2, 2)), ("b.json", (3, 2))):
        (tmp_path / name).write_text(json.dumps(results.result_of({}, rows_of(*hosts), results.TRAINING)))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    done = CliRunner().invoke(app, ["plot-training", *files, "--output", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_rank_that_is_not_the_first_ends_at_once_and_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    done = CliRunner().invoke(app, ["training", "--algorithms", "no such thing"])
    assert (done.exit_code, done.output) == (0, "")
