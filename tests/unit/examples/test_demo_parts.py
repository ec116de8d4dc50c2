"""The parts of the demo that need no ranks: a rank's digits, the numbers, and the report."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_views import TARGET, Training, plot, table
from matplotlib.colors import to_hex

from tests.unit.drawing import printed

RESULT = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "demo.json"


STEPS_MS = (5000, 200, 100, 300, 400, 500, 600)


def training(
    name: str, algorithm: str = "", equal: bool = True, accuracies: tuple[float, ...] = (0.9, 0.98)
) -> Training:
    """A training of two turns; the second takes twice as long."""
    found = Training(name)
    for turn in (1, 2):
        found.take({"kind": "start", "total": 7, "parameters": 1_000_000})
        seconds = [turn * step / 1e3 for step in STEPS_MS]
        found.take({"kind": "test", "seconds": seconds[:3], "accuracy": accuracies[0]})
        found.take({"kind": "test", "seconds": seconds[3:], "accuracy": accuracies[1]})
        found.take({"kind": "end", "equal": equal, "algorithm": algorithm, "why": "because"})
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_have_digits_of_their_own_and_as_many_whole_batches(size: int) -> None:
    import handwritten

    parts = [handwritten.digits_of(rank, size) for rank in range(size)]
    counts = {len(train.labels) for train, _ in parts}
    assert len(counts) == 1
    assert counts.pop() % handwritten.BATCH == 0
    tests = [test.images for _, test in parts]
    assert all(np.array_equal(test, tests[0]) for test in tests)
    rows = np.concatenate([train.images.reshape(len(train.labels), -1) for train, _ in parts])
    everything = handwritten.load_digits().data
    # Some of the data set's images are twins; parts that overlapped would have many more.
    assert len(rows) - len(np.unique(rows, axis=0)) <= len(everything) - len(np.unique(everything, axis=0))
    assert tests[0].shape == (handwritten.TEST_IMAGES, 8, 8, 1)
    with pytest.raises(ValueError, match=r"ranks \(100\)"):
        handwritten.digits_of(0, 100)


def test_a_row_has_the_spread_of_all_turns_without_the_steps_that_trace() -> None:
    row = training("hvd_ext", "ring").row()
    assert row["first_ms"] == 7500
    # 100 to 600 by 100, and 200 to 1200 by 200
    assert row["step_ms"] == {"low": 275.0, "median": 450.0, "high": 650.0}
    assert row["curves"] == [[[0.3, 0.9], [2.1, 0.98]], [[0.6, 0.9], [4.2, 0.98]]]
    assert row["steps_ms"][0] == list(STEPS_MS)
    assert row["equal"] and not training("hvd_ext", equal=False).row()["equal"]


def test_the_time_to_the_target_is_that_of_the_first_test_that_reaches_it() -> None:
    assert training("hvd_ext").row()["seconds_to_target"] == pytest.approx(3.15, abs=0.06)  # of 2.1 and 4.2
    assert training("hvd_ext", accuracies=(0.97, 0.9)).row()["seconds_to_target"] == pytest.approx(0.45, abs=0.06)
    assert training("hvd_ext", accuracies=(0.9, 0.96)).row()["seconds_to_target"] is None


def test_the_progress_says_what_the_ranks_do() -> None:
    begun = Training("x")
    assert begun.status == "the ranks start"
    begun.take({"kind": "start", "total": 7, "parameters": 10})
    assert (begun.status, begun.done) == ("first steps", 0)
    begun.take({"kind": "test", "seconds": [1.0, 2.0], "accuracy": 0.975})
    assert (begun.status, begun.done) == ("97.5% of the test digits right", 2)


def test_the_report_has_a_row_and_a_colour_for_each_training_and_says_which_never_reached_the_target(
    tmp_path: Path, seen: list[Any]
) -> None:
    trainings = [training("Horovod", accuracies=(0.5, 0.6)), training("hvd_ext"), training("hvd_ext, TopK")]
    rows = [one.row() for one in trainings]
    result = {"place": "2 hosts", "parameters": 10**6, "target": TARGET, "rows": rows}
    shown = printed(table(result), width=80)
    for words in ("hvd_ext, TopK", "Horovod", "98.0%", "60.0%", "450 ms (275-650)", "7.5 s", "never"):
        assert words in shown
    plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    accuracy, time = seen[0].axes
    colours = {line.get_label(): line.get_color() for line in accuracy.get_lines() if line.get_label()[0] != "_"}
    assert [label.split(":")[0] for label in colours] == [one.name for one in trainings]
    assert len(set(colours.values())) == 3
    assert [to_hex(bar.get_facecolor()) for bar in time.patches] == [colour.lower() for colour in colours.values()]


def test_the_numbers_of_the_page_are_those_of_their_samples() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert [row["name"] for row in rows] == ["Horovod", "hvd_ext", "hvd_ext, TopK"]
    for row in rows:
        later = [step for turn in row["steps_ms"] for step in turn[1:]]
        assert row["step_ms"]["median"] == pytest.approx(statistics.median(later), abs=0.06)
        assert row["equal"]
        reached = [next(seconds for seconds, accuracy in curve if accuracy >= TARGET) for curve in row["curves"]]
        assert row["seconds_to_target"] == pytest.approx(statistics.median(reached), abs=0.06)
