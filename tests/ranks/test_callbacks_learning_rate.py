"""Learning rates that change during `fit`, and the momentum that must follow them."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.keras.callbacks.learning_rate import Velocities
from tests.ranks import training
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.training import Spy, assert_same_bits_on_all_ranks, compiled, data, joined, model, values

pytestmark = pytest.mark.ranks(2)

ROWS, BATCH = 8, 4
STEPS = ROWS // BATCH


fit = functools.partial(training.fit, epochs=3)


def reference(rates: list[float], momentum: float) -> list[np.ndarray]:
    """Train on the joined batch with u = momentum u + g, w -= rate u: the form that a changing rate leaves right."""
    plain = model()
    x, y = joined(ROWS, BATCH)
    rows = BATCH * hvd.size()
    velocities = [np.zeros_like(value) for value in values(plain.weights)]
    for step, rate in enumerate(rates):
        start = step % STEPS * rows
        with tf.GradientTape() as tape:
            error = plain(x[start : start + rows]) - y[start : start + rows]
            loss = tf.reduce_mean(tf.square(error))
        gradients = tape.gradient(loss, [weight.value for weight in plain.trainable_weights])
        for index, (weight, gradient) in enumerate(zip(plain.trainable_weights, gradients, strict=True)):
            velocities[index] = momentum * velocities[index] + gradient.numpy()
            weight.assign(weight.numpy() - rate * velocities[index])
    return values(plain.weights)


def assert_weights(ours: keras.Model, wanted: list[np.ndarray]) -> None:
    assert_same_bits_on_all_ranks(ours.weights)
    assert_close(values(ours.weights), wanted, rtol=1e-4, atol=1e-5)


def test_a_warm_up_rises_step_by_step_the_momentum_follows_and_its_end_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = hvd.size()
    ours, spy = compiled(keras.optimizers.SGD(0.2, momentum=0.9), traced=True), Spy()
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1)
    history = fit(ours, warm_up, spy)
    told = "\nepoch 2: the warm-up has ended; the learning rate is 0.2\n"
    assert capsys.readouterr().out == (told if hvd.rank() == 0 else "")
    done = [min(1.0, step / (2 * STEPS)) for step in range(1, 3 * STEPS + 1)]
    expected = [0.2 / size * (1 + part * 2 * (size - 1) / 2) for part in done]
    assert spy.rates == pytest.approx(expected, rel=1e-6)
    assert history.history["lr"] == pytest.approx([spy.rates[STEPS * epoch - 1] for epoch in (1, 2, 3)])
    assert_weights(ours, reference(spy.rates, 0.9))
    fit(ours, warm_up, spy, epochs=1, steps_per_epoch=1)  # a later `fit`, whose epochs have fewer steps
    assert spy.rates[-1] == pytest.approx(0.2 / size * (1 + (size - 1) / 2), rel=1e-6)


def test_a_momentum_that_topk_has_taken_over_follows_too() -> None:
    topk = hvd.TopK(1.0, min_elements=1, wire="fp32", momentum_correction=True)
    ours, spy = compiled(keras.optimizers.SGD(0.2, momentum=0.9), compression=topk), Spy()
    fit(ours, hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2), spy)
    assert len(set(spy.rates)) > 1 or hvd.size() == 1
    assert_weights(ours, reference(spy.rates, 0.9))


def test_rates_go_down_in_steps_or_smoothly_and_momentum_may_be_left_as_it_is() -> None:
    weights = []
    for correction in (True, False):
        ours, spy = compiled(keras.optimizers.SGD(0.5, momentum=0.5)), Spy()
        stairs = hvd.callbacks.LearningRateScheduleCallback(
            0.4, 0.5, start_epoch=1, end_epoch=3, momentum_correction=correction
        )
        smoothly = hvd.callbacks.LearningRateScheduleCallback(
            0.4, lambda epoch: epoch / 10, 3, None, False, correction, steps_per_epoch=4
        )
        fit(ours, stairs, smoothly, spy, epochs=4)
        assert spy.rates == pytest.approx([0.5, 0.5, 0.4, 0.4, 0.2, 0.2, 0.12, 0.13], rel=1e-6)
        if correction:
            assert_weights(ours, reference(spy.rates, 0.5))
        weights.append(values(ours.weights))
    assert not np.array_equal(weights[0][0], weights[1][0])


def test_the_rate_and_the_momentum_are_those_of_an_optimizer_inside_a_loss_scale_optimizer() -> None:
    inner = keras.optimizers.SGD(0.2, momentum=0.9)
    ours, spy = compiled(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)), Spy()
    fit(ours, *hvd.callbacks.synchronized([hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5), spy]))
    assert spy.rates == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05, 0.05])
    assert_weights(ours, reference(spy.rates, 0.9))


@pytest.mark.parametrize(
    ("optimizer", "slots", "follow"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.5, nesterov=True), "momentums", True),
        (keras.optimizers.RMSprop(0.1, momentum=0.5), "_momentums", True),
        (hvd.optimizers.LARS(0.5), "momentums", True),
        (hvd.optimizers.LARS(0.5, rate_in_momentum=False), "momentums", False),
    ],
)
def test_velocities_follow_a_rate_that_they_contain_in_place(optimizer: Any, slots: str, follow: bool) -> None:
    ours = hvd.DistributedOptimizer(optimizer)
    ours.build(model().trainable_variables)
    scaled = getattr(ours, slots)
    for index, slot in enumerate(scaled):
        slot.assign(np.full(slot.shape, 3.0 + index))
    others = [value for value in ours.variables if not any(value is slot for slot in scaled)]
    before, kept = values(scaled), values(others)
    velocities = Velocities(ours)
    for ratio in (0.5, 4.0):
        velocities.scale(ratio)
    assert_equal(scaled, [value * (2 if follow else 1) for value in before])
    assert_equal(others, kept)


class Strange(keras.optimizers.Adam):
    """An optimizer with a momentum that only it knows."""

    momentum = 0.5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), "a schedule"),
        (lambda: keras.optimizers.SGD(lambda: 0.1), "a schedule"),
        (Strange, "where optimizer 'Strange' keeps its momentum"),
    ],
)
def test_optimizers_whose_rate_cannot_be_changed_rightly_are_refused(optimizer: Any, message: str) -> None:
    ours = compiled(optimizer())
    with pytest.raises(InvalidError, match=message):
        fit(ours, hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5))
    if optimizer is Strange:
        fit(ours, hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=False), epochs=1)


def test_an_unknown_number_of_steps_is_refused_where_it_is_needed() -> None:
    ours = compiled(keras.optimizers.SGD(0.1))
    unknown = tf.data.Dataset.from_tensor_slices(data(hvd.rank(), ROWS)).batch(BATCH).filter(lambda x, y: True)
    with pytest.raises(InvalidError, match="LearningRateWarmupCallback: steps_per_epoch must be given"):
        ours.fit(unknown, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)])
    ours.fit(unknown, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1, steps_per_epoch=STEPS)])
    ours.optimizer = None  # a training step of one's own may do without
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    callback.set_model(ours)
    with pytest.raises(InvalidError, match="has no compiled optimizer"):
        callback.on_train_begin()
    for arguments in ((None, 0.5), ("0.1", 0.5), (0.1, "half")):
        with pytest.raises(InvalidError, match=r"initial_lr|multiplier"):
            hvd.callbacks.LearningRateScheduleCallback(*arguments)


def test_a_rate_is_scaled_for_the_ranks() -> None:
    size = hvd.size()
    assert hvd.scale_learning_rate(0.5) == 0.5 * size
    assert hvd.scale_learning_rate(0.5, "sqrt", ranks=16) == 2.0
    for optimizer in (keras.optimizers.Adam(0.25), hvd.DistributedOptimizer(keras.optimizers.SGD(0.25))):
        assert hvd.scale_learning_rate(optimizer, ranks=4) is optimizer
        assert float(optimizer.learning_rate) == 1.0
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    several = keras.optimizers.SGD(0.1)
    several.optimizers = [keras.optimizers.SGD(0.1)]
    for wrong, rule, ranks, message in (
        (0.1, "cubic", None, "rule"),
        (0.1, "linear", 0, "ranks"),
        ("0.1", "linear", 2, "a number or an optimizer"),
        (scheduled, "linear", 2, "a schedule"),
        (several, "linear", 2, "several optimizers"),
    ):
        with pytest.raises(InvalidError, match=message):
            hvd.scale_learning_rate(wrong, rule, ranks)


class Sets(keras.callbacks.Callback):
    """Sets something of the optimizer from a value of its own rank, or of all ranks, after an epoch."""

    def __init__(self, sets: Any, own: bool) -> None:
        super().__init__()
        self.sets, self.value = sets, 0.5 + 0.125 * hvd.rank() if own else 0.5

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.sets(self.model.optimizer, self.value)


def scaled(rate: float) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=8.0)


@pytest.mark.parametrize(
    ("make", "what", "sets"),
    [
        (keras.optimizers.SGD, "learning_rate", lambda one, value: setattr(one, "learning_rate", value)),
        (keras.optimizers.Adam, "beta_1", lambda one, value: setattr(one, "beta_1", value)),
        (hvd.optimizers.LARS, "momentum", lambda one, value: setattr(one, "momentum", value)),
        (scaled, "dynamic_scale", lambda one, value: one.dynamic_scale.assign(value)),
        (scaled, "learning_rate", lambda one, value: setattr(one.inner_optimizer, "learning_rate", value)),
    ],
)
def test_settings_that_part_raise_at_the_end_of_the_epoch_with_the_values_by_rank(
    make: Any, what: str, sets: Any
) -> None:
    ours = compiled(make(0.0625))
    fit(ours, *hvd.callbacks.synchronized([Sets(sets, own=False)]), epochs=1)
    parting = hvd.callbacks.synchronized([Sets(sets, own=True)])
    if hvd.size() == 1:
        fit(ours, *parting, epochs=1)
        return
    words = f"{what} must be the same on all ranks at the end of epoch 1; it is 0.5 on rank 0; 0.625 on rank 1;"
    with pytest.raises(MismatchError, match=words):
        fit(ours, *parting, epochs=1)
    hvd.allgather_object(0)
