"""The timing of contestants and the check of their results, with one rank and no MPI."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvd_ext.bench.sampling import Contestant, Ranks, Task, check, read_task, sample, sum_of, values_of
from hvd_ext.errors import HvdExtError


class OneRank(Ranks):
    """The only rank of a job."""

    def __init__(self) -> None:
        self.rank, self.size, self.meetings = 0, 1, 0

    def meet(self) -> None:
        self.meetings += 1

    def first(self, value: int) -> int:
        return value

    def slowest(self, times: np.ndarray) -> np.ndarray:
        return times


def task(**changes: object) -> Task:
    values = {
        "sizes": (4,),
        "algorithms": ("auto",),
        "repetitions": 3,
        "warmup": 1,
        "sample_s": 1e-4,
        "output": "",
        "events": "",
    }
    return Task(**{**values, **changes})


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_the_right_sum_is_the_sum_of_the_ranks_and_exact_in_any_order(size: int) -> None:
    ranks = [values_of(rank, 1000) for rank in range(size)]
    forward, backward = (np.add.reduce(order) for order in (ranks, ranks[::-1]))
    assert np.array_equal(forward, sum_of(size, 1000))
    assert np.array_equal(backward, sum_of(size, 1000))


def test_ranks_and_places_have_different_values() -> None:
    assert not np.array_equal(values_of(0, 50), values_of(1, 50))
    assert len(np.unique(values_of(0, 50))) == 50


def test_a_wrong_result_is_refused_with_its_place_and_both_values() -> None:
    right = sum_of(2, 100)
    wrong = right.copy()
    wrong[42] += 1
    ring = Contestant("channel", lambda: wrong, "ring")
    with pytest.raises(HvdExtError, match=f"channel ring of 400 bytes: element 42 is {wrong[42]}, must be {right[42]}"):
        check(ring, wrong, right)
    with pytest.raises(HvdExtError, match="shape"):
        check(ring, right[:-1], right)
    check(ring, right, right)


def test_every_contestant_has_its_samples_and_a_turn_begins_with_a_meeting() -> None:
    value, ranks = values_of(0, 10), OneRank()
    contestants = [Contestant("noop", lambda: value, sums=False), Contestant("mpi", lambda: value, chosen="x")]
    rows = sample(contestants, 10, task(), ranks)
    assert [row["what"] for row in rows] == ["noop", "mpi"]
    assert all(len(row["samples_s"]) == 3 and min(row["samples_s"]) > 0 and row["nbytes"] == 40 for row in rows)
    assert ranks.meetings == 2 + 2 * 3


def test_a_result_that_goes_wrong_in_the_middle_is_found() -> None:
    value, calls = values_of(0, 10), []

    def flaky() -> np.ndarray:
        calls.append(1)
        return value + (len(calls) == 4)

    with pytest.raises(HvdExtError, match="must be"):
        sample([Contestant("eager", flaky)], 10, task(sample_s=0.0), OneRank())


def test_the_task_survives_its_file(tmp_path: Path) -> None:
    import dataclasses

    path = tmp_path / "task"
    path.write_text(json.dumps(dataclasses.asdict(task())))
    assert read_task(str(path)) == task()
