"""The parts of the demo that need no ranks: a rank's digits, the table, the plot, the progress words."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from demo_views import Training, plot, table
from rich.console import Console


def training(name: str, algorithm: str = "", equal: bool = True) -> Training:
    found = Training(name)
    found.take({"kind": "start", "ranks": 4})
    for epoch, seconds in enumerate((5.0, 0.22, 0.33, 0.11), 1):
        values = {"epoch": epoch, "loss": 1 / epoch, "test_accuracy": 1 - 0.1 / epoch, "seconds": seconds, "steps": 11}
        found.take({"kind": "epoch", **values})
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


def test_too_many_ranks_for_a_batch_each_are_refused() -> None:
    import handwritten

    with pytest.raises(ValueError, match=r"ranks \(100\)"):
        handwritten.digits_of(0, 100)


def test_a_step_is_the_median_without_the_epoch_that_traces() -> None:
    assert training("x").step_ms == pytest.approx(20.0)


def test_the_table_has_a_row_per_training_and_tells_unequal_weights() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(table([training("hvd_ext", "ring"), training("Horovod", equal=False)]))
    text = stream.getvalue()
    for words in ("hvd_ext, ring", "Horovod", "97.50%", "20.0 ms", "yes", "NO"):
        assert words in text


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot([training("hvd_ext"), training("Horovod")], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_the_progress_says_what_the_ranks_do() -> None:
    found = Training("x")
    assert found.status == "starting"
    found.take({"kind": "start", "ranks": 2})
    assert found.status == "tracing the first step"
    assert training("y").status == "97.5% of test digits right"
