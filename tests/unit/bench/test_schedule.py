"""The schedule benchmark without jobs: what it refuses, how rows are compared, shown and drawn, how a step sleeps."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvd_ext.bench import results
from hvd_ext.bench.cli import app
from hvd_ext.bench.schedule import Request, beside, model_of
from hvd_ext.bench.schedule_plot import draw_schedule
from hvd_ext.bench.schedule_worker import DELAYED_STEPS, Replay, sleep_precisely, sleep_until
from hvd_ext.bench.table import schedule_faults, schedule_table
from hvd_ext.commands.figures import BUCKETERS
from hvd_ext.errors import InvalidError
from hvd_ext.planning.step_times import StepTimes, write
from hvd_ext.planning.tensors import Tensor
from tests.unit.drawing import assert_colours_differ, assert_readable

TIMES = StepTimes(
    tuple(Tensor(name, (elements,), "float32") for name, elements in (("a", 33), ("b", 1600), ("c", 1))),
    (0.05, 0.03, 0.03),
    0.02,
    0.01,
)


def row(
    bucketer: str, step_s: float, ratio: float = 1.0, hosts: tuple[int, ...] = (2, 2), **more: Any
) -> dict[str, Any]:
    return {
        "model": "resnet50",
        "scale": 0.0625,
        "ratio": ratio,
        "algorithm": "auto",
        "ranks": sum(hosts),
        "hosts": len(hosts),
        "ranks_per_host": list(hosts),
        "bytes": 6_400_000,
        "bucketer": bucketer,
        "chosen": "optimal" if bucketer == "auto" else bucketer,
        "buckets": [[3, 4_000_000], [5, 2_400_000]],
        "compute_seconds": 0.5,
        "predicted_seconds": 0.8,
        "seconds_median": step_s,
        "seconds_min": step_s,
        "x_predicted": step_s / 0.8,
        "exposed_seconds": step_s - 0.5,
        "late_seconds": 1e-4,
        "late_seconds_p99": 2e-4,
        "correct": True,
        "samples": [step_s],
        **more,
    }


def rows_of(ratio: float = 1.0, hosts: tuple[int, ...] = (2, 2)) -> list[dict[str, Any]]:
    steps = {"auto": 0.82, "wfbp": 0.9, "single": 1.2, "by_size": 1.0, "mgwfbp": 0.8, "optimal": 0.82}
    return beside([row(name, step_s, ratio, hosts) for name, step_s in steps.items()])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ()}, "at least one"),
        ({"bucketers": ("best",)}, "'best'.*auto.*single"),
        ({"bucketers": ("by_groups",)}, "'by_groups'"),
        ({"bucketers": ("auto", "auto")}, "'auto'.*once"),
        ({"algorithm": "rings"}, "'rings'.*auto.*ring"),
        ({"ratios": ()}, "at least one"),
        ({"ratios": (-1.0,)}, r"ratio \(-1\)"),
        ({"ratios": (float("nan"),)}, r"ratio \(nan\)"),
        ({"scale": 0.0}, r"scale \(0\)"),
        ({"scale": 2.0}, r"scale \(2\)"),
        ({"ranks": (0,)}, r"ranks \(0\)"),
        ({"repetitions": 0}, r"repetitions \(0\)"),
        ({"timeout_s": 0.0}, r"timeout \(0\)"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Request(**{"models": ("resnet50",), **changes})


def test_a_model_is_a_name_or_a_file_and_its_tensors_are_scaled(tmp_path: Path) -> None:
    whole, part = model_of("resnet50", 1.0), model_of("resnet50", 1 / 16)
    sizes = [[tensor.elements for tensor in model.tensors] for model in (whole, part)]
    assert sum(sizes[0]) == pytest.approx(25.6e6, rel=0.01)
    assert sizes[1] == [-(-elements // 16) for elements in sizes[0]]
    assert part.ready_s == whole.ready_s
    write(TIMES, tmp_path / "model.csv")
    read = model_of(str(tmp_path / "model.csv"), 1 / 16)
    assert {tensor.name: tensor.elements for tensor in read.tensors} == {"a": 3, "b": 100, "c": 1}
    assert (read.forward_s, read.update_s) == (0.02, 0.01)
    with pytest.raises(InvalidError, match="'resnet51'.*there is no such file.*bert-base"):
        model_of("resnet51", 1.0)


def test_rows_are_compared_with_the_best_bucketer_and_with_one_bucket() -> None:
    found = {one["bucketer"]: one for one in rows_of()}
    assert found["auto"]["x_best"] == pytest.approx(0.82 / 0.8)
    assert found["mgwfbp"]["x_best"] == 1.0
    assert found["mgwfbp"]["x_single"] == pytest.approx(1.5)
    *others, delayed = beside([*rows_of(), row("delay", 0.6)])
    assert delayed["x_best"] == pytest.approx(0.75)
    assert {one["bucketer"]: one for one in others} == found
    (alone,) = beside([row("auto", 1.0)])
    assert (alone["x_best"], alone["x_single"]) == (None, None)


def test_the_table_names_every_row_once_and_a_wrong_one_aloud() -> None:
    wrong = {**row("ring", 1.0), "bucketer": "by_size", "correct": False, "wrong": ["rank 1: a: element 3 is 1"]}
    rows = beside([row("auto", 0.9), wrong])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(schedule_table(results.result_of({}, rows, results.SCHEDULE)))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    for words in ("resnet50, 6.4 MB", "2 + 2", "auto -> optimal", "WRONG"):
        assert sum(words in line for line in lines) == 1
    (line,) = schedule_faults(rows)
    assert line.startswith(
        "wrong result: by_size -> ring, resnet50 x 0.0625, ratio 1, 2 + 2 ranks: rank 1: a: element 3"
    )


def test_a_plot_has_a_panel_for_each_cluster_and_bars_with_their_prediction(tmp_path: Path, seen: list[Any]) -> None:
    rows = [*rows_of(0.5), *rows_of(1.0), *rows_of(1.0, (2, 2, 1))]
    draw_schedule(rows, tmp_path / "x.png")
    assert_readable(seen[0])
    assert_colours_differ({"bucketers": [colour for colour, _ in BUCKETERS.values()]})
    first, second = seen[0].axes
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["0.5", "1"]
    assert [tick.get_text() for tick in second.get_xticklabels()] == ["1"]
    _, labels = first.get_legend_handles_labels()
    assert set(labels) == {"auto", "mgwfbp", "wfbp", "single", "computing", "predicted"}
    with pytest.raises(InvalidError, match="nothing to draw"):
        draw_schedule([], tmp_path / "y.png")


def test_several_files_become_one_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: python -m pip install matplotlib")
    for name, hosts in (("a.json", (2, 2)), ("b.json", (4, 4))):
        results.save(tmp_path / name, results.result_of({}, rows_of(1.0, hosts), results.SCHEDULE))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    done = CliRunner().invoke(app, ["plot-schedule", *files, "--output", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_part_is_a_number_or_a_fraction() -> None:
    for text in ("1/0", "a quarter"):
        done = CliRunner().invoke(app, ["schedule", "--scale", text])
        assert done.exit_code == 2
        assert "1/16" in done.output


class Parts:
    """Notes what a step does, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def begin(self) -> None:
        """Notes it."""
        self.calls.append(("begin", time.monotonic()))

    def submit(self, tensor: int) -> None:
        """Notes it."""
        self.calls.append((f"submit {tensor}", time.monotonic()))

    def collect(self, before: int = 0) -> None:
        """Notes it."""
        self.calls.append(("collect" + " before" * before, time.monotonic()))


