"""Buckets that are planned again during the training: sums, weights, residuals, checkpoints, and what goes wrong."""

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
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, far_apart, hosts_of
from tests.ranks.training import (
    FEATURES,
    TARGETS,
    assert_same_bits_on_all_ranks,
    checkpoint,
    data,
    fill,
    shared,
    values,
)

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3)]  # one rank plans nothing

FEW = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")


@pytest.fixture
def begin_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins jobs that plan again every few steps, and switch whenever the plan is another one."""
    monkeypatch.setattr(replanning, "WORTH_SWITCHING", -1e9)
    monkeypatch.setattr(replanning, "TOO_SLOW", 1e9)
    monkeypatch.setattr(replanning, "WORSE", 1e9)

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


def model(traced: bool = False, **options: Any) -> keras.Model:
    """A model that trains eagerly, or with four steps in each call of its traced function."""
    layers = [keras.layers.Dense(8, activation="relu") for _ in range(2)]
    made = keras.Sequential([keras.layers.Input((FEATURES,)), *layers, keras.layers.Dense(TARGETS)])
    fill(made.weights)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125, momentum=0.5), **options)
    made.compile(optimizer, "mse", **({"steps_per_execution": 4} if traced else {"run_eagerly": True}))
    return made


def fit(made: keras.Model, steps: int = 8) -> list[np.ndarray]:
    pairs = [data(hvd.rank(), 4, step) for step in range(steps)]
    x, y = (np.concatenate(column) for column in zip(*pairs, strict=True))
    made.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return values(made.weights)


@pytest.mark.slow
@FEW
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Quantized(bits=8, min_elements=0)}])
def test_ranks_go_back_where_steps_get_longer_and_do_not_try_again(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Every step counts as longer than before, so each layout but the first is given up."""
    turns = Turns(monkeypatch, ("wfbp", "wfbp", "single"))
    begin_job(every=6)  # of fewer steps none is measured before the first plan
    monkeypatch.setattr(replanning, "WORSE", -1.0)
    made = model(bucket_nbytes=300, **options)
    fit(made, 31)
    found = reviews(made.optimizer)
    assert [review.step for review in found] == [6, 12, 18, 20, 24, 30]
    seen = [(review.switched, review.returned, review.layout.bucketer) for review in found]
    first = (True, True, "by_size")
    assert seen[:3] == [(True, False, "wfbp"), first, (False, False, "by_size")]
    assert seen[3:] == [(True, False, "single"), first, (False, False, "by_size")]
    assert turns.planned == ["wfbp", "wfbp", "single", "wfbp"]
    assert "back to" in str(found[1])
    assert_same_bits_on_all_ranks(made.weights)


@pytest.mark.slow
@FEW
def test_steps_that_take_longer_than_predicted_are_remembered(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """No step takes a nanosecond. The first plan has no prediction before it."""
    plain = replanning.predict
    monkeypatch.setattr(replanning, "predict", lambda *arguments: dataclasses.replace(plain(*arguments), step_s=1e-9))
    begin_job(every=4)
    made = model()
    fit(made, 13)
    late = [review.times.late for review in reviews(made.optimizer)]
    assert late[0] == 0 and len(late) > 1 and min(late[1:]) > 100
    assert late == sorted(late)
    shared_late = hvd.allgather_object(late)
    assert all(one == late for one in shared_late)


@pytest.mark.parametrize("traced", [False, True])
def test_the_rows_of_an_embedding_are_priced_as_many_as_are_sent(begin_job: Any, traced: bool, size: int) -> None:
    """Rank r touches r + 2 of the 40 rows, many times each."""
    begin_job(every=4)
    made = keras.Sequential([keras.layers.Input((6,), dtype="int32"), keras.layers.Embedding(40, 3)])
    made.add(keras.layers.Flatten())
    made.add(keras.layers.Dense(TARGETS))
    fill(made.weights)
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), "mse", run_eagerly=not traced)
    places = np.arange(13 * 4 * 6).reshape(-1, 6) % (hvd.rank() + 2) + 7 * hvd.rank()
    made.fit(places, np.zeros((len(places), TARGETS)), batch_size=4, shuffle=False, verbose=0)
    history = reviews(made.optimizer)
    assert len(history) == 3
    row_nbytes = 3 * 4 + 4
    assert [nbytes for review in history for _, nbytes in review.times.rows] == 3 * [
        sum(rank + 2 for rank in range(size)) * row_nbytes
    ]
    assert_same_bits_on_all_ranks(made.weights)


def reviews(optimizer: Any) -> list[Review]:
    (every,) = optimizer._hvd_ext.reducer.sets
    return next(reversed(every.replannings.values())).reviews


