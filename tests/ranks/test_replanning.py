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
from hvd_ext.job import network, runtime
from hvd_ext.options import Options
from hvd_ext.planning.bucket_layout import Layout
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration, replanning
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.replanning import Replanning, Review, following
from hvd_ext.topology.tree import Link, from_hosts
from tests import pages
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, far_apart, hosts_of
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data, fill, values

LAYERS = 6
FEW = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins jobs that plan anew every few steps, and switch whenever the plan is another one."""
    monkeypatch.setattr(replanning, "WORTH_SWITCHING", -1e9)
    monkeypatch.setattr(replanning, "TOO_SLOW", 1e9)

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


@pytest.mark.slow
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


SHAPES = ((7, 5), (40,), (3, 3), (12,))
WAYS = ("fit", "tape", "accumulation", "Keras 2", "two optimizers", "process set", "top-k")


def variables(library: Any = keras) -> list[Any]:
    return [library.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(SHAPES)]


def gradients(step: tf.Tensor) -> list[tf.Tensor]:
    """Whole numbers of this rank, so that sums are exact."""
    own = [(np.arange(np.prod(shape)) * 7 + hvd.rank() * 5).reshape(shape) % 61 - 30 for shape in SHAPES]
    return [tf.constant(one, tf.float32) * tf.cast(step % 5 + 1, tf.float32) for one in own]


def trained(way: str, steps: int = 14) -> tuple[list[np.ndarray], list[Any]]:
    """Train in a traced function; return the weights, and the optimizers whose buckets were planned."""
    traced: list[int] = []
    options: dict[str, Any] = {"op": hvd.Sum}
    weights = variables()
    optimizers: list[Any] = []
    if way == "Keras 2":
        import tf_keras

        weights = [tf.Variable(np.zeros(shape, np.float32), name=f"v{n}") for n, shape in enumerate(SHAPES)]
        optimizers = [hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), **options)]
    elif way == "accumulation":
        optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), **options)]
    elif way == "process set":
        some = hvd.add_process_set(sorted({0, hvd.size() - 1}))
        optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some, **options)]
    elif way == "top-k":
        topk = hvd.TopK(**OPTIONS)
        optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=topk, **options)]
    elif way != "tape":
        count = 2 if way == "two optimizers" else 1
        optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options) for _ in range(count)]
    parts = [weights] if len(optimizers) < 2 else [weights[:2], weights[2:]]
    for optimizer, part in zip(optimizers, parts, strict=False):
        optimizer.build(part)

    @tf.function
    def step(number: tf.Tensor) -> None:
        traced.append(1)
        if way == "tape":
            with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
                pairs = zip(weights, gradients(number), strict=True)
                loss = tf.add_n([tf.reduce_sum(weight.value * one) for weight, one in pairs])
            for weight, one in zip(weights, tape.gradient(loss, [w.value for w in weights]), strict=True):
                weight.value.assign_sub(one)
            return
        own = iter(gradients(number))
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.apply_gradients([(next(own), weight) for weight in part])

    for number in range(steps * (2 if way == "accumulation" else 1)):
        step(tf.constant(number))
    if way == "top-k":
        hvd.flush(optimizers[0])
        step(tf.constant(4))
    assert len(traced) <= 2
    return [weight.numpy() for weight in weights], optimizers


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_same_bit_for_bit_where_sums_are_exact(
    way: str, anew: Any, monkeypatch: pytest.MonkeyPatch, size: int, tmp_path: Path
) -> None:
    if size == 1 or (way == "top-k" and size > 4) or (way == "process set" and size != 3):
        pytest.skip("one rank plans nothing; the same on any number of ranks")
    options = {"topology": far_apart(hosts_of(size), tmp_path)} if way == "top-k" else {}
    anew(every=0, **options)
    still, _ = trained(way)
    turns = Turns(monkeypatch, ("wfbp", "wfbp", "single", "single") if way == "two optimizers" else ("wfbp", "single"))
    anew(every=3, **options)
    changed, optimizers = trained(way)
    for one, other in zip(still, changed, strict=True):
        assert np.any(one)
        assert one.tobytes() == other.tobytes()
    taking_part = way != "process set" or hvd.rank() in (0, size - 1)
    assert len(turns.planned) == (0 if not taking_part else 6 if way == "two optimizers" else 3)
    for optimizer in optimizers if taking_part else []:
        assert sum(review.switched for review in reviews(optimizer)) >= 2


def opened(names: dict[str, tuple[int, ...]], **options: Any) -> tuple[Channel, Replanning]:
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("source", [network.MEASURED, network.ASSUMED])
def test_a_network_that_was_measured_is_measured_again_where_steps_take_longer_than_predicted(
    anew: Any, monkeypatch: pytest.MonkeyPatch, size: int, source: str
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    anew(every=3)
    monkeypatch.setattr(replanning, "TOO_SLOW", -1e9)
    job = runtime.current()
    job.network = network.Network(job.tree, source, seconds=1e-12)
    slower = from_hosts(job.hosts, inside=Link(1e-3, 1e-6), between=Link(1e-3, 1e-6))
    asked = []

    def of_job(engine: Any, hosts: Any, options: Options) -> network.Network:
        asked.append(options.probe)
        return network.Network(slower, network.MEASURED, "slower now", 1e-12)

    monkeypatch.setattr(network, "of_job", of_job)
    channel, planning = opened({"a": (70,), "b": (9,)})
    for _ in range(14):
        channel.reduce([tf.ones(70), tf.ones(9)])
    measured = source == network.MEASURED
    assert asked == (["refresh", "refresh"] if measured else [])  # not before the first plan
    assert (runtime.current().tree is slower) == measured
    _, *after = planning.reviews
    if measured:  # a message takes 1 ms on the slower network
        assert all(review.before_s > 1e-3 for review in after)
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


def test_functions_of_several_names_are_called_before_a_step_and_each_replaces_the_one_of_its_name(anew: Any) -> None:
    anew(every=0)
    channel, _ = opened({"a": (70,), "b": (9,)})
    engine, called = runtime.current().engine, []

    def noted(name: str, again: int = 0) -> Any:
        def call(step: int) -> None:
            called.append((name, step))
            if again:
                engine.at_step(channel.handle, step + again, noted(name), name)

        return call

    engine.at_step(channel.handle, 2, noted("replaced"), "b")
    engine.at_step(channel.handle, 3, noted("b"), "b")
    engine.at_step(channel.handle, 3, noted("a", again=2), "a")
    engine.at_step(channel.handle, 4, noted("c"), "c")
    for _ in range(6):
        channel.reduce([tf.ones(70), tf.ones(9)])
    assert called == [("a", 3), ("b", 3), ("c", 4), ("a", 5)]
    channel.close()


def test_options_are_checked() -> None:
    with pytest.raises(InvalidError, match=r"replan_every \(-1\): must be a whole number of steps, 0 for never"):
        Options(replan_every=-1)
    assert dataclasses.replace(Options(), buckets=Path(__file__)).buckets == __file__


@FEW
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Any) -> None:
    monkeypatch.chdir(tmp_path)
    hvd.shutdown()
    names = pages.run("docs/buckets.md", 1)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert (tmp_path / "layout.json").exists() == (hvd.rank() == 0)
