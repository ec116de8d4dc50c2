"""Ranks whose optimizers or models differ hear of it in the first step, all in the same words, and can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError, MismatchError
from tests.ranks.training import assert_same_bits_on_all_ranks, data, model

pytestmark = pytest.mark.ranks(1, 2)


@pytest.fixture(autouse=True)
def _several_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank cannot differ from itself: run under mpirun -np 2 or more")


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def raised_alike(step: Callable[[], object], kind: type[HvdExtError]) -> str:
    """Check that all ranks raise the same; give the words. A collective after it must work."""
    with pytest.raises(kind) as caught:
        step()
    words = str(caught.value).splitlines()[-1] if "in user code" in str(caught.value) else str(caught.value)
    assert hvd.allgather_object(words) == [words] * hvd.size()
    total = hvd.allreduce(tf.constant([float(hvd.rank())]), op=hvd.Sum)
    assert float(total[0]) == sum(range(hvd.size()))
    return words


def apply_once(optimizer: keras.optimizers.Optimizer, *variables: keras.Variable) -> Callable[[], object]:
    return lambda: optimizer.apply([tf.ones(variable.shape, variable.dtype) for variable in variables], variables)


def variable_of(name: str = "weights", elements: int = 2, dtype: str = "float32") -> keras.Variable:
    return keras.Variable(np.zeros(elements), dtype=dtype, name=name)


def named(count: int) -> list[keras.Variable]:
    return [variable_of(f"v{n}") for n in range(count)]


def sgd(rate: Any = 0.01, **keywords: Any) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **keywords)


# the variables of the last rank, those of the others, and what both are told
VARIABLES: dict[str, tuple[Callable[[], list[keras.Variable]], Callable[[], list[keras.Variable]], list[str]]] = {
    "shapes": (
        lambda: [variable_of("same"), variable_of("other", 4)],
        lambda: [variable_of("same"), variable_of("other", 3)],
        ["'other'", "float32[4]", "float32[3]"],
    ),
    "dtypes": (
        lambda: [variable_of(dtype="float64")],
        lambda: [variable_of()],
        ["'weights'", "float64[2]", "float32[2]"],
    ),
    "names": (lambda: [variable_of("mine")], lambda: [variable_of("theirs")], ["'mine'", "'theirs'"]),
    "numbers": (lambda: named(3), lambda: named(2), ["'v2'"]),
}


@pytest.mark.parametrize(("ours", "theirs", "words"), VARIABLES.values(), ids=VARIABLES)
def test_variables_that_differ_are_named_with_both_values(ours: Any, theirs: Any, words: list[str]) -> None:
    said = raised_alike(apply_once(sgd(), *(ours if last() else theirs)()), MismatchError)
    assert all(word in said for word in [*words, f"rank {hvd.size() - 1}"])


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"momentum": 0.5}, {"momentum": 0.9}, "the optimizer's momentum must be the same on all ranks"),
        ({"gradient_accumulation_steps": 2}, {}, "the optimizer's gradient_accumulation_steps must be the same"),
        ({"global_clipnorm": 1.0}, {"global_clipnorm": 2.0}, "the optimizer's global_clipnorm must be the same"),
        (
            {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.2, 10, 0.5)},
            {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)},
            "the optimizer's learning rate schedule must be the same on all ranks",
        ),
    ],
)
def test_optimizers_that_differ_are_refused_before_they_part(
    ours: dict[str, Any], theirs: dict[str, Any], words: str
) -> None:
    """A schedule of the learning rate lives in Python, where no broadcast reaches it."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(**(ours if last() else theirs)))
    assert words in raised_alike(apply_once(optimizer, variable_of()), MismatchError)


