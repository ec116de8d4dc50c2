"""Local steps equal a model of all hosts in NumPy: what a step reduces, when outer steps come, and what they do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, MismatchError
from hvd_ext.job import consensus, runtime
from hvd_ext.tensorflow.gradients import registration
from tests.ranks.compare import assert_equal
from tests.ranks.topk_jobs import hosts_of, restart
from tests.ranks.training import assert_same_bits_on_all_ranks, checkpoint, shared, values

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3), pytest.mark.usefixtures("apart")]

SHAPES = ((6, 7), (7,), (3, 4, 5))
RATE = 0.5


def gradients(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng((rank, step))
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def variables() -> list[keras.Variable]:
    return [keras.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(SHAPES)]


def hosts() -> list[list[int]]:
    """Give the ranks of the virtual hosts of these tests."""
    counts, ranks = hosts_of(hvd.size()), iter(range(hvd.size()))
    return [[next(ranks) for _ in range(count)] for count in counts]


class Model:
    """Local steps of all groups in float64, with SGD inside; an outer optimizer, or None."""

    def __init__(self, options: hvd.LocalSteps) -> None:
        self.options = options
        self.groups = hosts() if options.within == "host" else [[rank] for rank in range(hvd.size())]
        self.local = [[np.zeros(shape) for shape in SHAPES] for _ in self.groups]
        self.shared = [np.zeros(shape) for shape in SHAPES]
        self.velocity = [np.zeros(shape) for shape in SHAPES]
        self.under_way: dict[int, tuple[list[np.ndarray], np.ndarray]] = {}
        self.fragment_of = fragments(options.fragments)
        self.count = 0

    def step(self, flushes: bool = False) -> None:
        for ranks, weights in zip(self.groups, self.local, strict=True):
            first = self.count < self.options.start
            taking = range(hvd.size()) if first else ranks
            for place in range(len(SHAPES)):
                weights[place] -= RATE * np.mean([gradients(rank, self.count)[place] for rank in taking], axis=0)
        self.count += 1
        if self.count == self.options.start:
            self.shared = [one.copy() for one in self.local[0]]
        if self.count <= self.options.start:
            return
        local = self.count - self.options.start
        for place, fragment in enumerate(self.fragment_of):
            offset = (fragment + 1) * self.options.every // max(1 + max(self.fragment_of), 1) % self.options.every
            begins = local % self.options.every == offset
            if (
                place in self.under_way
                and (flushes or not begins)
                and (flushes or (local - self.options.overlap) % self.options.every == offset)
            ):
                self.end(place)
            if begins or flushes:
                sent = [weights[place].copy() for weights in self.local]
                share = [len(ranks) / hvd.size() for ranks in self.groups]
                mean = sum(part * (self.shared[place] - one) for part, one in zip(share, sent, strict=True))
                self.under_way[place] = sent, mean
                if flushes or not self.options.overlap:
                    self.end(place)

    def end(self, place: int) -> None:
        sent, mean = self.under_way.pop(place)
        if self.options.outer is None:
            self.shared[place] = self.shared[place] - mean
        else:  # Nesterov, as Keras has it
            self.velocity[place] = 0.9 * self.velocity[place] - 0.7 * mean
            self.shared[place] = self.shared[place] + 0.9 * self.velocity[place] - 0.7 * mean
        for weights, before in zip(self.local, sent, strict=True):
            weights[place] = self.shared[place] + (weights[place] - before)

    @property
    def own(self) -> list[np.ndarray]:
        return self.local[next(number for number, ranks in enumerate(self.groups) if hvd.rank() in ranks)]


def fragments(count: int) -> list[int]:
    """Give the fragment of each variable."""
    sizes = np.cumsum([0, *(np.prod(shape) for shape in SHAPES)])
    wanted = [min(count - 1, int((a + b) / 2 * count / sizes[-1])) for a, b in itertools.pairwise(sizes)]
    return [sorted(set(wanted)).index(one) for one in wanted]


def optimizer_of(options: hvd.LocalSteps, **more: Any) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), local_steps=options, check_every=1, **more)


def trained(optimizer: Any, weights: Sequence[Any], expected: Model, steps: int, *, traced: bool) -> None:
    step = tf.function(lambda *own: optimizer.apply(own, list(weights)), autograph=False)
    optimizer.build(weights)
    for _ in range(steps):
        own = [tf.constant(one) for one in gradients(hvd.rank(), expected.count)]
        step(*own) if traced else optimizer.apply(own, list(weights))
        expected.step()
        for got, wanted in zip(values(weights), expected.own, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=f"step {expected.count}")


CASES = {
    "averages": hvd.LocalSteps(3, outer=None),
    "nesterov": hvd.LocalSteps(3),
    "start": hvd.LocalSteps(2, start=3),
    "rank": hvd.LocalSteps(2, within="rank"),
    "fragments": hvd.LocalSteps(4, fragments=3),
    "overlap": hvd.LocalSteps(3, overlap=2),
    "streaming": hvd.LocalSteps(4, fragments=2, overlap=1, start=1, outer=None),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_weights_are_those_of_the_model(options: hvd.LocalSteps, traced: bool) -> None:
    weights, expected = variables(), Model(options)
    optimizer = optimizer_of(options)
    trained(optimizer, weights, expected, 11, traced=traced)
    (local,) = optimizer._hvd_ext.reducer.sets
    pairs = local.policy.global_weights
    for (_, got), wanted in zip(pairs, expected.shared, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)
    assert_same_bits_on_all_ranks([one for _, one in pairs])
    groups = len(expected.groups)
    assert bool(runtime.current().subsets) == (groups > 1)


CODECS: dict[str, Any] = {
    "halves": hvd.Compression.fp16,
    "topk": hvd.TopK(0.25, min_elements=1),
    "4 bits": hvd.Quantized(bits=4, block=64, min_elements=1),
    "low rank": hvd.LowRank(2, saving=0.0),
    "any of": hvd.AnyOf(["dense", hvd.Quantized()], min_elements=1),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_outer_steps_in_any_codec_lose_nothing(codec: Any, traced: bool) -> None:
    weights, steps = variables(), 5
    optimizer = optimizer_of(hvd.LocalSteps(2, outer=None, start=1), compression=codec)
    optimizer.build(weights)
    step = tf.function(lambda *own: optimizer.apply(own, weights), autograph=False)
    for number in range(steps):
        if number == steps - 1:
            hvd.flush(optimizer)
        own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
        step(*own) if traced else optimizer.apply(own, weights)
    assert_same_bits_on_all_ranks(weights)
    means = [
        np.mean([gradients(rank, number)[place] for rank in range(hvd.size())], axis=0)
        for number in range(steps)
        for place in range(len(SHAPES))
    ]
    rounded = 2e-3 if codec is hvd.Compression.fp16 else 2e-5
    for place, got in enumerate(values(weights)):
        np.testing.assert_allclose(got, -RATE * sum(means[place :: len(SHAPES)]), atol=rounded)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_host_that_skips_a_step_meets_the_others_in_the_same_outer_step(traced: bool) -> None:
    weights = variables()
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(inner, local_steps=hvd.LocalSteps(3, outer=None), check_every=1)
    optimizer.build(weights)
    step = tf.function(lambda *own: optimizer.apply(own, weights), autograph=False)
    mine = next(ranks for ranks in hosts() if hvd.rank() in ranks)
    taken = []
    for number in range(6):
        bad = number == 1 and hvd.rank() == hvd.size() - 1
        own = [tf.constant(one * optimizer.dynamic_scale.numpy()) for one in gradients(hvd.rank(), number)]
        own[0] += np.inf if bad else 0.0
        step(*own) if traced else optimizer.apply(own, weights)
        taken.append([number != 1 or hvd.size() - 1 not in ranks for ranks in hosts()])
    assert int(inner.inner_optimizer.iterations) == 6 - (hvd.size() - 1 in mine)
    changes = [
        len(ranks) / hvd.size() * np.mean([gradients(rank, number)[place] for rank in ranks], axis=0)
        for place in range(len(SHAPES))
        for number, took in enumerate(taken)
        for ranks, took_part in zip(hosts(), took, strict=True)
        if took_part
    ]
    of_place = len(changes) // len(SHAPES)
    for place, got in enumerate(values(weights)):
        wanted = -RATE * sum(changes[place * of_place : (place + 1) * of_place])
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_outer_steps_count_updates_and_no_passes(traced: bool) -> None:
    weights, expected = variables(), Model(hvd.LocalSteps(2, start=1, outer=None))
    inner = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(inner, local_steps=expected.options)
    optimizer.build(weights)
    step = tf.function(lambda *own: optimizer.apply(own, weights), autograph=False)
    for number in range(12):
        own = [tf.constant(one) for one in gradients(hvd.rank(), number // 2)]
        step(*own) if traced else optimizer.apply(own, weights)
        if number % 2:
            expected.step()
        for got, wanted in zip(values(weights), expected.own, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_weights_that_are_not_finite_end_training_and_leave_the_global_weights(apart: None) -> None:
    weights = variables()
    optimizer = optimizer_of(hvd.LocalSteps(2))
    optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], weights)
    bad = [tf.constant(one * (np.nan if hvd.rank() == 0 else 1.0)) for one in gradients(hvd.rank(), 1)]
    with pytest.raises(HvdExtError, match="SGD, outer steps: the weights of some rank are not finite"):
        optimizer.apply(bad, weights)
    (local,) = optimizer._hvd_ext.reducer.sets
    for _, one in local.policy.global_weights:
        np.testing.assert_array_equal(one.numpy(), np.zeros(one.shape))


def model(options: hvd.LocalSteps | None, **more: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(10, "tanh"), keras.layers.Dense(12)])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), local_steps=options, **more), "mse")
    return made


def batches(rank: int, rows: int = 24) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((rows, 12)).astype(np.float32)


def fit(trained: keras.Model, epochs: int = 1, callbacks: Any = (), **more: Any) -> Any:
    x = batches(hvd.rank())
    return trained.fit(x, x, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **more)


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        (hvd.LocalSteps(4), None),
        (hvd.LocalSteps(4, overlap=3, outer=keras.optimizers.Adam(0.1)), hvd.Quantized(4, min_elements=1)),
        (hvd.LocalSteps(5, fragments=2, overlap=2, start=3), hvd.TopK(0.25, min_elements=1)),
    ],
    ids=["whole", "under way", "fragments"],
)
def test_a_checkpoint_goes_on_bit_for_bit(options: hvd.LocalSteps, codec: Any, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    whole = model(options, compression=codec)
    fit(whole, epochs=2)
    first = model(options, compression=codec)
    fit(first, callbacks=[checkpoint(first, folder)])
    second = model(options, compression=codec)
    fit(second, epochs=2, callbacks=[checkpoint(second, folder)])
    assert_equal(second.weights, [weight.numpy() for weight in whole.weights])
    assert_equal(second.optimizer.variables, [one.numpy() for one in whole.optimizer.variables])
    of_whole, of_second = (one.optimizer._hvd_ext.reducer.sets[0].policy.save() for one in (whole, second))
    assert len(of_whole) == len(of_second)
    for (name, array), saved in zip(of_whole.items(), of_second.values(), strict=True):
        np.testing.assert_array_equal(array, saved, err_msg=name)


@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_the_outer_step_under_way_ends_where_a_restored_job_has_no_overlap(outer: Any) -> None:
    first, second = (model(hvd.LocalSteps(4, overlap=overlap, outer=outer)) for overlap in (3, 0))
    fit(first)  # six updates: the outer step of the fourth one is under way
    saved = first.optimizer._hvd_ext.reducer.sets[0].policy.save()
    assert "fragment/0/change/0" in saved
    second.optimizer._hvd_ext.reducer.restore({0: (saved, lambda: iter(hvd.allgather_object(saved)))})
    x = batches(hvd.rank(), 4)
    for trained in (first, second):
        trained.fit(x, x, batch_size=4, verbose=0)  # in the first one it ends after the seventh update
    of_first, of_second = (one.optimizer._hvd_ext.reducer.sets[0].policy.global_weights for one in (first, second))
    assert_equal([one for _, one in of_second], [one.numpy() for _, one in of_first])
    before = [saved[f"fragment/0/global/{number}"] for number in range(len(of_first))]
    assert not any(np.array_equal(one.numpy(), old) for (_, one), old in zip(of_second, before, strict=True))


def test_another_number_of_ranks_goes_on_from_the_global_weights_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    trained = model(hvd.LocalSteps(4), compression=hvd.TopK(0.1, min_elements=1))
    fit(trained)
    policy = trained.optimizer._hvd_ext.reducer.sets[0].policy
    states = hvd.allgather_object({**policy.save(), "ranks": np.array(hvd.size() + 1)})
    states.append(states[0])
    for _, one in policy.global_weights:
        one.assign(one + 1.0)
    policy.load(None, lambda: iter(states))
    for number, (_, one) in enumerate(policy.global_weights):
        np.testing.assert_array_equal(one.numpy(), states[0][f"fragment/0/global/{number}"])
    fit(trained)
    hvd.flush(trained.optimizer)
    fit(trained)
    assert "not restored" not in caplog.text


def test_a_model_evaluates_and_saves_with_the_global_weights(tmp_path: Path) -> None:
    trained, x = model(hvd.LocalSteps(4)), batches(99)
    fit(trained, validation_data=(x, x))
    own = values(trained.trainable_variables)
    (local,) = trained.optimizer._hvd_ext.reducer.sets
    pairs = local.policy.global_weights
    wanted = [one.numpy() for _, one in pairs]
    assert any(not np.array_equal(mine, one) for mine, one in zip(own, wanted, strict=True))  # 6 steps: 2 since then
    for got, one in zip(trained.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(got, one)
    trained.save(tmp_path / f"{hvd.rank()}.keras")
    loaded = keras.models.load_model(tmp_path / f"{hvd.rank()}.keras")
    assert_equal(loaded.trainable_variables, wanted)
    losses = hvd.allgather_object((trained.evaluate(x, x, verbose=0), float(np.sum(trained.predict(x, verbose=0)))))
    assert len(set(losses)) == 1
    assert_equal(trained.trainable_variables, own)
    with hvd.local_weights():
        assert_equal([tf.Variable(one) for one in trained.get_weights()], own)
        differing = hvd.allgather_object(trained.evaluate(x, x, verbose=0))
    assert len(set(differing)) == len(hosts())
    trained.set_weights([one * 0.0 for one in wanted])
    for variable, one in local.policy.global_weights:
        assert not np.any(variable.numpy()) and not np.any(one.numpy())


def test_validation_of_fit_is_the_same_on_all_ranks() -> None:
    trained, x = model(hvd.LocalSteps(4, overlap=1)), batches(99)
    losses = fit(trained, epochs=2, validation_data=(x, x)).history["val_loss"]
    assert hvd.allgather_object(losses) == [losses] * hvd.size()


@pytest.mark.parametrize("built", [True, False], ids=["before", "after"])
def test_fit_broadcasts_before_or_after_its_first_batch(built: bool) -> None:
    keras.utils.set_random_seed(3 + hvd.rank())
    trained = keras.Sequential([*([keras.layers.Input((12,))] if built else []), keras.layers.Dense(12)])
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), local_steps=hvd.LocalSteps(3)), "mse")
    fit(trained, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_bits_on_all_ranks(trained.trainable_variables)  # after 6 steps


@pytest.mark.skipif("hvd.size() == 1", reason="one rank has nobody to differ from")
def test_weights_that_differ_between_hosts_are_found_in_the_first_step() -> None:
    weights = variables()
    weights[1].assign_add(np.full(SHAPES[1], hvd.rank() == hvd.size() - 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), local_steps=hvd.LocalSteps(3))
    with pytest.raises(MismatchError, match="must have the same bits on all ranks before the first step"):
        optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], weights)


@pytest.mark.skipif("hvd.size() == 1", reason="one rank has nobody to differ from")
def test_options_that_differ_between_hosts_are_found_in_the_first_step() -> None:
    optimizer = optimizer_of(hvd.LocalSteps(3 + (hvd.rank() == hvd.size() - 1)))
    words = "LocalSteps' every must be the same on all ranks"
    with pytest.raises(MismatchError, match=words):
        optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], variables())


def test_two_optimizers_of_one_step_have_outer_steps_of_their_own() -> None:
    lists, models = [variables(), variables()], [Model(hvd.LocalSteps(2)), Model(hvd.LocalSteps(3, outer=None))]
    optimizers = [optimizer_of(one.options) for one in models]
    for optimizer, weights in zip(optimizers, lists, strict=True):
        optimizer.build(weights)

    @tf.function(autograph=False)
    def step(*own: tf.Tensor) -> None:
        for optimizer, weights in zip(optimizers, lists, strict=True):
            optimizer.apply(own, weights)

    for number in range(6):
        step(*map(tf.constant, gradients(hvd.rank(), number)))
        for weights, expected in zip(lists, models, strict=True):
            expected.step()
            for got, wanted in zip(values(weights), expected.own, strict=True):
                np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_explain_has_the_buckets_of_a_host_and_of_outer_steps() -> None:
    trained = model(hvd.LocalSteps(4, start=2))
    fit(trained)
    text = hvd.explain(trained.optimizer)
    assert all(f"{name}: 1 bucket" in text for name in ("Adam", "Adam, outer steps", "Adam, before local steps"))


def policy_of(optimizer: Any) -> Any:
    (local,) = optimizer._hvd_ext.reducer.sets
    return local.policy


def test_after_an_outer_step_that_failed_training_goes_on_with_other_weights() -> None:
    trained, bad = model(hvd.LocalSteps(2)), batches(hvd.rank())
    bad[12] = np.nan
    with pytest.raises((HvdExtError, tf.errors.OpError), match="not finite"):
        trained.fit(bad, bad, batch_size=4, shuffle=False, verbose=0)
    policy_of(trained.optimizer).save()
    trained.set_weights([np.zeros(one.shape) for one in trained.get_weights()])
    for variable in trained.optimizer.variables:
        variable.assign(tf.zeros_like(variable))
    trained.optimizer.learning_rate = 0.01
    fit(trained)
    assert all(np.isfinite(one).all() for one in trained.get_weights())
    assert_same_bits_on_all_ranks([one for _, one in policy_of(trained.optimizer).global_weights])


def test_weights_that_one_rank_has_loaded_are_sent_to_all() -> None:
    trained = model(hvd.LocalSteps(4, overlap=3))
    fit(trained)
    if hvd.rank() == 0:
        trained.set_weights([one + 1.0 for one in trained.get_weights()])
    fit(trained, epochs=2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_same_bits_on_all_ranks([one for _, one in policy_of(trained.optimizer).global_weights])


def test_outer_steps_of_two_optimizers_beside_training_meet_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, names, exchanged = [variables(), variables()], [], consensus._exchanged
    optimizers = [optimizer_of(hvd.LocalSteps(2, overlap=1)) for _ in lists]

    def noted(engine: Any, name: str, make: Any, **attributes: bool) -> Any:
        if engine is runtime.current().engine:
            names.append(name)
        return exchanged(engine, name, make, **attributes)

    for number in range(12):
        own = [tf.constant(one) for one in gradients(hvd.rank(), number)]
        for optimizer, weights in zip(optimizers, lists, strict=True):
            optimizer.apply(own, weights)
        if number == 1:
            monkeypatch.setattr(consensus, "_exchanged", noted)
    for optimizer in optimizers:
        assert_same_bits_on_all_ranks([one for _, one in policy_of(optimizer).global_weights])
    # exchanges of this name are matched by their order, and threads have none
    assert registration.EXCHANGE not in names and (names or hvd.size() == 1)


def test_a_fragment_gets_its_own_residuals_wherever_training_was_saved() -> None:
    # after 6 updates the next outer step is that of the second fragment
    options, codec = hvd.LocalSteps(8, fragments=2, start=1), hvd.Quantized(4, min_elements=1)
    first, second = ((optimizer_of(options, compression=codec), variables()) for _ in range(2))
    for optimizer, weights in (first, second):
        optimizer.build(weights)
    given = [[tf.constant(one) for one in gradients(hvd.rank(), number)] for number in range(22)]
    for own in given[:15]:
        first[0].apply(own, first[1])
    saved = policy_of(first[0]).save()
    for of_second, of_first in zip((*second[1], *second[0].variables), (*first[1], *first[0].variables), strict=True):
        of_second.assign(of_first)
    second[0]._hvd_ext.reducer.restore({0: (saved, lambda: iter([saved]))})
    for own in given[15:]:
        for optimizer, weights in (first, second):
            optimizer.apply(own, weights)
    assert any("residuals/" in name and np.any(array) for name, array in saved.items()) == (len(hosts()) > 1)
    assert_equal(second[1], values(first[1]))


def test_hosts_may_have_different_loss_scales_at_the_end_of_an_epoch() -> None:
    keras.utils.set_random_seed(3)
    trained = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(12)])
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8.0)
    trained.compile(hvd.DistributedOptimizer(inner, local_steps=hvd.LocalSteps(3)), "mse", auto_scale_loss=False)
    x = batches(hvd.rank())
    mine = next(number for number, ranks in enumerate(hosts()) if hvd.rank() in ranks)
    if mine:
        x[0] = np.inf
    trained.fit(x, x, batch_size=4, shuffle=False, verbose=0, callbacks=hvd.callbacks.synchronized([]))
    scales = hvd.allgather_object(float(inner.dynamic_scale))
    assert len(set(scales)) == len(hosts())


def test_the_global_weights_keep_the_constraints() -> None:
    weight = keras.Variable(np.full(4, 0.01), dtype="float32", name="w")
    weight.constraint = keras.constraints.NonNeg()
    for outer in ("nesterov", None):
        optimizer = optimizer_of(hvd.LocalSteps(2, outer=outer))
        for _ in range(4):
            optimizer.apply([tf.ones(4)], [weight])
        (pair,) = policy_of(optimizer).global_weights
        assert (pair[1].numpy() >= 0).all() and (weight.numpy() >= 0).all()


@pytest.mark.skipif("hvd.size() == 1", reason="one rank has nobody to differ from")
def test_ranks_that_divide_hosts_differently_are_told_so() -> None:
    within = "rank" if hvd.rank() == hvd.size() - 1 else "host"
    with pytest.raises(MismatchError, match="local_steps, within must be the same on all ranks"):
        optimizer_of(hvd.LocalSteps(3, within=within)).apply(  # type: ignore[arg-type]
            [tf.constant(one) for one in gradients(hvd.rank(), 0)], variables()
        )
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(RATE), local_steps=None if within == "rank" else hvd.LocalSteps(3)
    )
    with pytest.raises(MismatchError, match="must be the same on all ranks"):
        optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], variables())


def test_a_flush_before_the_first_step_of_a_function_is_kept() -> None:
    weights = variables()
    optimizer = optimizer_of(hvd.LocalSteps(4, outer=None))
    optimizer.build(weights)
    hvd.flush(optimizer)
    tf.function(lambda *own: optimizer.apply(own, weights), autograph=False)(
        *map(tf.constant, gradients(hvd.rank(), 0))
    )
    assert_same_bits_on_all_ranks(weights)


def test_a_checkpoint_of_other_hosts_goes_on_from_the_global_weights() -> None:
    trained = model(hvd.LocalSteps(4, overlap=3))
    fit(trained)
    policy = policy_of(trained.optimizer)
    saved = policy.save()
    changed = {**saved, "group": np.array([hvd.rank() + 100])}
    policy.load(changed if hvd.rank() == 0 else saved, lambda: iter([changed]))
    assert_same_bits_on_all_ranks(trained.trainable_variables)
    assert_equal([one for one, _ in policy.global_weights], [one.numpy() for _, one in policy.global_weights])
    fit(trained)


def test_a_shutdown_waits_for_the_outer_step_under_way(caplog: pytest.LogCaptureFixture) -> None:
    weights = variables()
    optimizer = optimizer_of(hvd.LocalSteps(2, overlap=1))
    for number in range(2):
        optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), number)], weights)
    (fragment,) = policy_of(optimizer)._fragments
    restart(hosts_of(hvd.size()))
    assert fragment._change.done() and fragment._change.exception() is None
    for variable, value in zip(weights, variables(), strict=True):
        variable.assign(value)
    optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 2)], weights)
    assert "hvd_ext was shut down, and the state of outer steps is lost" in caplog.text


def test_a_part_of_a_model_has_the_global_weights_too(tmp_path: Path) -> None:
    trained = model(hvd.LocalSteps(4))
    part = keras.Model(trained.inputs, trained.layers[0].output)
    fit(trained)
    wanted = [one.numpy() for _, one in policy_of(trained.optimizer).global_weights][:2]
    for got, one in zip(part.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(got, one)


@pytest.mark.skipif("hvd.size() == 1", reason="one rank has nobody to differ from")
def test_before_local_steps_all_hosts_must_have_the_same_gradients() -> None:
    optimizer, weights = optimizer_of(hvd.LocalSteps(2, start=4)), variables()
    own = [tf.constant(one) for one in gradients(hvd.rank(), 0)]
    if hvd.rank() in hosts()[-1]:
        own[1] = None
    with pytest.raises(MismatchError, match="the number of gradients in a step before local steps"):
        optimizer.apply(own, weights)


def test_a_process_set_makes_local_steps_of_its_own_and_can_be_removed() -> None:
    added = hvd.add_process_set(list(range(hvd.size() - 1))) if hvd.size() > 2 else None
    ranks = list(range(hvd.size())) if added is None else added.ranks
    weights = variables()
    options = hvd.LocalSteps(1, outer=None, within="rank")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), local_steps=options, process_set=added)
    optimizer.apply([tf.constant(one) for one in gradients(hvd.rank(), 0)], weights)
    taking = ranks if hvd.rank() in ranks else [hvd.rank()]
    for place, got in enumerate(values(weights)):
        wanted = -RATE * np.mean([gradients(rank, 0)[place] for rank in taking], axis=0)
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    if added is not None:
        optimizer._hvd_ext.reducer.close()
        hvd.remove_process_set(added)
