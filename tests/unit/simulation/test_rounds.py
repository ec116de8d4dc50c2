"""The model of partial rounds: closed forms, the bounds of the paper's Lemma 5.1, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.simulation import replay
from hvd_ext.simulation.rounds import Played, Rules, drawn_for, play

CASES = 60


def drawn(case: int) -> tuple[np.ndarray, Rules, dict[str, Any]]:
    """Random times of steps with any rules; now and then ranks that end sooner, words that take time, full rounds."""
    random = np.random.default_rng(case)
    ranks, most = int(random.integers(1, 10)), int(random.integers(1, 40))
    step_s = random.choice([0.0, 1e-3, 1e-2, 0.1], (ranks, most)) * random.random((ranks, most))
    mode = str(random.choice(["full", "solo", "majority", "quorum"]))
    rules = Rules(mode, int(random.integers(1, ranks + 1)), int(random.integers(0, 6)), seed=case)
    steps = random.integers(1, most + 1, ranks)
    steps[random.integers(ranks)] = most
    word_s = [0.0, *random.random(ranks - 1) * 1e-3]
    options = {
        "round_s": float(random.choice([0.0, 2e-3])),
        "word_s": word_s if case % 2 else 0.0,
        "steps": steps.tolist() if case % 3 == 0 else None,
        "flushed": random.integers(1, most + 1, 2).tolist() if case % 5 == 0 else (),
    }
    return step_s, rules, options


def played(case: int) -> tuple[Played, Rules, dict[str, Any]]:
    step_s, rules, options = drawn(case)
    return play(step_s, rules, **options), rules, options


@pytest.mark.parametrize("case", range(CASES))
def test_no_gradient_is_staler_than_the_bound_and_no_rank_is_further_behind(case: int) -> None:
    found, rules, _ = played(case)
    numbers = np.arange(1, found.rounds + 1)[:, None]
    behind = numbers - found.arrived
    giving = found.steps >= numbers  # a rank that has taken all its steps gives nothing more
    assert (behind[giving] <= rules.staleness).all()
    assert len(found.staleness) <= rules.staleness + 1


@pytest.mark.parametrize("case", range(CASES))
def test_each_gradient_is_in_one_round_or_still_held(case: int) -> None:
    found, _, _ = played(case)
    given = [one for row in replay.included(found.arrived) for one in row]
    own = [(rank, step) for rank, step in given if step <= found.steps[rank]]
    everything = [(rank, step) for rank, steps in enumerate(found.steps) for step in range(1, int(steps) + 1)]
    assert sorted([*own, *found.held]) == everything
    assert len(given) == len(set(given))


@pytest.mark.parametrize("case", range(CASES))
def test_rounds_have_the_gradients_that_they_wait_for(case: int) -> None:
    found, rules, options = played(case)
    active = replay.active(found.arrived)
    assert (active >= 1).all()
    for number in range(1, found.rounds + 1):
        giving = [rank for rank, steps in enumerate(found.steps) if steps >= number]
        on_time = [rank for rank in giving if found.arrived[number - 1, rank] >= number]
        if rules.mode == "full" or rules.staleness == 0 or number in options["flushed"]:
            assert on_time == giving
        elif rules.mode == "quorum":
            assert len(on_time) >= min(rules.quorum, len(giving))
        elif rules.mode == "majority" and len(giving) == len(found.steps):
            assert drawn_for(rules.seed, number, len(giving)) in on_time


@pytest.mark.parametrize("case", range(CASES))
def test_rounds_follow_each_other_and_steps_take_their_results(case: int) -> None:
    found, _, options = played(case)
    assert (found.opened_s <= found.begins_s + 1e-12).all()
    np.testing.assert_allclose(found.overs_s - found.begins_s, options["round_s"], atol=1e-12)
    assert (found.begins_s[1:] >= found.overs_s[:-1]).all()
    for rank, steps in enumerate(found.steps):
        own = found.ends_s[rank, :steps]
        np.testing.assert_array_equal(own, np.maximum(found.gradients_s[rank, :steps], found.overs_s[:steps]))
        assert np.isnan(found.ends_s[rank, steps:]).all()
    assert (found.waited_s >= 0).all()


@pytest.mark.parametrize("mode", ["solo", "majority", "quorum"])
def test_a_staleness_of_0_takes_the_time_of_full_rounds(mode: str) -> None:
    step_s = np.random.default_rng(3).random((5, 50))
    full = play(step_s, Rules(), 0.1)
    np.testing.assert_array_equal(play(step_s, Rules(mode, staleness=0), 0.1).overs_s, full.overs_s)
    np.testing.assert_allclose(full.overs_s, np.cumsum(step_s.max(0) + 0.1))


@pytest.mark.parametrize("ranks", [2, 5, 8, 32])
def test_rounds_that_all_begin_together_have_the_closed_forms_of_skewed_ranks(ranks: int) -> None:
    skew_s = 0.02
    first = (np.arange(ranks) + 1.0)[:, None] * skew_s

    def mean_s(rules: Rules) -> float:
        found = play(first, rules)
        return float((found.overs_s[0] - found.gradients_s[:, 0]).clip(0).mean())

    assert mean_s(Rules()) == pytest.approx(skew_s * (ranks - 1) / 2)
    assert mean_s(Rules("solo")) == pytest.approx(0)
    assert mean_s(Rules("quorum", 2)) == pytest.approx(skew_s / ranks)
    over_draws = [mean_s(Rules("majority", seed=seed)) for seed in range(400)]
    assert np.mean(over_draws) == pytest.approx(skew_s * (ranks**2 - 1) / (6 * ranks), rel=0.15)


def test_majority_has_half_of_the_ranks_on_time_and_solo_one() -> None:
    ranks, rounds = 8, 1000
    order = np.random.default_rng(0).permuted(np.tile(np.arange(1.0, ranks + 1), (rounds, 1)), axis=1).T

    def active(rules: Rules) -> float:
        on_time = [play(order[:, [column]], rules).active for column in range(100)]
        return float(np.mean(on_time))

    assert active(Rules("solo")) == 1
    draws = [play(order[:, [0]], Rules("majority", seed=seed)).active for seed in range(1000)]
    assert np.mean(draws) == pytest.approx((ranks + 1) / 2, rel=0.05)
    assert active(Rules("quorum", 6)) == 6


def test_a_rank_that_is_slow_for_good_is_waited_for_after_the_bound() -> None:
    step_s = np.full((4, 200), 0.01)
    step_s[2] = 0.1
    assert play(step_s, Rules("solo", staleness=4)).rounds_per_s(after=50) == pytest.approx(10, rel=0.02)
    assert play(step_s[:, :4], Rules("solo", staleness=4)).overs_s[-1] == pytest.approx(0.04)


def test_a_delay_hides_what_is_shorter() -> None:
    for computing_s, round_s in ((0.1, 0.1), (0.1, 0.03), (0.02, 0.1)):
        step_s = np.full((3, 100), computing_s)
        late, full = play(step_s, Rules(delay=1), round_s), play(step_s, Rules(), round_s)
        assert full.rounds_per_s() == pytest.approx(1 / (computing_s + round_s))
        assert late.rounds_per_s(after=10) == pytest.approx(1 / max(computing_s, round_s))


def test_a_delayed_rank_in_turn_costs_solo_nothing() -> None:
    ranks, steps = 8, 400
    step_s = np.full((ranks, steps), 0.05)
    step_s[np.random.default_rng(1).integers(ranks, size=steps), np.arange(steps)] += 0.2
    full, solo = play(step_s, Rules()), play(step_s, Rules("solo", staleness=4))
    assert full.rounds_per_s() == pytest.approx(4)
    assert solo.rounds_per_s() / full.rounds_per_s() > 2
    assert len(solo.staleness) <= 5


def test_draws_are_those_of_the_engine_and_even() -> None:
    counts = np.bincount([drawn_for(7, number, 6) for number in range(6000)], minlength=6)
    assert counts.min() > 850
    assert counts.max() < 1150
    assert [drawn_for(1, number, 8) for number in range(1, 9)] == [drawn_for(1, number, 8) for number in range(1, 9)]
    assert [drawn_for(1, number, 8) for number in range(20)] != [drawn_for(2, number, 8) for number in range(20)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "some"}, "mode \\('some'\\): must be one of"),
        ({"mode": "quorum", "quorum": 0}, "quorum \\(0\\)"),
        ({"staleness": -1}, "staleness \\(-1\\)"),
        ({"seed": 1 << 64}, "seed"),
        ({"mode": "solo", "delay": 1}, "delay \\(1\\) with mode 'solo'"),
        ({"delay": 2}, "delay \\(2\\)"),
    ],
)
def test_wrong_rules_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Rules(**arguments)


@pytest.mark.parametrize(
    ("step_s", "options", "words"),
    [
        (np.zeros(3), {}, r"step_s \(3,\): must be \[ranks, steps\]"),
        (np.full((2, 2), np.nan), {}, "step_s: must be finite"),
        (np.zeros((2, 2)), {"round_s": -1.0}, "round_s: must be finite, 0 or more"),
        (np.zeros((2, 2)), {"steps": [1, 1]}, r"steps \[1, 1\]: must have a number in \[1, 2\]"),
        (np.zeros((2, 2)), {"word_s": [0.0]}, r"word_s \(1,\): must have a time for each of 2 ranks"),
    ],
)
def test_wrong_times_are_refused(step_s: np.ndarray, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        play(step_s, Rules(), **options)
    with pytest.raises(InvalidError, match=r"quorum \(3\): must be in \[1, 2\]"):
        play(np.zeros((2, 2)), Rules("quorum", 3))
