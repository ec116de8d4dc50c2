"""The benchmark of top-k: yardsticks, inputs and contestants, how answers are judged, samples compared, goals met."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.topk import inputs, jobs, peers, worker as topk_worker
from benchmarks.studies.topk.check import Check, keys_of, unique
from benchmarks.studies.topk.functions import Algorithm1, bare_add, read_pass
from benchmarks.studies.topk.jobs import NAMES, Request, measure, summary, with_ratios
from benchmarks.studies.topk.peers import Bench
from benchmarks.studies.topk.results import BENCHMARK
from benchmarks.studies.topk.targets import TARGETS, verdict, verdicts, verdicts_of
from benchmarks.studies.topk.worker import EVENTS, Sampler, serve
from benchmarks.tests.rows import topk_row, topk_rows as rows_of
from hvd_ext.bench import results
from hvd_ext.bench.sampling import Follower
from hvd_ext.engine import native
from hvd_ext.errors import InvalidError, NativeLibraryError
from hvd_ext.runner.launcher import JobError
from tests.unit.bench.rows import FACTS

ELEMENTS, DENSITY = 30_000, 0.01


def numbers(elements: int) -> Any:
    """Whole numbers of both signs, so that sums of them are exact in float32."""
    return ((np.arange(elements) * 37) % 101 - 50).astype(np.float32)


@pytest.mark.parametrize("elements", [0, 1, 127, 128, 129, 1000, 5003])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_pass_sums_magnitudes_of_every_element(elements: int, threads: int) -> None:
    x = numbers(elements + 1)[1:]  # no cache line begins where this does
    assert read_pass(x, threads) == np.abs(x).sum(dtype=np.float64)


def test_the_pass_and_the_addition_take_float32_in_one_piece() -> None:
    for wrong in (np.zeros(4), np.zeros(8, np.float32)[::2]):
        with pytest.raises(ValueError, match="must be float32 and contiguous"):
            read_pass(wrong)
    sums = numbers(100)
    bare_add(sums, numbers(100))
    assert np.array_equal(sums, 2 * numbers(100))


def as_printed(x: Any, k: int) -> set[int]:
    """The certain part of Algorithm 1's answer: a second writing of its search, with NumPy."""
    a = np.abs(x)
    mean, largest = np.float32(a.sum(dtype=np.float64) / len(a)), a.max()
    low, high, best, above = np.float32(0), np.float32(1), 0, np.float32(0)
    for _ in range(30):
        ratio = np.float32(low + (high - low) / 2)
        threshold = np.float32(mean + ratio * (largest - mean))
        count = int(np.count_nonzero(a >= threshold))
        if count <= k:
            high = ratio
            if count > best:
                best, above = count, threshold
        else:
            low = ratio
    return set(np.flatnonzero(a >= above))


@pytest.mark.parametrize("k", [1, 50, 300])
def test_algorithm_1_is_the_printed_one(k: int) -> None:
    x = np.random.default_rng(3).standard_normal(5003).astype(np.float32)
    select = Algorithm1(x, k)
    values, indices = (found.copy() for found in select())
    assert len(set(indices)) == len(indices) == k
    assert np.array_equal(values, x[indices])
    assert as_printed(x, k) <= set(indices)


def test_algorithm_1_fills_with_a_window_that_the_seed_moves() -> None:
    x = np.concatenate([np.full(5, 9), np.full(4000, 2), np.zeros(1000)]).astype(np.float32)
    select = Algorithm1(x, 20)
    windows = {tuple(select()[1]) for _ in range(5)}
    assert len(windows) == 5
    for window in windows:
        assert window[:5] == (0, 1, 2, 3, 4)
        assert window[5:] == tuple(range(window[5], window[5] + 15))
        assert window[-1] < 4005
    for same in (0, 3):  # no threshold is between equal magnitudes, and everything is returned
        assert len(Algorithm1(np.full(1000, same, np.float32), 10)()[1]) == 1000


def test_resnet_50_has_161_tensors() -> None:
    sizes = inputs.resnet50_sizes()
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    offsets = inputs.segments(1_000_000)
    assert (len(offsets), offsets[0], offsets[-1]) == (162, 0, 1_000_000)
    assert offsets == sorted(offsets)
    assert inputs.segments(sum(sizes))[1:] == list(np.cumsum(sizes))
    assert sum(inputs.picks(0.001, offsets)) == 1000


