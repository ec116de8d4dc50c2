"""What partial rounds summed, replayed from the list of who was included."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.stragglers import replay
from hvd_ext.simulation.rounds import Rules, active, play, staleness


def gradient(rank: int, step: int) -> np.ndarray:
    """Whole numbers, of which no two ranks or steps have the same."""
    return np.array([100 * (rank + 1) + step, (-1) ** step * (rank + 1)], np.float64)


def arrived(case: int, ranks: int = 4, rounds: int = 60) -> np.ndarray:
    random = np.random.default_rng(case)
    mode = ["solo", "majority", "quorum"][case % 3]
    return play(random.exponential(1.0, (ranks, rounds)), Rules(mode, 2, 1 + case % 4, seed=case)).arrived


def expected(table: np.ndarray, lost: bool) -> list[np.ndarray]:
    """The sums of each round, rank by rank, as one would do it by hand."""
    sums = []
    given = [0] * table.shape[1]
    for number, row in enumerate(table.tolist(), 1):
        total = np.zeros(2)
        for rank, newest in enumerate(row):
            while given[rank] < newest:
                given[rank] += 1
                if not lost or given[rank] >= number:
                    total += gradient(rank, given[rank])
        sums.append(total)
    return sums


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("lost", [False, True])
def test_results_are_the_sums_of_what_was_included(case: int, lost: bool) -> None:
    table = arrived(case)
    for divisor in (1, 4):
        results = replay.results(table, gradient, divisor=divisor, lost=lost)
        found = np.array([np.zeros(2) if result is None else result for result in results])
        np.testing.assert_array_equal(found * divisor, expected(table, lost))


@pytest.mark.parametrize("case", range(12))
def test_gradients_are_contributions_and_what_is_held(case: int) -> None:
    table = arrived(case)
    rounds, ranks = table.shape
    still_held = replay.held(table, [rounds] * ranks)
    contributed = replay.total(list(replay.results(table, gradient)))
    held = replay.total([gradient(*one) for one in still_held])
    total = sum(gradient(rank, step) for rank in range(ranks) for step in range(1, rounds + 1))
    assert contributed is not None
    np.testing.assert_array_equal(contributed + (0 if held is None else held), total)
    counts = staleness(table)
    assert counts.sum() == rounds * ranks - len(still_held)
    assert active(table).sum() == counts[0]


def test_late_gradients_are_lost_where_results_are_overwritten() -> None:
    table = np.array([[1, 0], [2, 0], [3, 3], [4, 4]])
    assert list(replay.included(table)) == [[(0, 1)], [(0, 2)], [(0, 3), (1, 1), (1, 2), (1, 3)], [(0, 4), (1, 4)]]
    lost = [[(0, 1)], [(0, 2)], [(0, 3), (1, 3)], [(0, 4), (1, 4)]]
    assert list(replay.included(table, lost=True)) == lost
    # rank 1 gave step 1 after round 2: its steps 1 and 2 find the result of round 2
    assert replay.newest(table).tolist() == [[1, 2], [2, 2], [3, 3], [4, 4]]
    assert staleness(table).tolist() == [6, 1, 1]


def test_a_round_without_a_gradient_has_no_result() -> None:
    table = np.array([[1, 0], [1, 0], [3, 3]])
    assert [one is None for one in replay.results(table, gradient)] == [False, True, False]
    nothing = list(replay.results(table, lambda rank, step: None))
    assert nothing == [None, None, None]
    assert replay.held(table, [3, 4]) == [(1, 4)]
    assert staleness(table, [1, 3]).tolist() == [2, 1, 1]