def test_classes_that_differ_are_refused() -> None:
    make = keras.optimizers.Adam if last() else keras.optimizers.SGD
    optimizer = hvd.DistributedOptimizer(make(name="given"))  # or the ranks would count their names differently
    words = raised_alike(apply_once(optimizer, variable_of()), MismatchError)
    assert "'Adam'" in words
    assert "'SGD'" in words


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("op", hvd.Sum, hvd.Average),
        ("bucket_nbytes", 1024, 2048),
        ("algorithm", "ring", "auto"),
        ("compression", hvd.Compression.fp16, None),
        ("groups", 2, None),
        ("sparse_as_dense", True, False),
        ("gradient_predivide_factor", 2.0, 1.0),
        ("scale_local_gradients", False, True),
        ("average_aggregated_gradients", False, True),
        ("backward_passes_per_step", 2, 3),
        ("sync", "majority", "full"),
    ],
)
def test_choices_that_differ_are_refused(name: str, ours: object, theirs: object) -> None:
    optimizer = sgd(**{name: ours if last() else theirs})
    assert name in raised_alike(apply_once(optimizer, variable_of()), MismatchError)


def test_a_variable_that_is_local_on_one_rank_only_is_named() -> None:
    variables, optimizer = named(2), sgd()
    if last():
        optimizer.register_local_var(variables[1])
    assert "'v1'" in raised_alike(apply_once(optimizer, *variables), MismatchError)


def test_ranks_that_apply_to_different_parts_hear_of_it_also_later() -> None:
    variables, optimizer = named(2), sgd()
    optimizer.build(variables)
    apply_once(optimizer, *variables)()
    apply_once(optimizer, variables[0])()
    for part in (slice(0, 1), slice(1, 2)):
        words = raised_alike(apply_once(optimizer, *(variables[part] if last() else variables)), MismatchError)
        assert "the list of variables must be the same on all ranks" in words


@pytest.mark.parametrize("later", [False, True])
def test_what_one_rank_alone_refuses_is_raised_on_all(later: bool) -> None:
    variable, optimizer = variable_of(), sgd()
    if later:
        apply_once(optimizer, variable)()
    gradient = tf.ones(2, tf.int32 if last() else tf.float32)
    words = raised_alike(lambda: optimizer.apply([gradient], [variable]), InvalidError)
    assert later or words.startswith(f"rank {hvd.size() - 1}: ")
    apply_once(optimizer, variable)()
    np.testing.assert_allclose(variable.numpy(), [-0.01 * (1 + later)] * 2, rtol=1e-6)


def test_fit_raises_the_mismatch_and_equal_models_train_afterwards() -> None:
    ours = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3 if last() else 4, name="layer")])
    ours.compile(sgd(), "mse")
    x, _ = data(hvd.rank(), 4)
    y = np.zeros((4, 3 if last() else 4), np.float32)
    words = raised_alike(lambda: ours.fit(x, y, verbose=0), MismatchError)
    assert "layer/kernel" in words
    equal = model()
    equal.compile(sgd(), "mse", run_eagerly=True)
    equal.fit(*data(hvd.rank(), 4), verbose=0)
    assert_same_bits_on_all_ranks(equal.weights)


def test_the_learning_rate_may_differ_until_a_broadcast_sets_it() -> None:
    variable, optimizer = variable_of(), sgd(1.0 if hvd.rank() == 0 else 0.5)
    apply_once(optimizer, variable)()
    hvd.broadcast_variables([variable, *optimizer.variables], root_rank=0)
    apply_once(optimizer, variable)()
    np.testing.assert_array_equal(variable.numpy(), [-2.0, -2.0])


@pytest.mark.parametrize("how", ["dense", "top-k", "loss scale"])
def test_a_momentum_that_is_a_variable_may_differ_until_a_broadcast_sets_it(how: str) -> None:
    variable = keras.Variable(np.ones(2, np.float32), name="weights")
    lars = hvd.optimizers.LARS(1.0)
    if hvd.rank() == 0:
        lars.momentum = 0.75  # as from a file
    topk = hvd.TopK(momentum_correction=True) if how == "top-k" else None
    made = keras.optimizers.LossScaleOptimizer(lars) if how == "loss scale" else lars
    optimizer = hvd.DistributedOptimizer(made, compression=topk)
    apply_once(optimizer, variable)()
    hvd.broadcast_variables([variable, *optimizer.variables], root_rank=0)
    assert float(optimizer.momentum.numpy()) == 0.75
    apply_once(optimizer, variable)()
    assert_same_bits_on_all_ranks([variable, *optimizer.variables])