def test_a_gradient_of_layers_has_a_part_of_each_and_of_as_many_steps_as_it_takes() -> None:
    def steps() -> Any:
        for step in itertools.count(1):
            yield [np.full(6, 10 * step + 1, np.float32), np.full(4, 10 * step + 2, np.float32)]

    assert list(inputs.layered(5, steps())) == [11, 11, 11, 12, 12]
    assert list(inputs.layered(15, steps())) == [11] * 4 + [12] * 3 + [21] * 5 + [22] * 3
    assert list(inputs.layered(10, steps())) == [11] * 6 + [12] * 4


def test_gradients_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "resnet50_gradients", lambda: iter([[np.full(8, 5, np.float32)]]))
    made = inputs.make("gradient", 4, tmp_path)
    monkeypatch.setattr(inputs, "resnet50_gradients", lambda: iter([]))
    assert np.array_equal(inputs.make("gradient", 4, tmp_path), made)


@pytest.mark.parametrize("name", [name for name in inputs.INPUTS if name != "gradient"])
def test_an_input_is_the_same_in_every_call(name: str) -> None:
    x = inputs.make(name, 2000)
    assert (x.dtype, x.shape) == (np.float32, (2000,))
    assert np.array_equal(x, inputs.make(name, 2000), equal_nan=True)
    with pytest.raises(InvalidError, match=r"input \('cauchy'\).*gauss"):
        inputs.make("cauchy", 4)


