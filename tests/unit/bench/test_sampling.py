"""The timing of contestants, the check of their results, the turns of a rank, and its events; without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_ext.bench import sampling
from hvd_ext.bench.sampling import (
    PERIOD,
    Contestant,
    Follower,
    Ranks,
    Sampler,
    emit,
    fault_of,
    serve,
    sum_of,
    values_of,
)


class OneRank(Ranks):
    """The only rank of a job."""

    def __init__(self) -> None:
        self.rank, self.size, self.meetings, self.aborted = 0, 1, 0, False

    def meet(self, longest_s: float = 0.0) -> None:
        self.meetings += 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_the_right_sum_is_the_sum_of_the_ranks_and_exact_in_any_order(size: int) -> None:
    ranks = [values_of(rank, 1000) for rank in range(size)]
    forward, backward = (np.add.reduce(order) for order in (ranks, ranks[::-1]))
    assert np.array_equal(forward, sum_of(size, 1000))
    assert np.array_equal(backward, sum_of(size, 1000))


def test_ranks_and_places_have_different_values() -> None:
    assert not np.array_equal(values_of(0, 50), values_of(1, 50))
    assert len(np.unique(values_of(0, PERIOD))) == PERIOD


@pytest.mark.parametrize("elements", [1, PERIOD, 100, (PERIOD << 14) + 5, 3 * (PERIOD << 14)])
def test_a_wrong_result_is_found_wherever_it_is_with_its_place_and_both_values(elements: int) -> None:
    def right(count: int) -> np.ndarray:
        return sum_of(2, count)

    whole = right(elements)
    assert fault_of(whole, elements, right) == ""
    for place in {0, elements // 2, elements - 1}:
        wrong = whole.copy()
        wrong[place] += 1
        expected = f"element {place} is {wrong[place]}, must be {whole[place]}"
        assert fault_of(wrong, elements, right) == expected
    assert "shape" in fault_of(whole[:-1], elements, right)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a clock shows, which a test moves."""
    now = [0.0]
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: now[0])
    return now


def result() -> np.ndarray:
    """The right result of the only rank."""
    return values_of(0, 10)


def sampler_of(*calls: Callable[[], Any], ranks: Ranks | None = None, check: bool = True, **more: Any) -> Sampler:
    """Make a sampler of these calls, each a contestant."""
    return Sampler([Contestant("ring", "engine", call, **more) for call in calls], 10, ranks or OneRank(), check)


