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
from tests.ranks.compare import are_equal, assert_close, assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, SHAPES, LateLARS, gradients, hosts_of, restart, step_of, summed, variables
from tests.ranks.training import assert_same_bits_on_all_ranks, checkpoint, data, fill, model, shared, values

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks"),
    pytest.mark.usefixtures("apart"),
]

SWITCH, STEPS = 6, 8
RISING = keras.optimizers.schedules.CosineDecay(0.0, 16, 0.0, warmup_target=0.125, warmup_steps=7)


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


# every optimizer whose momentum TopK takes over has a line here, and one of which it takes none
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.125, momentum=0.75),
    "nesterov": lambda: keras.optimizers.SGD(RISING, momentum=0.75, nesterov=True, weight_decay=0.01),
    "rates of its own": lambda: OfLayers(RISING, momentum=0.75),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "lars": lars,
    "lars, corrected": lars,
}
# those that are not what they are without TopK
REFERENCES = OPTIMIZERS | {"lars, corrected": lambda: lars(LateUntilTheSwitch)}
CORRECTION = {"lars": False, "lars, corrected": True}
# those that take four steps in each call of a traced function
SEVERAL = ("nesterov", "lars, corrected")


def compiled(optimizer: keras.optimizers.Optimizer, topk: hvd.TopK | None, several: bool = False) -> keras.Model:
    """A model that trains eagerly, or with four steps in each call of its traced function."""
    made = model()
    options = {"steps_per_execution": 4} if several else {"run_eagerly": True}
    made.compile(hvd.DistributedOptimizer(optimizer, compression=topk), "mse", **options)
    return made


def train(made: keras.Model, first: int, end: int) -> None:
    pairs = [data(hvd.rank(), 4, step) for step in range(first, end)]
    if made.run_eagerly:
        for pair in pairs:
            made.train_on_batch(*pair)
    else:
        x, y = (np.concatenate(column) for column in zip(*pairs, strict=True))
        made.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)


def state_of(made: keras.Model) -> list[np.ndarray]:
    """Copy weights, slots and iterations."""
    return values([*made.weights, *made.optimizer.variables])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_1_and_dense_steps_after_it_are_dense_steps_from_the_start(name: str) -> None:
    correction, several = CORRECTION.get(name, "auto"), name in SEVERAL
    topk = hvd.TopK(density=1.0, min_elements=10, wire="fp32", until=SWITCH, momentum_correction=correction)
    ours, reference = compiled(OPTIMIZERS[name](), topk, several), compiled(REFERENCES[name](), None)
    seen: list[tuple[bool, bool]] = []
    traced: list[int] = []
    plain = ours.compute_loss

    def compute_loss(*arguments: Any, **keywords: Any) -> Any:
        traced.append(1)
        return plain(*arguments, **keywords)

    ours.compute_loss = compute_loss
    for first in range(0, STEPS, 4):
        train(ours, first, first + 4)
        train(reference, first, first + 4)
        (channel,) = channels(ours.optimizer)
        seen.append((bool(channel.layout.selected), channel.is_whole))
    # the step with the number 6 is the third of the second four
    assert seen == [(True, False), (False, True)]
    assert not several or len(traced) <= 6
    assert_same_bits_on_all_ranks([*ours.weights, *ours.optimizer.variables])
    assert_close(state_of(ours), state_of(reference), rtol=0, atol=1e-6)
    assert int(ours.optimizer.iterations) == STEPS


