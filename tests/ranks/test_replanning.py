"""Buckets that are planned anew during the training: sums, weights, residuals, checkpoints, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError, PlanError
from hvd_ext.options import Options
from hvd_ext.planning.bucket_layout import Layout
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.tensorflow.gradients import registration, replanning
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.replanning import Replanning, Review, following
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import FEATURES, TARGETS, data, fill, values

LAYERS = 6
FEW = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins jobs that plan anew every few steps, and switch whenever the plan is another one."""
    monkeypatch.setattr(replanning, "WORTH_SWITCHING", -1e9)

    def begin(every: int = 2, **options: Any) -> None:
        hvd.shutdown()
        hvd.init(Options(replan_every=every, stall_fatal_s=120.0, **options))

    yield begin
    hvd.shutdown()
    hvd.init()


class Turns:
    """Plans with another bucketer at each time, in turn, so that each time is a switch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.planned: list[str] = []
        lay_out = registration.layout

        def in_turn(*arguments: Any, times: StepTimes | None = None, **options: Any) -> Layout:
            if times is None:
                return lay_out(*arguments, times=None, **options)
            name = names[len(self.planned) % len(names)]
            self.planned.append(name)
            return lay_out(*arguments, times=times, **{**options, "buckets": name})

        monkeypatch.setattr(registration, "layout", in_turn)


def model(**options: Any) -> keras.Model:
    layers = [keras.layers.Dense(8, activation="relu") for _ in range(LAYERS)]
    made = keras.Sequential([keras.layers.Input((FEATURES,)), *layers, keras.layers.Dense(TARGETS)])
    fill(made.weights)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125, momentum=0.5), **options)
    made.compile(optimizer, "mse", steps_per_execution=4)
    return made


def fit(made: keras.Model, steps: int = 16) -> list[np.ndarray]:
    pairs = [data(hvd.rank(), 4, step) for step in range(steps)]
    x, y = (np.concatenate(column) for column in zip(*pairs, strict=True))
    made.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return values(made.weights)


def reviews(optimizer: Any) -> list[Review]:
    (every,) = optimizer._hvd_ext_reducer.sets
    return next(reversed(every.replannings.values())).reviews


def test_the_steps_after_which_buckets_are_planned_anew() -> None:
    assert [following(step, 2000) for step in (0, 19, 20, 200, 1999, 2000)] == [20, 20, 200, 2000, 2000, 4000]
    assert following(0, 7) == 7
    assert following(14, 7) == 20
    assert following(5, 0) is None


@FEW
def test_a_model_trains_alike_in_any_buckets_and_is_not_traced_again(
    anew: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    anew(every=0)
    still = fit(model())
    turns = Turns(monkeypatch, ("wfbp", "single", "optimal", "by_size", "mgwfbp"))
    anew()
    made = model(bucket_nbytes=300)
    traced = []
    plain = made.compute_loss

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        traced.append(1)
        return plain(*arguments, **options)

    made.compute_loss = compute_loss
    changed = fit(made)
    for one, other in zip(still, changed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert len(traced) <= 5  # the function of four steps, and what Keras traces besides it
    assert len(turns.planned) == (6 if size > 1 else 0)
    if size == 1:
        return
    digests = hvd.allgather_object([value.tobytes().hex() for value in changed])
    assert all(digest == digests[0] for digest in digests)
    found = reviews(made.optimizer)
    assert [review.step for review in found] == [4, 6, 8, 10, 12, 14]  # after 2 steps none counts
    assert sum(review.switched for review in found) >= 2
    assert hvd.allgather_object([str(review.layout.digest) for review in found])[0] == [
        str(review.layout.digest) for review in found
    ]


def opened(names: dict[str, tuple[int, ...]], **options: Any) -> tuple[Channel, Replanning]:
    from hvd_ext.job import runtime
    from hvd_ext.planning.tensors import Tensor

    tensors = [Tensor(name, shape, "float32") for name, shape in names.items()]
    channel = registration.open("anew", tensors, runtime.current().options.replace(op=hvd.Sum, **options))
    return channel, Replanning(channel, runtime.current(), name="anew")


@pytest.mark.parametrize("traced", [False, True])
def test_sums_are_exact_whatever_the_buckets(
    anew: Any, monkeypatch: pytest.MonkeyPatch, traced: bool, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    Turns(monkeypatch, ("single", "wfbp", "optimal"))
    anew(every=3)
    shapes = {"a": (7, 5), "b": (), "c": (40_009,), "d": (0, 2), "e": (300,)}
    channel, planning = opened(shapes, bucket_nbytes=400)
    reduce = tf.function(channel.reduce) if traced else channel.reduce
    for step in range(14):
        own = [tf.fill(shape, float(step * 8 + rank + place)) for place, shape in enumerate(shapes.values())]
        for place, (got, shape) in enumerate(zip(reduce(own), shapes.values(), strict=True)):
            expected = sum(step * 8 + other + place for other in range(size))
            np.testing.assert_array_equal(got, np.full(shape, expected, np.float32))
    assert [review.step for review in planning.reviews] == [6, 9, 12]
    assert planning.steps == 14
    channel.close()


@FEW
def test_a_layout_is_written_and_forced_and_a_wrong_one_is_refused(anew: Any, tmp_path: Path, size: int) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    anew()
    made = model(buckets="wfbp")
    fit(made)
    if hvd.rank() == 0:
        text = hvd.explain(made.optimizer, folder / "layout.json")
        assert "runners-up" in text
        assert "buckets by wfbp" in text
    hvd.barrier()
    forced = model(buckets=folder / "layout.json")
    fit(forced)
    (channel,) = forced.optimizer._hvd_ext_reducer.channels
    (before,) = made.optimizer._hvd_ext_reducer.channels
    assert channel.layout.described() == before.layout.described()
    assert not forced.optimizer._hvd_ext_reducer.sets[0].replannings
    values = json.loads((folder / "layout.json").read_text())
    values["buckets"].pop()
    hvd.barrier()
    if hvd.rank() == size - 1:
        (folder / "layout.json").write_text(json.dumps(values))
    hvd.barrier()
    with pytest.raises(PlanError, match="it is sent, and in no bucket"):
        fit(model(buckets=folder / "layout.json"))
    with pytest.raises(InvalidError, match=r"buckets \('fastest'\): must be 'auto', one of .*wfbp, or the path"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), buckets="fastest")


@FEW
def test_a_resumed_job_goes_on_in_the_same_buckets(anew: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path / "job")))
    Turns(monkeypatch, ("wfbp", "single", "optimal"))
    anew(every=5)
    made = model()
    checkpoint = hvd.callbacks.Checkpoint(folder)
    checkpoint.set_model(made)
    fit(made, 12)
    checkpoint.save(1)
    weights = fit(made, 3)
    anew(every=5)
    resumed = model()
    checkpoint = hvd.callbacks.Checkpoint(folder)
    checkpoint.set_model(resumed)
    assert checkpoint.restore() == (1, 0)
    for one, other in zip(weights, fit(resumed, 3), strict=True):
        assert one.tobytes() == other.tobytes()
    first, second = (one.optimizer._hvd_ext_reducer for one in (made, resumed))
    if hvd.size() > 1:
        assert first.channels[0].layout.described() == second.channels[0].layout.described()
        (planning,) = second.sets[0].replannings.values()
        assert planning.steps == 15


def test_ranks_that_plan_differently_keep_what_they_have_and_say_so(
    anew: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    Turns(monkeypatch, ("wfbp",) if rank else ("single",))
    anew(every=3)
    channel, planning = opened({"a": (70,), "b": (9,)})
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for step in range(8):
            (got, _) = channel.reduce([tf.fill((70,), float(step + rank)), tf.ones(9)])
            np.testing.assert_array_equal(got, np.full(70, sum(step + other for other in range(size)), np.float32))
    assert planning.reviews == []
    assert "the ranks came to different plans" in caplog.text
    channel.close()


def test_an_error_in_a_plan_on_one_rank_leaves_the_buckets_as_they_are(
    anew: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    anew(every=3)
    channel, planning = opened({"a": (70,), "b": (9,)})

    def fails(times: StepTimes | None) -> Layout:
        if rank == 1:
            raise HvdExtError("told to fail")
        return channel.layout

    channel.lay_out = fails
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for _ in range(8):
            (_, got) = channel.reduce([tf.ones(70), tf.ones(9)])
            np.testing.assert_array_equal(got, np.full(9, size, np.float32))
    assert planning.reviews == []
    assert "told to fail" in caplog.text
    channel.close()


def test_a_layout_that_one_rank_cannot_take_ends_the_channel_on_all(
    anew: Any, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    Turns(monkeypatch, ("wfbp", "single"))
    anew(every=3)
    channel, _ = opened({"a": (70,), "b": (9,)})
    switch = channel.switch

    def fails(layout: Layout, first_step: int) -> None:
        if rank == 0:
            raise MemoryError("told to fail")
        switch(layout, first_step)

    channel.switch = fails
    for _ in range(6):
        channel.reduce([tf.ones(70), tf.ones(9)])
    with pytest.raises(HvdExtError, match="closed"):
        channel.reduce([tf.ones(70), tf.ones(9)])


def test_options_are_checked() -> None:
    with pytest.raises(InvalidError, match=r"replan_every \(-1\): must be a whole number of steps, 0 for never"):
        Options(replan_every=-1)
    assert dataclasses.replace(Options(), buckets=Path(__file__)).buckets == __file__
