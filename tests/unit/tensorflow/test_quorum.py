"""The quorum that sync="auto" chooses, from times that rank 0 has seen."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.engine.partial import Rounds
from hvd_ext.simulation import rounds as simulated
from hvd_ext.tensorflow.gradients import quorum


def seen(step_s: np.ndarray, rules: simulated.Rules, round_s: float = 0.001) -> Rounds:
    """What rank 0 knows of rounds that are played with these times of steps."""
    played = simulated.play(step_s, rules, round_s)
    zeros = np.zeros(played.rounds)
    began_s, ended_s, announced_s = (
        10.0 + times for times in (played.begins_s, played.finished_s, played.gradients_s.T)
    )
    numbers = np.arange(1, played.rounds + 1)
    return Rounds(numbers, began_s, ended_s, zeros, played.arrived, np.zeros_like(played.arrived), announced_s)


def random_times(ranks: int, steps: int, seed: int) -> np.ndarray:
    """One random rank is late by a second in each step."""
    random = np.random.default_rng(seed)
    times = np.full((ranks, steps), 0.1)
    times[random.integers(0, ranks, steps), np.arange(steps)] += 1.0
    return times


@pytest.mark.parametrize("rules", [simulated.Rules("full"), simulated.Rules("quorum", quorum=3)])
def test_the_times_of_steps_are_found_again(rules: simulated.Rules) -> None:
    times = random_times(4, 60, 1)
    found = quorum.computing_s(seen(times, rules))
    np.testing.assert_allclose(found, times[:, 1:], atol=1e-9)


def test_a_gradient_that_has_not_come_leaves_its_step_out() -> None:
    recent = seen(random_times(4, 60, 1), simulated.Rules("full"))
    recent.announced_s[30, 2] = 0.0
    assert quorum.computing_s(recent).shape == (4, 57)


def test_one_random_late_rank_is_not_waited_for() -> None:
    speeds = quorum.speeds_of(seen(random_times(8, 100, 2), simulated.Rules("full")), staleness=4)
    assert list(speeds) == list(range(1, 9))
    assert quorum.chosen(speeds) < 8
    assert speeds[quorum.chosen(speeds)] > 1.5 * speeds[8]
    assert f"waits for {quorum.chosen(speeds)} of 8 gradients" in quorum.why(speeds)


def test_equal_ranks_are_all_waited_for() -> None:
    speeds = quorum.speeds_of(seen(np.full((4, 100), 0.1), simulated.Rules("full")), staleness=4)
    assert quorum.chosen(speeds) == 4


def test_a_rank_that_is_slow_for_good_is_waited_for() -> None:
    times = np.full((4, 400), 0.1)
    times[2] = 0.3  # the bound of the staleness makes every mode as slow as this rank
    speeds = quorum.speeds_of(seen(times, simulated.Rules("full")), staleness=1)
    assert quorum.chosen(speeds) == 4


def test_too_few_times_choose_nothing() -> None:
    assert quorum.speeds_of(seen(random_times(4, 10, 3), simulated.Rules("full")), staleness=4) == {}


def test_many_ranks_try_powers_of_two() -> None:
    speeds = quorum.speeds_of(seen(random_times(12, 40, 4), simulated.Rules("full")), staleness=4)
    assert list(speeds) == [1, 2, 4, 8, 12]
