"""Training by replay: what partial rounds summed, from the list of who was included, decides what is learnt."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.convergence.data import Data, Split
from benchmarks.studies.stragglers import accuracy as study, replay
from hvd_ext.simulation.rounds import Rules, active, play, staleness


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(3)
    splits = [
        Split(random.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8), random.integers(0, 4, (count, 3), np.int32))
        for count in (3 * study.RANKS * study.BATCH, 40)
    ]
    return Data(*splits, digest="0" * 16)


def learnt(data, mode, epochs=2):
    task, seen = study.Images(data, seed=1), []
    arrived = study.played(mode, task.steps_per_epoch, epochs).arrived

    def tell(number, weights):
        seen.append([one.copy() for one in weights])

    if mode.lost:
        study.overwritten(
            arrived, task.begin(), task.gradient, mode.rate, task.steps_per_epoch if mode.copied else 0, tell
        )
    else:
        study.kept(arrived, task.begin(), task.gradient, mode.rate, mode.rules.delay, tell)
    return seen


def test_full_rounds_learn_what_plain_training_on_the_joined_batch_learns(data):
    task = study.Images(data, seed=1)
    learner = study.Learner(task.begin(), 6, 0.2)
    for step in range(1, 7):
        mean = task.gradient(learner.weights, step, range(study.RANKS)) / np.float32(study.RANKS)
        learner.apply(mean, step)
    np.testing.assert_array_equal(learnt(data, study.MODES[0])[-1][0], learner.weights)


def test_the_gradient_of_joined_batches_is_the_sum_of_the_ranks(data):
    task = study.Images(data, seed=1)
    weights = task.begin()
    own = sum(task.gradient(weights, 2, [rank]) for rank in range(study.RANKS))
    np.testing.assert_allclose(task.gradient(weights, 2, range(study.RANKS)), own, rtol=1e-3, atol=1e-4)


def test_overwritten_results_of_full_rounds_are_those_of_full_rounds(data):
    kept = learnt(data, study.MODES[0])[-1][0]
    for own in learnt(data, study.Mode("", Rules(), lost=True))[-1]:
        np.testing.assert_allclose(own, kept, rtol=1e-2, atol=1e-4)


def applied(mode, steps=60):
    """The sums that rounds apply, of gradients that are integers and depend on rank and step alone."""
    means, before = [], np.zeros(1, np.float32)

    def gradient(weights, step, ranks):
        return np.array([sum(8 * (1000 * rank + step) for rank in ranks)], np.float32)

    class Sum(study.Learner):
        def apply(self, mean, number):
            means.append(float(mean[0]))

    arrived = play(study.skewed_s(steps), mode.rules, flushed=[steps]).arrived
    return arrived, gradient, means, before, Sum


@pytest.mark.parametrize("mode", [mode for mode in study.MODES if not mode.lost], ids=str)
def test_all_gradients_are_applied_once(mode, monkeypatch):
    steps = 60
    arrived, gradient, means, before, summing = applied(mode, steps)
    monkeypatch.setattr(study, "Learner", summing)
    study.kept(arrived, before, gradient, mode.rate, mode.rules.delay, lambda number, weights: None)
    assert sum(means) == sum(1000 * rank + step for rank in range(study.RANKS) for step in range(1, steps + 1))


def test_a_delayed_step_computes_at_the_weights_before_the_last_result(monkeypatch):
    asked = []

    def gradient(weights, step, ranks):
        asked.append((step, float(weights[0])))
        return np.full(1, study.RANKS, np.float32)

    class Count(study.Learner):
        def apply(self, mean, number):
            self.weights = self.weights + mean

    monkeypatch.setattr(study, "Learner", Count)
    arrived = play(study.skewed_s(5), Rules(delay=1)).arrived
    study.kept(arrived, np.zeros(1, np.float32), gradient, 0.2, 1, lambda number, weights: None)
    assert asked == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_weights_drift_apart_where_results_are_overwritten_and_copies_end_it(data):
    drifting = learnt(data, study.Mode("", Rules("solo"), lost=True), epochs=3)[-1]
    assert any((one != drifting[0]).any() for one in drifting)
    copied = learnt(data, study.Mode("", Rules("solo"), lost=True, copied=True), epochs=3)[-1]
    assert all((one == copied[0]).all() for one in copied)


def test_the_table_has_a_row_for_each_mode():
    trained = [
        {"accuracies": [0.5, share], "times_s": [2.0, 4.0], "active": 8.0, "staleness": 0.0} for share in (0.8, 0.9)
    ]
    full = study.row_of(study.MODES[0], trained, None)
    faster = [{**one, "times_s": [1.0, 2.0]} for one in trained]
    text = study.markdown({"rows": [full, study.row_of(study.MODES[3], faster, full)]})
    assert "| 0.2 | solo | 85.00% | 7.07 | +0.00 | 2.00 | 8.0 | 0.00 |" in text


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
    summed_steps = [0] * table.shape[1]
    for number, row in enumerate(table.tolist(), 1):
        total = np.zeros(2)
        for rank, newest in enumerate(row):
            while summed_steps[rank] < newest:
                summed_steps[rank] += 1
                if not lost or summed_steps[rank] >= number:
                    total += gradient(rank, summed_steps[rank])
        sums.append(total)
    return sums


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("lost", [False, True])
def test_results_are_the_sums_of_what_was_included(case: int, lost: bool) -> None:
    table = arrived(case)
    for divisor in (1, 4):
        results = replay.results(table, gradient, divisor=divisor, lost=lost)
        averages = np.array([np.zeros(2) if result is None else result for result in results])
        np.testing.assert_array_equal(averages * divisor, expected(table, lost))


@pytest.mark.parametrize("case", range(12))
def test_gradients_are_contributions_and_what_is_held(case: int) -> None:
    table = arrived(case)
    rounds, ranks = table.shape
    still_held = replay.held(table, [rounds] * ranks)
    contributed = replay.total(list(replay.results(table, gradient)))
    held_sum = replay.total([gradient(rank, step) for rank, step in still_held])
    total = sum(gradient(rank, step) for rank in range(ranks) for step in range(1, rounds + 1))
    assert contributed is not None
    np.testing.assert_array_equal(contributed + (0 if held_sum is None else held_sum), total)
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
    assert [result is None for result in replay.results(table, gradient)] == [False, True, False]
    nothing = list(replay.results(table, lambda rank, step: None))
    assert nothing == [None, None, None]
    assert replay.held(table, [3, 4]) == [(1, 4)]
    assert staleness(table, [1, 3]).tolist() == [2, 1, 1]
