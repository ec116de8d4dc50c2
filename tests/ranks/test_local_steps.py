"""Local steps equal a model of all hosts in NumPy: what a step reduces, when outer steps come, and what they do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from tests.ranks.topk_jobs import hosts, hosts_of, restart
from tests.ranks.training import assert_same_bits_on_all_ranks, policy_of, values

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3), pytest.mark.usefixtures("apart")]

SHAPES = ((6, 7), (7,), (3, 4, 5))
RATE = 0.5


def gradients(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng((rank, step))
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def variables() -> list[keras.Variable]:
    return [keras.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(SHAPES)]


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