def test_the_right_answer_takes_the_first_of_equals_and_nan_above_all() -> None:
    x = np.array([1, -2, np.nan, 2, -0.0, np.inf, 2], np.float32)
    right = [[], [2], [2, 5], [1, 2, 5], [1, 2, 3, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert [list(unique(keys_of(x), k)) for k in (0, 1, 2, 3, 4, 7)] == right


@pytest.mark.parametrize(
    ("promise", "values", "indices", "wrong"),
    [
        ("unique", [5, -5], [0, 2], ""),
        ("unique", [5, 5], [0, 3], "index 1 is 3 instead of 2"),
        ("exact", [5, 5], [3, 0], ""),
        ("exact", [5, 1], [0, 1], "a larger element was left out: recall 0.5"),
        ("exact", [5, 5], [0, 0], "recall 0.5"),
        ("exact", [5, 4], [0, 2], "a value is not the one at its index"),
        ("exact", [5], [0], "1 indices instead of 2"),
        ("segments", [5, -5], [0, 2], ""),
        ("segments", [5, 1], [0, 1], "index 1 is 1 instead of 2"),
        ("", [1], [1], ""),
    ],
)
def test_an_answer_is_judged_by_its_promise(promise: str, values: Any, indices: Any, wrong: str) -> None:
    check = Check(np.array([5, 1, -5, 5], np.float32), 2, [0, 2, 4], [1, 1])
    found = check.judge(promise, np.array(values, np.float32), np.array(indices))
    assert found["correct"] is (None if promise == "" else wrong == "")
    assert wrong in found["wrong"]
    assert found["returned"] == len(indices)
    assert found["recall"] == len({place for place in indices if place != 1}) / 2


@pytest.fixture(scope="module")
def bench() -> Bench:
    x = tf.constant(inputs.make("laplace", ELEMENTS))
    return Bench(x, round(DENSITY * ELEMENTS), DENSITY, inputs.segments(ELEMENTS), 1)


@pytest.mark.parametrize("name", [name for name in NAMES if "noop" not in name])
def test_every_contestant_selects_what_it_promises(bench: Bench, name: str) -> None:
    if name == "torch" and not peers.has_torch():
        pytest.skip("needs PyTorch: python -m pip install torch")
    one = bench.contestant(name)
    assert one.answer is not None
    check = Check(bench.array, bench.k, bench.offsets, bench.segment_picks)
    found = check.judge(one.promise, *one.answer(one.call()))
    assert found["correct"] in (True, None), found["wrong"]
    assert found["returned"] == bench.k or (name in ("dgc", "dgc-tf") and 0 < found["returned"] <= bench.k)
    if name not in ("random", "segments"):
        # what passes DGC's threshold is among the largest, but may be few
        assert found["recall"] > 0.999 or ("dgc" in name and found["recall"] == found["returned"] / bench.k)
    assert (one.beside == "add") is (name in ("feedback", "separate"))


def test_the_addition_leaves_the_input_as_it_is(bench: Bench) -> None:
    before = bench.array.copy()
    bench.yardstick("add")()
    assert np.array_equal(bench.array, before)


def test_every_sample_stands_beside_a_yardstick_and_slow_ones_have_fewer(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("time.process_time", lambda: 0.5 * next(clock))
    task = Request(repetitions=6, seconds_per_row=5.5).task(tmp_path, 1)
    evicted: list[int] = []
    sampler = Sampler(task, lambda: evicted.append(1))
    rows = sampler.rows(bench, [bench.contestant(name) for name in ("noop", "numpy")], bench)
    assert [row["rounds"] for row in rows] == [[0, 1, 2]] * 2  # a call takes two seconds of this clock
    for row in rows:
        assert row["samples"] == row["yardstick_samples"] == [2.0] * 3
        assert row["cpu_samples"] == row["cpu_yardstick_samples"] == [1.0] * 3
    assert len(evicted) == 2 * 2 * 3


def test_a_process_tells_a_row_for_each_contestant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(topk_worker, "DEVICES", tmp_path / "dev")
    names = ("noop", "exact", "feedback", "algorithm1")
    request = Request(
        elements=(5000,),
        densities=(DENSITY,),
        inputs=("gauss", "ties"),
        contestants=names,
        repetitions=3,
        evict_bytes=64,
    )
    serve(request.task(tmp_path, 1))
    hello, *events = Follower(tmp_path / EVENTS).new()
    assert (hello["kind"], hello["torch"]) == ("hello", peers.has_torch())
    seen = [device.name for device in tf.config.list_physical_devices("GPU")]
    assert hello["gpus"] == (seen or [str(tmp_path / "dev" / "nvidia0")])
    rows = [event["row"] for event in events]
    assert [(row["input"], row["contestant"]) for row in rows] == [
        *[("gauss", name) for name in names],
        *[("ties", name) for name in ("noop", "exact", "algorithm1")],
    ]
    for row in rows:
        assert (row["elements"], row["k"], row["threads"], row["rounds"]) == (5000, 50, 1, [0, 1, 2])
        assert len(row["samples"]) == len(row["yardstick_samples"]) == 3
        assert min(row["samples"] + row["yardstick_samples"]) > 0
        assert row["correct"] is (True if row["contestant"] in ("exact", "feedback") else None), row["wrong"]


def test_without_the_native_library_the_words_say_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", Path("nowhere.so"))
    native.load.cache_clear()
    try:
        with pytest.raises(NativeLibraryError, match="python -m hvd_ext build"):
            read_pass(numbers(4))
    finally:
        native.load.cache_clear()


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
    exact = topk_row("exact", [1.0, 2.0, 4.0], [1.0] * 3)
    slow = topk_row("torch", [10.0, 80.0], [1.0] * 2, rounds=[0, 2])
    other = topk_row("torch", [10.0], [1.0], input="laplace")
    assert [one["x_ours"] for one in with_ratios([exact, slow, other])] == [1.0, 15.0, None]


def test_ours_is_compared_with_a_pass_and_a_no_op_of_the_same_round() -> None:
    exact = topk_row("exact", [2.0, 3.5, 4.0], [1.0, 2.0, 1.0])
    graph = topk_row("graph", [9.0], [2.0])
    noop = topk_row("noop", [0.5, 1.0], [1.0] * 2, rounds=[0, 2])
    noop_graph = topk_row("noop-graph", [6.0], [1.0])
    found = with_ratios([exact, graph, noop, noop_graph, topk_row("torch", [9.0], [1.0])])
    assert [one["x_less_noop"] for one in found] == [2.25, 1.5, None, None, None]  # of 1.5 and 3
    small = [{**row, "elements": 256_000} for row in found]
    measured = {one["item"]: (one["measured"], one["met"]) for one in verdicts(small)}
    assert measured["x one read pass and a dispatch, 256 K to 1 M"] == (2.25, False)
    assert measured["the same in a tf.function"] == (1.5, True)


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
        monkeypatch.setattr(jobs, "WORKER", (sys.executable, str(tmp_path / "worker.py")))

    return pretend


def test_every_number_of_threads_has_a_process_and_one_that_fails_is_told_with_its_last_words(worker: Any) -> None:
    worker()
    told: list[tuple[str, int]] = []
    request = Request(inputs=("gauss", "nan"), densities=(0.5,), threads=(1, 2))
    rows, notes = measure(request, lambda *what: told.append(what))
    assert [(one["threads"], one["input"], one["x_yardstick"], one["x_ours"]) for one in rows] == [
        (threads, name, 2.0, 1.0) for threads in (1, 2) for name in ("gauss", "nan")
    ]
    assert sum(ready for _, ready in told) == request.groups()
    assert notes == [jobs.NO_TORCH, jobs.NO_GPU]  # each is said once
    worker(status=3)
    with pytest.raises(JobError, match=r"(?s)status 3.*the last words"):
        measure(Request())


@pytest.mark.parametrize(("correct", "status"), [(True, 0), (False, 1)])
def test_the_command_writes_its_file_and_fails_where_an_answer_is_wrong(
    worker: Any, tmp_path: Path, correct: bool, status: int
) -> None:
    worker(correct=correct, gpus=("/GPU:0",))
    file = tmp_path / "a.json"
    options = ["--inputs", "gauss,nan", "--densities", "0.5", "--elements", "8", "--json", str(file)]
    done = CliRunner().invoke(app, ["topk", *options])
    assert done.exit_code == status, done.output
    assert ("wrong answer" in done.output) is not correct
    assert "the kernels of /GPU:0 are measured by" in done.output
    written = results.load(file, BENCHMARK)
    assert set(written) == {"benchmark", "runs", "rows"}
    assert {"date", "command", "machine", "versions", "environment", "notes", "evict_bytes"} <= set(written["runs"][0])
    assert len(written["rows"]) == 2


def test_the_worst_input_counts_for_a_target() -> None:
    slower = [{**row, "x_yardstick": 1.3} for row in rows_of(input="laplace")[:1]]
    verdict_of = {target["item"]: target for target in verdicts([*rows_of(), *slower])}
    assert (verdict_of["x one read pass"]["input"], verdict_of["x one read pass"]["met"]) == ("laplace", False)
    assert verdict_of["x one read pass"]["verdict"] == "missed by 13.0%"
    assert verdict_of["x the bare add, error feedback"]["verdict"] == "missed by 4.3%"
    assert verdict_of["times as fast as Algorithm 1 as printed"]["verdict"] == "met"
    assert verdict_of["times as fast as np.argpartition"]["verdict"] == "missed by 33.3%"


def test_a_target_is_about_its_lengths_threads_and_inputs() -> None:
    assert verdicts([*rows_of(elements=2_000_000), *rows_of(density=0.5)]) == []
    items = [target["item"] for target in verdicts(rows_of(threads=2))]
    assert items == ["x one read pass of as many threads"]
    assert [target["item"] for target in verdicts(rows_of(input="nan"))] == ["x one read pass, hard inputs"]
    assert {target.contestant for target in TARGETS} <= set(NAMES)


def test_a_verdict_knows_a_stretch_goal_of_both_directions() -> None:
    assert verdict(1.05, 1.15, 1.06, True) == verdict(60.0, 40.0, 55.0, False) == "met, and the stretch goal"


def test_each_run_of_a_file_has_verdicts_of_its_own_and_the_command_shows_them(tmp_path: Path) -> None:
    one, two = (results.result_of(FACTS, rows_of(input=name), BENCHMARK) for name in ("gauss", "laplace"))
    both = results.joined(one, two)
    of_one = verdicts(rows_of())
    assert verdicts_of(both["rows"]) == of_one + [{**target, "input": "laplace"} for target in of_one]
    results.save(tmp_path / "a.json", one)
    done = CliRunner().invoke(app, ["topk-targets", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert "missed by 4.3%" in done.output
