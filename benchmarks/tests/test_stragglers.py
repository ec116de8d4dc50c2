"""The straggler benchmark without jobs: workloads, how rows are compared with the model, what is learnt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.studies.stragglers.jobs import LEAD, Model, Sample, rows_of
from benchmarks.studies.stragglers.results import staleness
from benchmarks.studies.stragglers.worker import MODES, STALENESS, Hyperplane, Learner, keywords_of
from benchmarks.studies.stragglers.workloads import WORKLOADS
from hvd_ext.simulation.rounds import Rules, play

RANKS, STEPS = 4, 30
UNDELAYED_S, ROUND_S = 0.004, 0.001
PLACE = {"workload": "language", "ranks": RANKS, "hosts": 1, "ranks_per_host": [RANKS], "seed": 3, "staleness": 4}


def slept_s(workload: str, ranks: int = 8, steps: int = 500, seed: int = 3) -> np.ndarray:
    slept = WORKLOADS[workload].slept_s
    return np.array([[slept(seed, step, rank, ranks) for step in range(steps)] for rank in range(ranks)])


def sample(mode: str) -> Sample:
    """A turn that goes exactly as the model says."""
    times_s = slept_s("language", RANKS, LEAD + STEPS)
    rules = Rules() if mode in ("full", "horovod") else Rules(mode, 2, STALENESS, seed=5, before=7)
    found = play(times_s + (UNDELAYED_S - ROUND_S), rules, ROUND_S)
    rounds = None
    if mode not in ("full", "horovod"):
        rounds = {"mode": mode, "quorum": 2, "seed": 5, "before": 7}
        rounds |= {"arrived": found.arrived.tolist(), "round_s": [ROUND_S] * (LEAD + STEPS)}
    return Sample(found.finished_s, times_s, rounds)


def rows(wrong: str = "", modes: tuple[str, ...] = ("full", "solo", "majority", "quorum", "horovod")) -> list[Any]:
    ended = {mode: {"loss": 0.3, "wrong": ["rank 1: its weights"] if mode == wrong else []} for mode in modes}
    return rows_of(PLACE, {mode: [sample(mode), sample(mode)] for mode in modes}, ended)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_times_depend_on_the_seed_the_step_and_the_rank_alone(workload: str) -> None:
    first = slept_s(workload, steps=40)
    np.testing.assert_array_equal(first, slept_s(workload, steps=40))
    assert (first != slept_s(workload, steps=40, seed=4)).any()
    assert (first > 0).all()


@pytest.mark.parametrize("delay_ms", [200, 300, 400])
def test_one_rank_is_delayed_in_each_step_and_each_rank_is_now_and_then(delay_ms: int) -> None:
    times_s = slept_s(f"hyperplane-{delay_ms}")
    late = times_s > 0.1
    assert (late.sum(0) == 1).all() and late.any(1).all()
    assert times_s[~late].max() <= 0.060
    np.testing.assert_allclose(times_s[late] - times_s[~late].min(), delay_ms / 1000)


def test_severe_delays_are_shifted_by_one_rank_after_each_step() -> None:
    times_s = slept_s("severe", steps=20)
    np.testing.assert_allclose(np.sort(times_s, 0)[:, 0], np.linspace(0.050, 0.400, 8))
    np.testing.assert_array_equal(times_s[1:, :-1], times_s[:-1, 1:])


@pytest.mark.parametrize(
    ("workload", "told_ms"),
    [("video", (201, 3410, 1235, 706)), ("language", (179, 3482, 475, 144)), ("cloud", (399, 1892, 454, 116))],
)
def test_spread_times_have_a_tenth_of_the_papers_numbers(workload: str, told_ms: tuple[int, ...]) -> None:
    times_ms = 1e4 * slept_s(workload, steps=1000)
    least, most, mean, deviation = told_ms
    assert times_ms.min() >= least and times_ms.max() <= most
    assert times_ms.mean() == pytest.approx(mean, rel=0.03)
    assert times_ms.std() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_keywords_of_the_optimizer(mode: str) -> None:
    from hvd_ext.options.gradients import GradientOptions

    options = GradientOptions(**keywords_of(mode, 8))
    assert options.partial == (mode not in ("full", "delay"))
    assert options.delay == (mode == "delay")
    assert options.quorum == (4 if mode == "quorum" else None)


def test_the_model_takes_the_time_beyond_the_longest_sleep_and_that_of_a_round() -> None:
    model = Model.of({mode: [sample(mode)] for mode in ("full", "solo")})
    assert (model.undelayed_s, model.round_s) == (pytest.approx(UNDELAYED_S), pytest.approx(ROUND_S))
    assert Model.of({"full": [sample("full")]}).round_s == 0


def test_rounds_that_go_as_played_have_the_speed_up_that_is_played() -> None:
    found = {row["mode"]: row for row in rows()}
    for mode in ("full", "solo", "majority", "quorum"):
        assert found[mode]["x_played"] == pytest.approx(1.0)
        assert found[mode]["step_seconds_mean"] == pytest.approx(found[mode]["played_seconds_mean"])
        assert len(found[mode]["samples"]) == found[mode]["steps"] == 2 * STEPS
    assert found["solo"]["x_full"] > found["majority"]["x_full"] > found["full"]["x_full"] == 1.0
    assert found["solo"]["x_horovod"] == pytest.approx(found["solo"]["x_full"])
    assert found["horovod"]["x_full_played"] is None
    assert found["solo"]["active_ranks"] == found["solo"]["active_ranks_played"] == 1.0
    assert found["quorum"]["active_ranks"] == 2.0
    assert (found["quorum"]["quorum"], found["majority"]["quorum"]) == ([2, 2], None)
    assert len(found["solo"]["stale_gradients"]) <= STALENESS + 1
    assert (staleness(found["solo"]) or 0) > (staleness(found["quorum"]) or 0) > 0
    assert staleness(found["full"]) is None


def test_a_slower_mode_has_less_than_the_speed_up_that_is_played() -> None:
    slow = sample("solo")
    slow.over_s[:] *= 1.25
    ended = {mode: {"loss": loss, "wrong": []} for mode, loss in (("full", 0.4), ("solo", 0.5))}
    _, row = rows_of(PLACE, {"full": [sample("full")], "solo": [slow]}, ended)
    assert row["x_played"] == pytest.approx(0.8)
    assert row["loss_over_full"] == pytest.approx(1.25)


def test_the_hyperplane_is_learnt_up_to_its_noise() -> None:
    learner = Learner(Hyperplane.of(1, 0, 32, 64))
    before = learner.loss()
    for _ in range(80):
        learner.step()
    assert before == pytest.approx(1.25, rel=0.1)
    assert learner.loss() == pytest.approx(0.25, rel=0.1)


def test_ranks_learn_the_same_hyperplane_from_data_of_their_own() -> None:
    first, second = (Hyperplane.of(1, rank, 8, 4) for rank in (0, 1))
    assert (first.batches[0][0].numpy() != second.batches[0][0].numpy()).all()
    np.testing.assert_array_equal(first.validation[1], second.validation[1])