def test_a_sample_begins_with_a_meeting_and_has_the_time_of_the_slowest_rank() -> None:
    class TwoRanks(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return [value, (value[0] + 7, value[1] + 11, "element 3 is 1, must be 2")]

    sampler = sampler_of(result, ranks=(ranks := TwoRanks()))
    before = ranks.meetings
    sample = sampler.sample(0)
    assert ranks.meetings == before + 3
    assert sample["seconds"] >= 7
    assert sample["processor_seconds"] >= 11
    assert sample["wrong"] == ["rank 1: element 3 is 1, must be 2"]


def test_no_rank_checks_its_result_while_another_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(OneRank, "meet", lambda self, longest_s=0.0: order.append("meet"))
    monkeypatch.setattr(Sampler, "_fault", lambda self, one, result: order.append("check"))
    sampler = sampler_of(lambda: order.append("call"))
    order.clear()
    sampler.sample(0, warm=False)
    assert "meet" in order[order.index("call") : order.index("check")]


def test_short_calls_are_repeated_within_a_sample_and_long_ones_are_not(clock: list[float]) -> None:
    def taking(seconds: float, first_s: float = 0.0) -> Callable[[], np.ndarray]:
        calls: list[int] = []

        def call() -> np.ndarray:
            calls.append(1)
            clock[0] += first_s if first_s and len(calls) == 1 else seconds
            return result()

        return call

    # a first call that takes long does not make a call long
    sampler = sampler_of(taking(2.0), taking(1.3e-3), taking(1e-7), taking(1.3e-3, first_s=0.5))
    facts = sampler.facts()
    assert [one["calls_per_sample"] for one in facts] == [1, 4, sampling.MOST_CALLS, 4]
    assert facts[0]["sample_seconds"] == pytest.approx(2.0)
    assert sampler.sample(1)["seconds"] == pytest.approx(1.3e-3)
    # a long call has one call to warm up and no more
    assert sampler.first_s[0] == pytest.approx(2.0)


def test_the_last_result_is_spoilt_so_that_a_call_that_does_nothing_is_found() -> None:
    last = sum_of(1, 10)
    for check in (True, False):
        idle = sampler_of(lambda: last, reset=lambda: last.fill(np.nan), check=check)
        assert ["must be" in words for words in idle.sample(0)["wrong"]] == [True] * check


def test_what_goes_wrong_while_warming_up_is_told_too() -> None:
    calls: list[int] = []

    def flaky() -> np.ndarray:
        calls.append(1)
        return result() + (len(calls) == 2)

    sampler = sampler_of(flaky)
    assert sampler.sample(0)["wrong"] == []
    assert ["must be" in words for words in sampler.facts()[0]["wrong"]] == [True]


@pytest.mark.parametrize("rank", [0, 3])
def test_what_sums_nothing_must_give_a_copy_of_the_buffer_of_one_rank(rank: int) -> None:
    assert sampler_of(lambda: values_of(rank, 10), copy_of=rank).sample(0)["wrong"] == []
    assert sampler_of(lambda: values_of(rank, 10) + 1, copy_of=rank).sample(0)["wrong"]


def test_processor_time_is_that_of_all_ranks_for_a_call_until_all_have_their_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = [0.0]
    monkeypatch.setattr(sampling.time, "process_time", lambda: busy[0])

    def spend(seconds: float, value: Any) -> Any:
        busy[0] += seconds
        return value

    class FourRanks(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return [value] * 4

        def meet(self, longest_s: float = 0.0) -> None:
            spend(100.0, None)  # of a thread that works on while the ranks meet

    monkeypatch.setattr(Sampler, "_fault", lambda self, one, result: spend(1000.0, ""))
    sampler = sampler_of(lambda: spend(3.0, result()), ranks=FourRanks())
    sampler._calls = [50]
    assert sampler.sample(0)["processor_seconds"] == pytest.approx(4 * (3.0 + 100.0 / 50))


def test_a_rank_answers_each_turn_until_it_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "Ranks", OneRank)
    made, released = [], []

    def make(elements: int, algorithms: Any) -> list[Contestant]:
        made.append((elements, algorithms))
        value = values_of(0, elements)
        return [Contestant(name, "engine", lambda: value, chosen="ring") for name in algorithms]

    emit(tmp_path / sampling.TURNS, "open", bytes=40, algorithms=["auto", "mpi"])
    thread = threading.Thread(target=serve, args=(make, str(tmp_path), True, lambda: released.append(1), "name: x"))
    thread.start()
    follower, events = Follower(tmp_path / sampling.EVENTS), []
    while "opened" not in [event["kind"] for event in events] and thread.is_alive():
        events += follower.new()
    emit(tmp_path / sampling.TURNS, "measure", which=[1, 0])
    while "measured" not in [event["kind"] for event in events] and thread.is_alive():
        events += follower.new()
    emit(tmp_path / sampling.TURNS, "end")
    thread.join(60)
    assert not thread.is_alive()
    hello, opened, measured = (event for event in events if event["kind"] != sampling.ALIVE)
    assert len(events) == 3 + 2 + 2  # a sign of life for each contestant that is warm and each that is measured
    assert (hello["kind"], len(hello["hosts"]), hello["topology"]) == ("hello", 1, "name: x")
    assert [one["algorithm"] for one in opened["contestants"]] == ["auto", "mpi"]
    assert opened["contestants"][0]["chosen"] == "ring"
    assert [sample["index"] for sample in measured["samples"]] == [1, 0]
    assert made == [(10, ["auto", "mpi"])]
    assert len(released) == 2  # before the size and at the end


def test_a_rank_that_does_not_see_the_folder_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = OneRank()
    monkeypatch.setattr(sampling, "Ranks", lambda: ranks)
    serve(lambda elements, algorithms: [], str(tmp_path / "none"))
    assert ranks.aborted
    assert "TMPDIR" in capfd.readouterr().err


def test_events_arrive_once_and_in_order_and_a_line_that_is_half_written_later(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower = Follower(path)
    assert follower.new() == []
    emit(path, "epoch", epoch=1, loss=0.5)
    emit(path, "epoch", epoch=2, loss=0.25)
    assert [event["epoch"] for event in follower.new()] == [1, 2]
    assert follower.new() == []
    for text, events in (('{"kind": "start"}\n{"kind": "en', [{"kind": "start"}]), ('d"}\n', [{"kind": "end"}])):
        with path.open("a") as file:
            file.write(text)
        assert follower.new() == events


def test_nobody_is_told_where_there_is_no_file() -> None:
    emit(None, "end")
