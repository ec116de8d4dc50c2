"""The model of partial rounds: closed forms, the bounds of the paper's Lemma 5.1, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.studies.stragglers import replay
from hvd_ext.errors import InvalidError
from hvd_ext.simulation.rounds import Played, Rules, active, drawn_for, play

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


@pytest.mark.parametrize("case", range(CASES))
def test_random_rounds_keep_the_promises_of_their_rules(case: int) -> None:
    step_s, rules, options = drawn(case)
    found = play(step_s, rules, **options)
    numbers = np.arange(1, found.rounds + 1)[:, None]
    giving = found.steps >= numbers  # a rank that has taken all its steps gives nothing more
    assert ((numbers - found.arrived)[giving] <= rules.staleness).all(), "no gradient is staler than the bound"
    assert len(found.staleness) <= rules.staleness + 1
    assert_each_gradient_is_in_one_round_or_held(found)
    assert_rounds_have_what_they_wait_for(found, rules, options["flushed"])
    assert_rounds_follow_each_other(found, options["round_s"])


def assert_each_gradient_is_in_one_round_or_held(found: Played) -> None:
    included = [one for row in replay.included(found.arrived) for one in row]
    taken = [(rank, step) for rank, step in included if step <= found.steps[rank]]
    everything = [(rank, step) for rank, steps in enumerate(found.steps) for step in range(1, int(steps) + 1)]
    assert sorted([*taken, *replay.held(found.arrived, found.steps)]) == everything
    assert len(included) == len(set(included))


def assert_rounds_have_what_they_wait_for(found: Played, rules: Rules, flushed: list[int]) -> None:
    assert (active(found.arrived) >= 1).all()
    for number in range(1, found.rounds + 1):
        giving = [rank for rank, steps in enumerate(found.steps) if steps >= number]
        on_time = [rank for rank in giving if found.arrived[number - 1, rank] >= number]
        if rules.mode == "full" or rules.staleness == 0 or number in flushed:
            assert on_time == giving
        elif rules.mode == "quorum":
            assert len(on_time) >= min(rules.quorum, len(giving))
        elif rules.mode == "majority" and len(giving) == len(found.steps):
            assert drawn_for(rules.seed, number, len(giving)) in on_time


def assert_rounds_follow_each_other(found: Played, round_s: float) -> None:
    """Steps take the results of their rounds."""
    assert (found.opened_s <= found.begins_s + 1e-12).all()
    np.testing.assert_allclose(found.finished_s - found.begins_s, round_s, atol=1e-12)
    assert (found.begins_s[1:] >= found.finished_s[:-1]).all()
    for rank, steps in enumerate(found.steps):
        ends_s = found.ends_s[rank, :steps]
        np.testing.assert_array_equal(ends_s, np.maximum(found.gradients_s[rank, :steps], found.finished_s[:steps]))
        assert np.isnan(found.ends_s[rank, steps:]).all()
    assert (found.waited_s >= 0).all()


@pytest.mark.parametrize("mode", ["solo", "majority", "quorum"])
def test_a_staleness_of_0_takes_the_time_of_full_rounds(mode: str) -> None:
    step_s = np.random.default_rng(3).random((5, 50))
    full = play(step_s, Rules(), 0.1)
    np.testing.assert_array_equal(play(step_s, Rules(mode, staleness=0), 0.1).finished_s, full.finished_s)
    np.testing.assert_allclose(full.finished_s, np.cumsum(step_s.max(0) + 0.1))


@pytest.mark.parametrize("ranks", [2, 5, 8, 32])
def test_rounds_that_all_begin_together_have_the_closed_forms_of_skewed_ranks(ranks: int) -> None:
    skew_s = 0.02
    first = (np.arange(ranks) + 1.0)[:, None] * skew_s

    def mean_s(rules: Rules) -> float:
        found = play(first, rules)
        return float((found.finished_s[0] - found.gradients_s[:, 0]).clip(0).mean())

    assert mean_s(Rules()) == pytest.approx(skew_s * (ranks - 1) / 2)
    assert mean_s(Rules("solo")) == pytest.approx(0)
    assert mean_s(Rules("quorum", 2)) == pytest.approx(skew_s / ranks)
    over_draws = [mean_s(Rules("majority", seed=seed)) for seed in range(400)]
    assert np.mean(over_draws) == pytest.approx(skew_s * (ranks**2 - 1) / (6 * ranks), rel=0.15)


def test_majority_has_half_of_the_ranks_on_time_and_solo_one() -> None:
    ranks, rounds = 8, 100
    order = np.random.default_rng(0).permuted(np.tile(np.arange(1.0, ranks + 1), (rounds, 1)), axis=1).T
    for rules, on_time in ((Rules("solo"), 1), (Rules("quorum", 6), 6)):
        assert {play(order[:, [column]], rules).active for column in range(rounds)} == {on_time}
    draws = [play(order[:, [0]], Rules("majority", seed=seed)).active for seed in range(600)]
    assert np.mean(draws) == pytest.approx((ranks + 1) / 2, rel=0.06)


def test_a_rank_that_is_slow_for_good_is_waited_for_after_the_bound() -> None:
    step_s = np.full((4, 200), 0.01)
    step_s[2] = 0.1
    assert play(step_s, Rules("solo", staleness=4)).rounds_per_s(after=50) == pytest.approx(10, rel=0.02)
    assert play(step_s[:, :4], Rules("solo", staleness=4)).finished_s[-1] == pytest.approx(0.04)


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


WRONG = [
    (lambda: Rules("some"), r"mode \('some'\): must be one of"),
    (lambda: Rules("quorum", quorum=0), r"quorum \(0\)"),
    (lambda: Rules(staleness=-1), r"staleness \(-1\)"),
    (lambda: Rules(seed=1 << 64), "seed"),
    (lambda: Rules("solo", delay=1), r"delay \(1\) with mode 'solo'"),
    (lambda: Rules(delay=2), r"delay \(2\)"),
    (lambda: play(np.zeros(3), Rules()), r"step_s \(3,\): must be \[ranks, steps\]"),
    (lambda: play(np.full((2, 2), np.nan), Rules()), "step_s: must be finite"),
    (lambda: play(np.zeros((2, 2)), Rules(), -1.0), "round_s: must be finite, 0 or more"),
    (lambda: play(np.zeros((2, 2)), Rules(), steps=[1, 1]), r"steps \[1, 1\]: must have a number in \[1, 2\]"),
    (lambda: play(np.zeros((2, 2)), Rules(), word_s=[0.0]), r"word_s \(1,\): must have a time for each of 2 ranks"),
    (lambda: play(np.zeros((2, 2)), Rules("quorum", 3)), r"quorum \(3\): must be in \[1, 2\]"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_wrong_rules_and_times_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        make()