class Whole:
    """A step of whole numbers, and what Keras alone makes of the sums over the ranks.

    Args:
        until: of the `TopK`.
        traced: whether the step is a traced function.
        settings: of both optimizers of Keras.
        loss_scale: that ours has around it.
        topk: more options of the `TopK`.
        options: of `hvd.DistributedOptimizer`.
    """

    def __init__(
        self,
        until: int = 4,
        *,
        traced: bool = False,
        settings: dict[str, Any] | None = None,
        loss_scale: float = 1.0,
        topk: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        settings = {"momentum": 0.5} if settings is None else settings
        self.passes, self.loss_scale = options.get("backward_passes_per_step", 1), loss_scale
        self.factor = 16 * self.passes / (hvd.size() if options.get("op") == hvd.Average else 1)
        accumulation = {} if self.passes == 1 else {"gradient_accumulation_steps": self.passes}
        self.plain = keras.optimizers.SGD(1.0, **settings, **accumulation)
        self.inner = made = keras.optimizers.SGD(1.0, **settings)
        if loss_scale > 1:
            made = keras.optimizers.LossScaleOptimizer(made, initial_scale=loss_scale)
        compression = hvd.TopK(**OPTIONS, until=until, **(topk or {}))
        self.optimizer = hvd.DistributedOptimizer(made, compression=compression, **{"op": hvd.Sum, **options})
        self.weights, self.reference = variables(), variables()
        self.plain.build(self.reference)
        self.optimizer.build(self.weights)
        self.step = step_of(self.optimizer, self.weights, traced)
        self.waited = False

    def take(self, first: int, end: int | None = None, finite: bool = True) -> None:
        """Take a step, or all from the first to the one before the end; one rank's gradients may not be finite."""
        bad = not finite and hvd.rank() == hvd.size() - 1
        for number in range(first, end or first + 1):
            scale = np.float32(np.nan if bad else 16 * self.loss_scale)
            self.step([part * scale for part in gradients(hvd.rank(), number)])
            if finite:
                self.plain.apply([total * np.float32(self.factor) for total in summed(number)], self.reference)
            self.waited = self.waited or not self.is_equal()

    def is_equal(self) -> bool:
        return are_equal(values(self.weights), values(self.reference))

    def has_its_momentum(self) -> bool:
        assert_same_bits_on_all_ranks([*self.weights, *self.optimizer.variables])
        ours, plain = values(self.inner.momentums), values(self.plain.momentums)
        return all(map(np.any, ours)) and are_equal(ours, plain)

    @property
    def is_whole(self) -> bool:
        return channels(self.optimizer)[-1].is_whole


@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_is_lost_and_the_momentum_is_back_in_the_slots(nesterov: bool) -> None:
    settings = {"momentum": 0.5, "nesterov": nesterov}
    tried = Whole(traced=True, settings=settings, topk={"momentum_correction": True})
    for number in range(4):
        tried.take(number)
        assert not np.any(values(tried.inner.momentums)[0])
    assert tried.waited == (hvd.size() > 1)
    assert tried.is_equal()  # the last step before it sends what waits
    for number in range(4, 7):
        tried.take(number)
        assert tried.is_equal()
        assert tried.has_its_momentum()


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "naive_allgather", "settings": {}},
        {"algorithm": "gtopk", "process_set": hvd.global_process_set},
        {"topk": {"vectors": True, "height": None, "warmup": hvd.Warmup(1)}},
        {"backward_passes_per_step": 2},
        {"op": hvd.Average, "gradient_predivide_factor": 2.0},
        {"loss_scale": 8.0, "traced": True},
    ],
    ids=str,
)
def test_nothing_is_lost_with_any_options(options: dict[str, Any]) -> None:
    tried = Whole(**options)
    tried.take(0, 4 * tried.passes)
    assert tried.is_equal()
    tried.take(4 * tried.passes, 7 * tried.passes)
    assert tried.is_whole
    assert tried.is_equal()
    assert "settings" in options or tried.has_its_momentum()


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_step_that_is_not_finite_does_not_count_and_changes_nothing(traced: bool) -> None:
    tried = Whole(traced=traced)
    for number in range(7):
        for _ in range(2 if number in (3, 4, 6) else 0):
            tried.take(number, finite=False)
            assert tried.is_whole == (number >= 4)
        tried.take(number)
        assert number < 3 or tried.is_equal()
    assert tried.has_its_momentum()
    assert int(tried.optimizer.iterations) == 7


def test_functions_that_have_channels_of_their_own_switch_each_before_a_step_of_theirs() -> None:
    weights, reference = variables()[::2], variables()[::2]
    topk = hvd.TopK(**OPTIONS, until=4)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, compression=topk)
    plain = keras.optimizers.SGD(1.0)
    optimizer.build(weights)
    step = step_of(optimizer, weights)
    for number in range(9):
        first, second = gradients(hvd.rank(), number)[::2]
        both = number % 2
        step([first, second if both else None])
        sums = summed(number)[::2]
        plain.apply([sums[0], sums[1] * np.float32(both)], reference)
    assert [channel.is_whole for channel in channels(optimizer)] == [True, True]
    assert_equal(weights, reference)


