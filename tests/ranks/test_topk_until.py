"""`TopK(until=...)`: dense steps after top-k ones; what waited is applied, and the momentum is back in its slots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.tensorflow.topk import residuals
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, LateLARS, gradients, hosts_of, restart, variables
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data, fill, values

pytestmark = pytest.mark.usefixtures("apart")
few = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")

SWITCH, STEPS = 10, 20
RISING = keras.optimizers.schedules.CosineDecay(0.0, 30, 0.0, warmup_target=0.125, warmup_steps=12)


class OfLayers(keras.optimizers.SGD):
    """SGD with another learning rate for each variable, by its number of elements."""

    def momentum_rates(self, variables: list[Any]) -> list[Any]:
        return [self._get_current_learning_rate() / (1 + int(np.prod(variable.shape)) % 3) for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / (1 + int(np.prod(variable.shape)) % 3))


class LateUntilTheSwitch(LateLARS):
    """What LARS is where `TopK` has its momentum until the switch."""

    until = SWITCH


def lars(kind: type = hvd.optimizers.LARS) -> keras.optimizers.Optimizer:
    momentum = keras.optimizers.schedules.PolynomialDecay(0.75, STEPS, 0.5)
    return kind(RISING, momentum, nesterov=True, trust_coefficient=0.25, weight_decay=0.01, parallel=False)


# every optimizer whose momentum TopK takes over has a line here, and some of which it takes none
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.125, momentum=0.75),
    "nesterov": lambda: keras.optimizers.SGD(RISING, momentum=0.75, nesterov=True, weight_decay=0.01),
    "rates of its own": lambda: OfLayers(RISING, momentum=0.75),
    "plain": lambda: keras.optimizers.SGD(0.125),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "lars": lars,
    "lars, corrected": lars,
}
# those that are not what they are without TopK
REFERENCES = OPTIMIZERS | {"lars, corrected": lambda: lars(LateUntilTheSwitch)}
AS_WELL = [("eager", "nesterov"), ("four steps in one", "nesterov"), ("eager", "lars, corrected")]
CORRECTION = {"lars": False, "lars, corrected": True}


def model(optimizer: keras.optimizers.Optimizer, topk: hvd.TopK | None, **options: Any) -> keras.Model:
    made = keras.Sequential(
        [keras.layers.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(TARGETS)]
    )
    fill(made.weights)
    made.compile(hvd.DistributedOptimizer(optimizer, compression=topk), "mse", **options)
    return made


def fit(made: keras.Model, steps: int, first: int = 0) -> None:
    pairs = [data(hvd.rank(), 4, first + step) for step in range(steps)]
    x, y = (np.concatenate(column) for column in zip(*pairs, strict=True))
    made.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)


def kept(made: keras.Model) -> list[np.ndarray]:
    """Copy weights, slots and iterations."""
    return values([*made.weights, *made.optimizer.variables])


def assert_alike(ours: keras.Model, reference: keras.Model) -> None:
    assert_same_bits_on_all_ranks([*ours.weights, *ours.optimizer.variables])
    for got, wanted in zip(kept(ours), kept(reference), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["traced", "four steps in one", "eager"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_1_and_dense_steps_after_it_are_dense_steps_from_the_start(name: str, how: str) -> None:
    if how != "traced" and (LAUNCHED_SIZE > 2 or (how, name) not in AS_WELL):
        pytest.skip("the same on any number of ranks, and for all optimizers")
    options = {"run_eagerly": how == "eager", "steps_per_execution": 4 if how == "four steps in one" else 1}
    correction = CORRECTION.get(name, "auto")
    topk = hvd.TopK(density=1.0, min_elements=10, wire="fp32", until=SWITCH, momentum_correction=correction)
    ours, reference = model(OPTIMIZERS[name](), topk, **options), model(REFERENCES[name](), None, **options)
    seen: list[tuple[bool, bool]] = []
    traced: list[int] = []
    plain = ours.compute_loss

    def compute_loss(*arguments: Any, **keywords: Any) -> Any:
        traced.append(1)
        return plain(*arguments, **keywords)

    ours.compute_loss = compute_loss
    for first in range(0, STEPS, 4):
        fit(ours, 4, first)
        fit(reference, 4, first)
        (channel,) = channels(ours.optimizer)
        seen.append((bool(channel.layout.selected), channel.is_whole))
    # the step with the number 10 is the third of the third fit
    assert seen == [(True, False), (True, False), (False, True), (False, True), (False, True)]
    assert how == "eager" or len(traced) <= 6
    assert_alike(ours, reference)
    assert int(ours.optimizer.iterations) == STEPS


class Whole:
    """A step of whole numbers, and what Keras alone makes of the sums over the ranks.

    Args:
        until: of the `TopK`.
        traced: whether the step is a traced function.
        settings: of both optimizers of Keras.
        options: of `hvd.DistributedOptimizer`.
    """

    def __init__(
        self, until: int = 4, *, traced: bool = True, settings: dict[str, Any] | None = None, **options: Any
    ) -> None:
        settings = {"momentum": 0.5} if settings is None else settings
        topk = hvd.TopK(**OPTIONS, until=until, **options.pop("topk", {}))
        self.scale = options.get("backward_passes_per_step", 1)
        passes = {} if self.scale == 1 else {"gradient_accumulation_steps": self.scale}
        self.plain = keras.optimizers.SGD(1.0, **settings, **passes)
        self.weights, self.reference = variables(), variables()
        made = keras.optimizers.SGD(1.0, **settings)
        self.optimizer = hvd.DistributedOptimizer(made, compression=topk, **{"op": hvd.Sum, **options})
        self.plain.build(self.reference)
        self.optimizer.build(self.weights)
        step = lambda *own: self.optimizer.apply(list(own), self.weights)  # noqa: E731 - as short as its meaning
        self.step = tf.function(step, autograph=False) if traced else step
        self.waited = False

    def take(self, number: int, finite: bool = True) -> None:
        own = [tf.constant(one * 16) for one in gradients(hvd.rank(), number)]
        bad = not finite and hvd.rank() == hvd.size() - 1
        self.step(*[one * np.nan if bad else one for one in own])
        if finite:
            every = [gradients(rank, number) for rank in range(hvd.size())]
            self.plain.apply(
                [sum(parts) * np.float32(16 * self.scale) for parts in zip(*every, strict=True)], self.reference
            )
        self.waited = self.waited or not self.is_equal()

    def is_equal(self) -> bool:
        pairs = zip(values(self.weights), values(self.reference), strict=True)
        return all(np.array_equal(got, wanted) for got, wanted in pairs)

    def has_its_momentum(self) -> bool:
        assert_same_bits_on_all_ranks([*self.weights, *self.optimizer.variables])
        slots = [values(one.momentums) for one in (self.optimizer, self.plain)]
        return all(np.any(got) and np.array_equal(got, wanted) for got, wanted in zip(*slots, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_is_lost_and_the_momentum_is_back_in_the_slots(nesterov: bool) -> None:
    tried = Whole(settings={"momentum": 0.5, "nesterov": nesterov}, topk={"momentum_correction": True})
    for number in range(4):
        tried.take(number)
        assert not np.any(values(tried.optimizer.momentums)[0])
    assert tried.waited == (hvd.size() > 1)
    assert tried.is_equal()  # the last step before it sends what waits
    for number in range(4, 7):
        tried.take(number)
        assert tried.is_equal()
        assert tried.has_its_momentum()


@few
@pytest.mark.parametrize(
    "options",
    [
        {"traced": False},
        {"settings": {}},
        {"algorithm": "naive_allgather"},
        {"algorithm": "gtopk"},
        {"topk": {"vectors": True, "height": None}},
        {"topk": {"warmup": hvd.Warmup(1)}},
        {"backward_passes_per_step": 2},
        {"process_set": hvd.global_process_set},
        {"op": hvd.Average, "gradient_predivide_factor": 2.0, "settings": {"momentum": 0.5, "learning_rate": 1.0}},
    ],
    ids=str,
)
def test_nothing_is_lost_with_any_options(options: dict[str, Any]) -> None:
    given = dict(options)
    if "op" in given:
        given["settings"] = {"momentum": 0.5}
    tried = Whole(**given)
    passes = tried.scale
    if given.get("op") == hvd.Average:
        tried.scale = 1 / hvd.size()
    for number in range(4 * passes):
        tried.take(number)
    assert tried.is_equal()
    for number in range(4 * passes, 7 * passes):
        tried.take(number)
    assert channels(tried.optimizer)[-1].is_whole
    assert tried.is_equal()
    assert not given.get("settings", True) or tried.has_its_momentum()


@few
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_step_that_is_not_finite_does_not_count_and_changes_nothing(traced: bool) -> None:
    tried = Whole(traced=traced)
    for number in range(7):
        for _ in range(2 if number in (3, 4, 6) else 0):
            tried.take(number, finite=False)
            assert channels(tried.optimizer)[-1].is_whole == (number >= 4)
        tried.take(number)
        assert number < 3 or tried.is_equal()
    assert tried.has_its_momentum()
    assert int(tried.optimizer.iterations) == 7


@few
def test_functions_that_have_channels_of_their_own_switch_each_before_a_step_of_theirs() -> None:
    weights, reference = variables()[::2], variables()[::2]
    topk = hvd.TopK(**OPTIONS, until=4)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, compression=topk)
    plain = keras.optimizers.SGD(1.0)
    optimizer.build(weights)
    alone = tf.function(lambda a: optimizer.apply([a, None], weights), autograph=False)
    both = tf.function(lambda a, b: optimizer.apply([a, b], weights), autograph=False)
    for number in range(9):
        own = [gradients(hvd.rank(), number)[place] for place in (0, 2)]
        every = [gradients(rank, number) for rank in range(hvd.size())]
        sums = [sum(one[place] for one in every) for place in (0, 2)]
        if number % 2:
            both(*map(tf.constant, own))
        else:
            alone(tf.constant(own[0]))
            sums[1] = np.zeros_like(sums[1])
        plain.apply([tf.constant(one) for one in sums], reference)
    first, second = channels(optimizer)
    assert first.is_whole
    assert second.is_whole
    for got, wanted in zip(values(weights), values(reference), strict=True):
        np.testing.assert_array_equal(got, wanted)


@few
def test_a_loss_scale_changes_nothing() -> None:
    weights, reference = variables(), variables()
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), initial_scale=8.0)
    optimizer = hvd.DistributedOptimizer(made, op=hvd.Sum, compression=hvd.TopK(**OPTIONS, until=4))
    plain = keras.optimizers.SGD(1.0, momentum=0.5)
    step = tf.function(lambda *own: optimizer.apply(list(own), weights), autograph=False)
    for number in range(7):
        step(*[tf.constant(one * 8) for one in gradients(hvd.rank(), number)])
        every = [gradients(rank, number) for rank in range(hvd.size())]
        plain.apply([sum(parts) for parts in zip(*every, strict=True)], reference)
    for got, wanted in zip(values(weights), values(reference), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(values(made.inner_optimizer.momentums), values(plain.momentums), strict=True):
        np.testing.assert_array_equal(got, wanted)


@few
def test_a_tape_sends_whole_gradients_too() -> None:
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    applied = [np.zeros(shape, np.float32) for shape in SHAPES]
    given = [np.zeros(shape, np.float32) for shape in SHAPES]
    for number in range(6):
        with tf.GradientTape() as inner:
            own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
            loss = tf.add_n([tf.reduce_sum(weight * one) for weight, one in zip(weights, own, strict=True)])
        tape = hvd.DistributedGradientTape(inner, op=hvd.Sum, compression=hvd.TopK(**OPTIONS, until=3))
        found = tape.gradient(loss, weights)
        for place, one in enumerate(found):
            applied[place] += one.numpy()
            given[place] += sum(gradients(rank, number)[place] for rank in range(hvd.size()))
        if number >= 2:
            for got, wanted in zip(applied, given, strict=True):
                np.testing.assert_array_equal(got, wanted)


@few
def test_dense_steps_travel_by_the_algorithm_and_the_compression_of_the_job() -> None:
    restart(hosts_of(hvd.size()), compression=hvd.Compression.bf16, algorithm="ring")
    tried = Whole(until=3)
    for number in range(3):
        tried.take(number)
        (channel,) = channels(tried.optimizer)
        assert {bucket.wire for bucket in channel.layout.buckets if bucket.selection is not None} == {None}
    tried.take(3)
    assert {(one.wire, one.plan.algorithm) for one in channel.layout.buckets} == {("bfloat16", "ring")}


@few
def test_rows_and_local_variables_keep_their_own_momentum() -> None:
    table, own = keras.Variable(np.zeros((8, 4))), keras.Variable(np.zeros((5, 9)))
    weights = [*variables()[:1], table, own]
    plain, reference = keras.optimizers.SGD(1.0, momentum=0.5), [keras.Variable(one) for one in values(weights)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, momentum=0.5), op=hvd.Sum, compression=hvd.TopK(**OPTIONS, until=3)
    )
    optimizer.register_local_var(own)
    rows = lambda rank: tf.IndexedSlices(tf.fill((1, 4), rank + 1.0), tf.constant([2]), tf.constant([8, 4]))  # noqa: E731
    step = tf.function(lambda a, b, c: optimizer.apply([a, b, c], weights), autograph=False)
    for number in range(6):
        every = [gradients(rank, number) for rank in range(hvd.size())]
        mine = every[hvd.rank()]
        step(tf.constant(mine[0]), rows(hvd.rank()), tf.constant(mine[2]))
        sums = [sum(one[0] for one in every), tf.add_n([tf.convert_to_tensor(rows(r)) for r in range(hvd.size())])]
        plain.apply([*sums, tf.constant(mine[2] / np.float32(hvd.size()))], reference)
    for got, wanted in zip(
        values([*weights, *optimizer.momentums]), values([*reference, *plain.momentums]), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@few
def test_a_switch_that_fails_ends_the_channel_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("told to fail")

    monkeypatch.setattr(residuals, "summed", fails)
    tried = Whole(until=3, traced=False)
    for number in range(3):
        tried.take(number)
    with caplog.at_level(logging.ERROR, "hvd_ext"), pytest.raises(HvdExtError, match="closed"):
        tried.take(3)
    assert "could not change to whole gradients, and is closed: told to fail" in caplog.text


def test_ranks_that_plan_whole_gradients_differently_end_the_channel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    tried = Whole(until=3, traced=False)
    tried.take(0)
    (channel,) = channels(tried.optimizer)
    lay_out, other = channel.lay_out, channel.layout
    channel.lay_out = lambda times, whole: other if hvd.rank() else lay_out(times, whole)
    for number in range(1, 3):
        tried.take(number)
    with caplog.at_level(logging.ERROR, "hvd_ext"), pytest.raises(HvdExtError, match="closed"):
        tried.take(3)
    assert "the ranks came to different plans" in caplog.text


@few
def test_a_new_init_after_the_switch_goes_on_with_whole_gradients_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = Whole(traced=False)
    for number in range(5):
        tried.take(number)
    restart(hosts_of(hvd.size()))
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for number in range(5, 7):
            tried.take(number)
            assert channels(tried.optimizer)[-1].is_whole
    assert "lost" not in caplog.text
    assert "restarts" not in caplog.text
    assert tried.is_equal()
    assert tried.has_its_momentum()


@few
def test_a_state_that_nobody_can_read_leaves_the_way_to_send_as_it_is() -> None:
    tried = Whole(traced=False)
    for number in range(6):
        (kept,) = tried.optimizer._hvd_ext_reducer.sets or [None]
        if number in (1, 5):
            kept.load(None, lambda: iter(()))
            assert kept.channels[-1].is_whole == (number == 5)
        tried.take(number)
    assert kept.channels[-1].is_whole
    assert tried.is_equal()
    assert tried.has_its_momentum()


CASES = {"before": 2, "at the last step before": 9, "at": 10, "after": 13}


def resumed(directory: Path, topk: hvd.TopK, name: str = "momentum") -> tuple[keras.Model, hvd.callbacks.Checkpoint]:
    made = model(OPTIMIZERS[name](), topk, run_eagerly=True)
    checkpoint = hvd.callbacks.Checkpoint(directory)
    checkpoint.set_model(made)
    return made, checkpoint


@few
@pytest.mark.parametrize(
    ("name", "case"),
    [*(("momentum", case) for case in CASES), ("lars, corrected", "before"), ("lars, corrected", "after")],
)
def test_a_checkpoint_from_either_side_goes_on_bit_for_bit_on_the_same_ranks(
    name: str, case: str, tmp_path: Path
) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path / "job")))
    correction = CORRECTION.get(name, "auto")
    topk, saved = hvd.TopK(**OPTIONS, until=SWITCH, momentum_correction=correction), CASES[case]
    whole, checkpoint = resumed(directory, topk, name)
    assert checkpoint.restore() == (0, 0)
    for step in range(STEPS):
        if step == saved:
            checkpoint.save(1)
        whole.train_on_batch(*data(hvd.rank(), 4, step))
    second, checkpoint = resumed(directory, topk, name)
    fill(second.weights, salt=3)
    assert checkpoint.restore() == (1, 0)
    for step in range(saved, STEPS):
        second.train_on_batch(*data(hvd.rank(), 4, step))
        assert channels(second.optimizer)[-1].is_whole == (step >= SWITCH)
    for got, wanted in zip(kept(second), kept(whole), strict=True):
        np.testing.assert_array_equal(got, wanted)
    # and the same model goes back to its checkpoint, whatever it sends now
    checkpoint.restore()
    for step in range(saved, STEPS):
        second.train_on_batch(*data(hvd.rank(), 4, step))
    for got, wanted in zip(kept(second), kept(whole), strict=True):
        np.testing.assert_array_equal(got, wanted)


@few
@pytest.mark.parametrize("saved", [2, 6])
@pytest.mark.parametrize("until", [(4, 3), (4, 8), (None, 4), (4, None)], ids=str)
def test_a_job_goes_on_with_another_until(saved: int, until: tuple[int | None, int | None], tmp_path: Path) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path / "job")))
    first, checkpoint = resumed(directory, hvd.TopK(**OPTIONS, until=until[0]))
    assert checkpoint.restore() == (0, 0)
    for step in range(saved):
        first.train_on_batch(*data(hvd.rank(), 4, step))
    checkpoint.save(1)
    second, checkpoint = resumed(directory, hvd.TopK(**OPTIONS, until=until[1]))
    assert checkpoint.restore() == (1, 0)
    for step in range(saved, 12):
        second.train_on_batch(*data(hvd.rank(), 4, step))
    assert channels(second.optimizer)[-1].is_whole == (until[1] is not None)
    assert_same_bits_on_all_ranks([*second.weights, *second.optimizer.variables])
    assert all(np.any(slot) == (until[1] is not None) for slot in values(second.optimizer.momentums))