def test_the_steps_after_which_buckets_are_planned_again() -> None:
    assert [following(step, 2000) for step in (0, 19, 20, 200, 1999, 2000)] == [20, 20, 200, 2000, 2000, 4000]
    assert following(0, 7) == 7
    assert following(14, 7) == 20
    assert following(5, 0) is None


@pytest.mark.slow
@FEW
def test_a_model_trains_alike_in_any_buckets_and_is_not_traced_again(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    begin_job(every=0)
    still = fit(model(), 16)
    turns = Turns(monkeypatch, ("wfbp", "single", "optimal", "by_size", "mgwfbp"))
    begin_job()
    made = model(traced=True, bucket_nbytes=300)
    traced = []
    plain = made.compute_loss

    def compute_loss(*arguments: Any, **options: Any) -> Any:
        traced.append(1)
        return plain(*arguments, **options)

    made.compute_loss = compute_loss
    changed = fit(made, 16)
    assert_close(still, changed, rtol=1e-5, atol=1e-6)
    assert len(traced) <= 5  # the function of four steps, and what Keras traces besides it
    assert len(turns.planned) == (6 if size > 1 else 0)
    if size == 1:
        return
    assert_same_bits_on_all_ranks(made.weights)
    found = reviews(made.optimizer)
    assert [review.step for review in found] == [4, 6, 8, 10, 12, 14]  # after 2 steps none counts
    assert sum(review.switched for review in found) >= 2
    digests = [str(review.layout.digest) for review in found]
    assert hvd.allgather_object(digests) == [digests] * size


SHAPES = ((7, 5), (40,), (3, 3), (12,))
WAYS = ("tape", "accumulation", "Keras 2", "two optimizers", "process set", "top-k")


def gradients(rank: int, step: Any) -> list[tf.Tensor]:
    """Whole numbers of a rank, so that sums are exact."""
    mine = [(np.arange(np.prod(shape)) * 7 + rank * 5).reshape(shape) % 61 - 30 for shape in SHAPES]
    return [tf.constant(part, tf.float32) * tf.cast(step % 5 + 1, tf.float32) for part in mine]


def optimizers_of(way: str) -> list[Any]:
    """The optimizers of a way to train; a tape has none."""
    kept: dict[str, Any] = {}
    if way == "process set":
        kept = {"process_set": hvd.add_process_set([0, hvd.size() - 1])}
    elif way == "top-k":
        kept = {"compression": hvd.TopK(**OPTIONS)}
    if way == "Keras 2":
        sgd = pytest.importorskip("tf_keras").optimizers.SGD
    else:
        sgd = keras.optimizers.SGD
    passes = {"gradient_accumulation_steps": 2} if way == "accumulation" else {}
    count = {"tape": 0, "two optimizers": 2}.get(way, 1)
    return [hvd.DistributedOptimizer(sgd(1.0, **passes), op=hvd.Sum, **kept) for _ in range(count)]


def trained(way: str, steps: int) -> tuple[list[np.ndarray], list[Any]]:
    """Train zeros in a traced function; return the weights, and the optimizers whose buckets were planned."""
    traced: list[int] = []
    weights = [tf.Variable(tf.zeros(shape), name=f"v{n}") for n, shape in enumerate(SHAPES)]
    optimizers = optimizers_of(way)
    parts = [weights] if len(optimizers) < 2 else [weights[:2], weights[2:]]
    for optimizer, part in zip(optimizers, parts, strict=False):
        optimizer.build(part)

    @tf.function
    def step(number: tf.Tensor) -> None:
        traced.append(1)
        mine = gradients(hvd.rank(), number)
        if way == "tape":
            with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
                loss = tf.add_n([tf.reduce_sum(weight * part) for weight, part in zip(weights, mine, strict=True)])
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(gradient)
            return
        rest = iter(mine)
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.apply_gradients([(next(rest), weight) for weight in part])

    for number in range(steps):
        if way == "top-k" and number == steps - 1:
            hvd.flush(optimizers[0])
        step(tf.constant(number))
    assert len(traced) <= 2
    return [weight.numpy() for weight in weights], optimizers


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost_or_sent_twice_where_buckets_change(
    way: str, begin_job: Any, monkeypatch: pytest.MonkeyPatch, rank: int, size: int, tmp_path: Path
) -> None:
    if size == 1 or (way == "process set") != (size == 3):
        pytest.skip("one rank plans nothing; a set that has an outsider needs three ranks, and the others two")
    names = ("wfbp", "wfbp", "single", "single") if way == "two optimizers" else ("wfbp", "single")
    turns = Turns(monkeypatch, names)
    begin_job(every=3, **({"topology": far_apart(hosts_of(size), tmp_path)} if way == "top-k" else {}))
    passes = 2 if way == "accumulation" else 1
    weights, optimizers = trained(way, 14 * passes)
    together = range(size)
    if way == "process set":
        together = [0, size - 1] if rank in (0, size - 1) else [rank]
    every = [gradients(member, step) for member in together for step in range(14 * passes)]
    assert_equal(weights, [-sum(part) / passes for part in zip(*every, strict=True)])
    taking_part = len(together) > 1
    assert len(turns.planned) == (0 if not taking_part else 6 if way == "two optimizers" else 3)
    for optimizer in optimizers if taking_part else []:
        assert sum(review.switched for review in reviews(optimizer)) >= 2


def opened(names: dict[str, tuple[int, ...]], **options: Any) -> tuple[Channel, Replanning]:
    tensors = [Tensor(name, shape, "float32") for name, shape in names.items()]
    channel = registration.open_channel("replanned", tensors, runtime.current().options.replace(op=hvd.Sum, **options))
    return channel, Replanning(channel, runtime.current(), name="replanned")


@pytest.mark.parametrize("traced", [False, True])
def test_sums_are_exact_whatever_the_buckets(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, traced: bool, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    Turns(monkeypatch, ("single", "wfbp", "optimal"))
    begin_job(every=3)
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
def test_a_layout_is_written_and_forced_and_a_wrong_one_is_refused(begin_job: Any, tmp_path: Path, size: int) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    begin_job()
    made = model(buckets="wfbp")
    fit(made)
    if hvd.rank() == 0:
        text = hvd.explain(made.optimizer, folder / "layout.json")
        assert "runners-up" in text
        assert "buckets by wfbp" in text
    hvd.barrier()
    forced = model(buckets=folder / "layout.json")
    fit(forced)
    (channel,) = forced.optimizer._hvd_ext.reducer.channels
    (before,) = made.optimizer._hvd_ext.reducer.channels
    assert channel.layout.described() == before.layout.described()
    assert not forced.optimizer._hvd_ext.reducer.sets[0].replannings
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
def test_a_resumed_job_goes_on_in_the_same_buckets(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    Turns(monkeypatch, ("wfbp", "single", "optimal"))
    begin_job(every=5)
    made = model()
    fit(made, 12)
    checkpoint(made, folder).save(1)
    weights = fit(made, 3)
    begin_job(every=5)
    resumed = model()
    assert checkpoint(resumed, folder).restore() == (1, 0)
    assert_equal(fit(resumed, 3), weights)
    first, second = (one.optimizer._hvd_ext.reducer for one in (made, resumed))
    if hvd.size() > 1:
        assert first.channels[0].layout.described() == second.channels[0].layout.described()
        (planning,) = second.sets[0].replannings.values()
        assert planning.steps == 15


@pytest.mark.parametrize("how", ["other plans", "an error on one rank"])
def test_ranks_that_cannot_plan_alike_keep_what_they_have_and_say_so(
    how: str, begin_job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")

    def fails(times: StepTimes | None) -> Layout:
        if rank == 1:
            raise HvdExtError("told to fail")
        return channel.layout

    begin_job(every=3)
    if how == "other plans":
        Turns(monkeypatch, ("wfbp",) if rank else ("single",))
    channel, planning = opened({"a": (70,), "b": (9,)})
    if how != "other plans":
        channel.lay_out = fails
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for step in range(8):
            (total, _) = channel.reduce([tf.fill((70,), float(step + rank)), tf.ones(9)])
            np.testing.assert_array_equal(total, np.full(70, sum(step + other for other in range(size)), np.float32))
    assert planning.reviews == []
    assert ("the ranks came to different plans" if how == "other plans" else "told to fail") in caplog.text
    channel.close()


@pytest.mark.parametrize("source", [network.MEASURED, network.ASSUMED])
def test_a_network_that_was_measured_is_measured_again_where_steps_take_longer_than_predicted(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, size: int, source: str
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    begin_job(every=3)
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


def test_a_layout_that_one_rank_cannot_take_ends_the_channel_on_all(
    begin_job: Any, monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    if size == 1:
        pytest.skip("one rank plans nothing")
    Turns(monkeypatch, ("wfbp", "single"))
    begin_job(every=3)
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


def test_functions_of_several_names_are_called_before_a_step_and_each_replaces_the_one_of_its_name(
    begin_job: Any,
) -> None:
    begin_job(every=0)
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
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin_job: Any) -> None:
    monkeypatch.chdir(tmp_path)
    hvd.shutdown()
    names = pages.run("docs/buckets.md", 1)
    assert_same_bits_on_all_ranks(names["model"].weights)
    assert (tmp_path / "layout.json").exists() == (hvd.rank() == 0)