def two(*names: str | None, same: bool = False) -> list[tuple[keras.optimizers.Optimizer, keras.Variable]]:
    """Two optimizers, each with a variable of its own; the last rank has them in the other order unless `same`."""
    pairs = [(sgd(1.0, name=name), variable_of()) for name in names]
    return pairs[::-1] if last() and not same else pairs


def test_optimizers_are_never_paired_by_the_order_of_their_first_steps() -> None:
    pairs = two("optA", "optB")
    words = raised_alike(apply_once(*pairs[0]), MismatchError)
    assert all(word in words for word in ("'optA'", "'optB'", "in the same order"))
    for optimizer, variable in sorted(pairs, key=lambda pair: pair[0]._hvd_ext.reducer.label):
        np.testing.assert_array_equal(variable.numpy(), [0, 0])
        optimizer.apply([tf.fill([2], float(hvd.rank()))], [variable])
        np.testing.assert_allclose(variable.numpy(), [-(hvd.size() - 1) / 2] * 2)
    words = raised_alike(apply_once(*pairs[0]), MismatchError)
    assert all(word in words for word in ("'optA'", "'optB'"))


def test_names_that_differ_in_keras_number_alone_are_told_apart_by_the_order_of_wrapping() -> None:
    (optimizer, variable), other = two(None, None)
    words = raised_alike(apply_once(optimizer, variable), MismatchError)
    assert all(repr(name) in words for name in hvd.allgather_object(optimizer.name))
    assert "their names do not tell whether they are the same" in words
    assert "hvd_ext.DistributedOptimizer(optimizer, name=...)" in words
    (optimizer, variable), _ = [(optimizer, variable), other][:: -1 if last() else 1]
    apply_once(optimizer, variable)()


def test_a_rank_may_have_made_more_optimizers_than_others() -> None:
    if last():
        keras.optimizers.SGD()
    (optimizer, variable), _ = two(None, None, same=True)
    assert len(set(hvd.allgather_object(optimizer.name))) > 1
    apply_once(optimizer, variable)()
    if last():
        hvd.DistributedOptimizer(keras.optimizers.Ftrl())
    named = hvd.DistributedOptimizer(keras.optimizers.Ftrl(), "named")
    apply_once(named, variable)()
    for unique in ("unique", "unique_1"):  # numbers of the user's own
        apply_once(hvd.DistributedOptimizer(keras.optimizers.Ftrl(name=unique)), variable)()


def test_tapes_are_not_paired_by_the_order_of_their_first_steps() -> None:
    if last():
        keras.layers.Dense(1)  # other numbers than other ranks

    def built() -> list[keras.layers.Layer]:
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        for layer in layers:
            layer.build((1, 2))
        return layers

    def gradient(layer: keras.layers.Layer) -> object:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(layer(tf.constant([[1.0, 2.0]]))) * float(hvd.rank())
        return tape.gradient(loss, [layer.kernel.value])

    for layer in built():
        gradient(layer)
    others = built()
    if last():
        others.reverse()
    gradient(others[0])
    assert "in another order" in raised_alike(lambda: gradient(others[1]), MismatchError)


def test_threads_that_meet_in_another_order_raise_or_are_right() -> None:
    pairs = two("optA", "optB")
    errors: list[str] = []

    def first_step(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
        scale = 1.0 if optimizer._hvd_ext.reducer.label == "optA" else 10.0
        try:
            optimizer.apply([tf.fill([2], scale * hvd.rank())], [variable])
        except MismatchError as error:
            errors.append(str(error))
            scale = 0.0
        np.testing.assert_allclose(variable.numpy(), [-scale * (hvd.size() - 1) / 2] * 2)
        finished.append(optimizer)

    finished: list[object] = []
    threads = [threading.Thread(target=first_step, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 2
    assert len({tuple(own) for own in hvd.allgather_object(errors)}) == 1
