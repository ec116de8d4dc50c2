"""The training benchmark: what its ranks do, with one process in the place of two, and how rows are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn with its digits: python -m pip install scikit-learn")

from hvd_ext.bench.training import against, check_alike
from hvd_ext.bench.training_model import SMALL, Learner, batches, layers
from hvd_ext.bench.training_worker import COMPUTE, Contest, named, parts_of
from hvd_ext.runner.launcher import JobError
from tests.unit.bench.rows import training_row, training_rows

WIDTH, BATCH = 8, 16


class TwoRanks:
    """Rank 0 of two that do the same; the other one answers what this one answers, or something else once."""

    def __init__(self, first: Any = None) -> None:
        self.rank, self.size = 0, 2
        self.other: list[Any] = []
        self._first = first

    def meet(self) -> None:
        """Nobody has to be waited for."""

    def gather(self, value: Any) -> list[Any]:
        """Give the value of both ranks."""
        return [value, self.other.pop() if self.other else value]

    def average(self, values: Any) -> Any:
        """Give the average, which is the own value, or what the test wants the first weights to be."""
        return values if self._first is None else self._first


def learner(rank: int = 0) -> Learner:
    return Learner("mlp", WIDTH, batches(rank, 2, BATCH))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bytes": 4}, "bytes: 4"),
        ({"start": "b"}, "start: b"),
        ({"first_losses": [2.0, 2.1]}, "rank 1 is 2.1, ours has 2.5"),
    ],
)
def test_jobs_that_train_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    opened = {"bytes": 8, "start": "a", "first_losses": [2.0, 2.5]}
    check_alike(["ours", "theirs"], [opened, dict(opened)])
    with pytest.raises(JobError, match=words):
        check_alike(["ours", "theirs"], [opened, {**opened, **changes}])


def test_speeds_are_compared_with_both_horovods() -> None:
    rows = {one["algorithm"]: one for one in training_rows(2, 2)}
    assert (rows["auto"]["against_horovod"], rows["auto"]["against_horovod_links2"]) == (2.0, pytest.approx(1.8))
    assert rows["horovod"]["against_horovod"] == 1.0
    assert rows["compute"]["against_horovod"] is None
    (alone,) = against([training_row("ring")])
    assert (alone["against_horovod"], alone["against_horovod_links2"]) == (None, None)


def test_ranks_have_different_digits_and_every_contestant_the_same() -> None:
    mine, again, other = batches(0, 2, BATCH), batches(0, 2, BATCH), batches(1, 2, BATCH)
    assert np.array_equal(mine[0][0], again[0][0])
    assert not np.array_equal(mine[0][0], other[0][0])
    assert len(mine) == -(-899 // BATCH)
    assert {tuple(images.shape) for images, _ in mine} == {(BATCH, 8, 8, 1)}
    assert max(float(np.max(images)) for images, _ in mine) == 1.0


@pytest.mark.parametrize(
    ("model", "width", "parameters"), [("mlp", 1024, 4_275_210), ("cnn", 512, 1_276_298), ("deep-60", 40, 1_220_842)]
)
def test_the_models_have_the_size_that_the_command_says(model: str, width: int, parameters: int) -> None:
    assert Learner(model, width, batches(0, 2, BATCH)).model.count_params() == parameters


def test_models_of_small_tensors_have_as_many_as_their_name_says() -> None:
    for model, tensors in SMALL.items():  # without the input and the layer that flattens, each has two
        assert 2 * (len(layers(model, WIDTH)) - 2) == tensors


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deep-60", "small-160"])
def test_models_of_many_layers_train(model: str) -> None:
    many = Learner(model, WIDTH, batches(0, 2, BATCH))
    assert len(many.model.trainable_weights) == {"deep-60": 120, "small-160": 160}[model]
    before = [np.asarray(weight) for weight in many.model.trainable_weights]
    losses = [many.step() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not any(np.array_equal(*pair) for pair in zip(before, many.model.trainable_weights, strict=True))


def test_models_begin_alike_and_steps_go_through_the_batches() -> None:
    one, two = learner(), learner()
    assert np.array_equal(one.weights(), two.weights())
    losses = [one.step() for _ in range(3)]
    assert losses == [two.step() for _ in range(3)]
    assert len(set(losses)) == 3
    assert not np.array_equal(one.weights(), learner().weights())


def test_a_contestant_is_an_algorithm_or_an_algorithm_with_buckets() -> None:
    for algorithm, options in (("auto", {}), ("ring", {"buckets": "wfbp", "compression": "topk:density=0.01"})):
        assert parts_of(named(algorithm, **options)) == (algorithm, options)
    assert named("auto") == "auto" and named("auto", "wfbp") == "auto+wfbp"


def test_a_contestant_that_averages_is_right_and_is_measured() -> None:
    contest = Contest(learner(), TwoRanks())
    contest.enter("ring", {"": learner()}, lambda _: "ring")
    assert [(fact["algorithm"], fact["wrong"]) for fact in contest.facts] == [(COMPUTE, []), ("ring", [])]
    assert len(contest.measure(1, 3)) == 3
    assert contest.check(1) == []


def test_a_first_update_that_is_not_the_average_is_found() -> None:
    right = learner()
    right.step()
    begun = learner().weights()
    contest = Contest(learner(), TwoRanks(first=begun + (right.weights() - begun) * np.float32(1.1)))
    contest.enter("ring", {"": learner()}, lambda _: "")
    assert "rank 0: the first update is not the average" in contest.facts[1]["wrong"][0]


def test_a_contestant_with_other_digits_or_other_weights_is_found() -> None:
    contest = Contest(learner(), TwoRanks())
    contest.enter("ring", {"": learner(rank=1)}, lambda _: "")
    assert any("the loss of the first step" in words for words in contest.facts[1]["wrong"])
    late = learner()
    late.step()
    contest.enter("ring", {"": late}, lambda _: "")
    assert any("did not begin with the same weights" in words for words in contest.facts[2]["wrong"])


def test_ranks_that_end_with_other_weights_or_without_a_finite_loss_are_found() -> None:
    ranks = TwoRanks()
    contest = Contest(learner(), ranks)
    broken = learner()
    contest.enter("ring", {"": broken}, lambda _: "")
    ranks.other = [("another digest", False)]
    assert contest.check(1) == [
        "rank 1: a loss or a weight is not finite",
        "rank 1: its weights differ from those of rank 0 after the last step",
    ]
    broken.model.trainable_weights[0].assign(np.full((64, WIDTH), np.nan, np.float32))
    contest.measure(1, 1)
    assert "rank 0: a loss or a weight is not finite" in contest.check(1)


def test_of_two_ways_the_faster_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(learner(), TwoRanks())
    ways = {"slow": learner(), "fast": learner()}
    monkeypatch.setattr(contest, "_timed", lambda one, steps: ([2.0 if one is ways["slow"] else 1.0], [0.0]))
    contest.enter("horovod", ways, lambda _: "")
    fact = contest.facts[1]
    assert (fact["way"], fact["ways"]) == ("fast", {"slow": 2.0, "fast": 1.0})
