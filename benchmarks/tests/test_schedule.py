"""The schedule benchmark without jobs: its models, how rows are compared, how a step sleeps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.studies.schedule.jobs import beside, model_of
from benchmarks.studies.schedule.worker import DELAYED_STEPS, Replay, sleep_precisely, sleep_until
from hvd_ext.errors import InvalidError
from hvd_ext.planning.step_times import StepTimes, write
from hvd_ext.planning.tensors import Tensor

TIMES = StepTimes(
    tuple(Tensor(name, (elements,), "float32") for name, elements in (("a", 33), ("b", 1600), ("c", 1))),
    (0.05, 0.03, 0.03),
    0.02,
    0.01,
)


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
    place = {"model": "resnet50", "scale": 0.0625, "ratio": 1.0, "algorithm": "auto", "ranks_per_host": [2, 2]}
    steps = {"auto": 0.82, "wfbp": 0.9, "single": 1.2, "mgwfbp": 0.8, "optimal": 0.82}
    rows = [{**place, "bucketer": name, "seconds_median": step_s} for name, step_s in steps.items()]
    compared = {one["bucketer"]: one for one in beside(rows)}
    assert compared["auto"]["x_best"] == pytest.approx(0.82 / 0.8)
    assert compared["mgwfbp"]["x_best"] == 1.0
    assert compared["mgwfbp"]["x_single"] == pytest.approx(1.5)
    # results that come a step late are no bucketer
    *others, delayed = beside([*rows, {**place, "bucketer": "delay", "seconds_median": 0.6}])
    assert delayed["x_best"] == pytest.approx(0.75)
    assert {one["bucketer"]: one for one in others} == compared
    (alone,) = beside(rows[:1])
    assert (alone["x_best"], alone["x_single"]) == (None, None)


class Parts:
    """Notes what a step does, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def begin(self) -> None:
        self.calls.append(("begin", time.monotonic()))

    def submit(self, tensor: int) -> None:
        self.calls.append((f"submit {tensor}", time.monotonic()))

    def collect(self, before: int = 0) -> None:
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