def test_a_step_hands_tensors_over_in_ready_order_and_never_early() -> None:
    sleep_precisely()
    parts = Parts()
    seconds, late_s = Replay(7, parts, TIMES).step()  # type: ignore[arg-type]
    names = [name for name, _ in parts.calls]
    assert names == ["begin", "submit 2", "submit 1", "submit 0", "collect"]
    begin_s = parts.calls[0][1]
    for (_, at_s), ready_s in zip(parts.calls[1:], (0.03, 0.03, 0.05, 0.05), strict=True):
        assert at_s - begin_s >= ready_s - 1e-4
    assert seconds >= 0.06  # with the update
    assert len(late_s) == 3 and min(late_s) >= 0


def test_a_delayed_step_takes_the_results_of_the_step_before_it() -> None:
    parts = Parts()
    seconds, late_s = Replay(7, parts, TIMES, delayed=True).step()  # type: ignore[arg-type]
    collects = [name for name, _ in parts.calls if not name.startswith("submit")]
    assert collects == ["begin", *["begin", "collect before"] * DELAYED_STEPS, "collect"]
    assert seconds >= 0.06
    assert len(late_s) == 3 * DELAYED_STEPS


def test_a_deadline_that_has_passed_is_no_sleep() -> None:
    begin_s = time.monotonic()
    sleep_until(begin_s - 1)
    assert time.monotonic() - begin_s < 0.5