def test_a_tape_sends_whole_gradients_too() -> None:
    weights = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    applied, given = ([np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(2))
    for number in range(6):
        with tf.GradientTape() as inner:
            pairs = zip(weights, gradients(hvd.rank(), number), strict=True)
            loss = tf.add_n([tf.reduce_sum(weight * one) for weight, one in pairs])
        tape = hvd.DistributedGradientTape(inner, op=hvd.Sum, compression=hvd.TopK(**OPTIONS, until=3))
        for place, one in enumerate(tape.gradient(loss, weights)):
            applied[place] += one.numpy()
            given[place] += summed(number)[place]
        if number >= 2:
            assert_equal(applied, given)


def test_dense_steps_travel_by_the_algorithm_and_the_compression_of_the_job() -> None:
    restart(hosts_of(hvd.size()), compression=hvd.Compression.bf16, algorithm="ring")
    tried = Whole(until=3)
    for number in range(3):
        tried.take(number)
        (channel,) = channels(tried.optimizer)
        assert {bucket.wire for bucket in channel.layout.buckets if bucket.selection is not None} == {None}
    tried.take(3)
    assert {(one.wire, one.plan.algorithm) for one in channel.layout.buckets} == {("bfloat16", "ring")}


def test_rows_and_local_variables_keep_their_own_momentum() -> None:
    table, own = keras.Variable(np.zeros((8, 4))), keras.Variable(np.zeros((5, 9)))
    weights = [*variables()[:1], table, own]
    plain, reference = keras.optimizers.SGD(1.0, momentum=0.5), [keras.Variable(one) for one in values(weights)]
    topk = hvd.TopK(**OPTIONS, until=3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), op=hvd.Sum, compression=topk)
    optimizer.register_local_var(own)

    def rows(rank: int) -> tf.IndexedSlices:
        return tf.IndexedSlices(tf.fill((1, 4), rank + 1.0), tf.constant([2]), tf.constant([8, 4]))

    step = tf.function(lambda a, b, c: optimizer.apply([a, b, c], weights), autograph=False)
    for number in range(6):
        first, _, last = gradients(hvd.rank(), number)
        step(tf.constant(first), rows(hvd.rank()), tf.constant(last))
        table_sum = tf.add_n([tf.convert_to_tensor(rows(rank)) for rank in range(hvd.size())])
        plain.apply([summed(number)[0], table_sum, last / np.float32(hvd.size())], reference)
    assert_equal([*weights, *optimizer.momentums], [*reference, *plain.momentums])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("an error", "could not change to whole gradients, and is closed: told to fail"),
        ("another plan on rank 0", "the ranks came to different plans"),
    ],
)
def test_a_switch_that_fails_ends_the_channel_and_says_why(
    fault: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("told to fail")

    tried = Whole(until=3)
    tried.take(0)
    (channel,) = channels(tried.optimizer)
    lay_out, other = channel.lay_out, channel.layout
    if fault == "an error":
        monkeypatch.setattr(residuals, "summed", fails)
    elif hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    else:
        channel.lay_out = lambda times, whole: other if hvd.rank() else lay_out(times, whole)
    tried.take(1, 3)
    with caplog.at_level(logging.ERROR, "hvd_ext"), pytest.raises(HvdExtError, match="closed"):
        tried.take(3)
    assert words in caplog.text


def test_a_new_init_after_the_switch_goes_on_with_whole_gradients_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = Whole()
    tried.take(0, 5)
    restart(hosts_of(hvd.size()))
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for number in range(5, 7):
            tried.take(number)
            assert tried.is_whole
    assert "lost" not in caplog.text
    assert "restarts" not in caplog.text
    assert tried.is_equal()
    assert tried.has_its_momentum()


def test_a_state_that_nobody_can_read_leaves_the_way_to_send_as_it_is() -> None:
    tried = Whole()
    for number in range(6):
        if number in (1, 5):
            (kept,) = tried.optimizer._hvd_ext.reducer.sets
            kept.policy.load(None, lambda: iter(()))
            assert tried.is_whole == (number == 5)
        tried.take(number)
    assert tried.is_whole
    assert tried.is_equal()
    assert tried.has_its_momentum()


def resumed(directory: Path, topk: hvd.TopK, name: str = "momentum") -> tuple[keras.Model, hvd.callbacks.Checkpoint]:
    made = compiled(OPTIMIZERS[name](), topk)
    return made, checkpoint(made, directory)


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("momentum", SWITCH - 1),
        ("momentum", SWITCH),
        ("lars, corrected", SWITCH - 4),
    ],
)
def test_a_checkpoint_from_either_side_goes_on_bit_for_bit_on_the_same_ranks(
    name: str, saved: int, tmp_path: Path
) -> None:
    directory, end = shared(tmp_path), max(saved, SWITCH) + 2
    topk = hvd.TopK(**OPTIONS, until=SWITCH, momentum_correction=CORRECTION.get(name, "auto"))
    whole, callback = resumed(directory, topk, name)
    assert callback.restore() == (0, 0)
    train(whole, 0, saved)
    callback.save(1)
    train(whole, saved, end)
    second, callback = resumed(directory, topk, name)
    fill(second.weights, salt=3)
    assert callback.restore() == (1, 0)
    for step in range(saved, end):
        train(second, step, step + 1)
        assert channels(second.optimizer)[-1].is_whole == (step >= SWITCH)
    assert_equal(state_of(second), state_of(whole))
    # and the same model goes back to its checkpoint, whatever it sends now
    callback.restore()
    train(second, saved, end)
    assert_equal(state_of(second), state_of(whole))


@pytest.mark.parametrize(
    ("saved", "until"), [(1, (3, 2)), (4, (3, 5)), (1, (None, 3)), (4, (None, 3)), (4, (3, None))], ids=str
)
def test_a_job_goes_on_with_another_until(saved: int, until: tuple[int | None, int | None], tmp_path: Path) -> None:
    directory = shared(tmp_path)
    first, callback = resumed(directory, hvd.TopK(**OPTIONS, until=until[0]))
    assert callback.restore() == (0, 0)
    train(first, 0, saved)
    callback.save(1)
    second, callback = resumed(directory, hvd.TopK(**OPTIONS, until=until[1]))
    assert callback.restore() == (1, 0)
    train(second, saved, 8)
    assert channels(second.optimizer)[-1].is_whole == (until[1] is not None)
    assert_same_bits_on_all_ranks([*second.weights, *second.optimizer.variables])
    assert all(np.any(slot) == (until[1] is not None) for slot in values(second.optimizer.momentums))
