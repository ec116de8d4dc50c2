"""What the ranks of the training benchmark do, with one process in the place of two ranks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn with its digits: python -m pip install scikit-learn")

import keras

from hvd_ext.bench.training_model import SMALL, Learner, batches, layers
from hvd_ext.bench.training_worker import COMPUTE, Contest, Task, paired, parts_of

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


@pytest.mark.slow
def test_the_deep_model_has_sixty_layers_and_trains() -> None:
    deep = Learner("deep-60", WIDTH, batches(0, 2, BATCH))
    assert len(deep.model.trainable_weights) == 2 * 60
    losses = [deep.step() for _ in range(30)]
    assert losses[-1] < losses[0]


def test_a_contestant_is_an_algorithm_or_an_algorithm_with_buckets() -> None:
    assert [paired("auto", ""), paired("ring", "wfbp")] == ["auto", "ring+wfbp"]
    assert [parts_of("auto"), parts_of("ring+wfbp")] == [("auto", ""), ("ring", "wfbp")]


@pytest.mark.slow
def test_a_model_of_small_tensors_has_as_many_as_its_name_says_and_trains() -> None:
    for model, tensors in SMALL.items():
        assert sum(len(layer.trainable_weights) for layer in keras.Sequential(layers(model, WIDTH)).layers) == tensors
    small = Learner("small-160", WIDTH, batches(0, 2, BATCH))
    before = [np.asarray(weight) for weight in small.model.trainable_weights]
    losses = [small.step() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not any(np.array_equal(*pair) for pair in zip(before, small.model.trainable_weights, strict=True))


def test_models_begin_alike_and_steps_go_through_the_batches() -> None:
    one, two = learner(), learner()
    assert np.array_equal(one.weights(), two.weights())
    losses = [one.step() for _ in range(3)]
    assert losses == [two.step() for _ in range(3)]
    assert len(set(losses)) == 3
    assert not np.array_equal(one.weights(), learner().weights())


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


def test_a_task_survives_the_command_line_and_sets_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("folder", "cnn", 3, 5, {"OMPI_MCA_btl_tcp_links": "2"})
    assert Task.read(task.write()) == task
    name = "OMPI_MCA_btl_tcp_links"
    monkeypatch.setenv(name, "1")
    Task.read(task.write()).set_environment()
    assert os.environ[name] == "2"
