"""Optimizers of tf_keras (Keras 2) train over the ranks as one process does on the joined batch.

test_pairs.py has them with every option of the reduction.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.callbacks.learning_rate import Velocities
from hvd_ext.keras.optimizers.optimizer import channels
from tests.ranks.compare import assert_close, assert_equal
from tests.ranks.training import FEATURES, TARGETS, assert_same_bits_on_all_ranks, data, fill, joined, values

pytestmark = pytest.mark.ranks(2)

tf_keras = pytest.importorskip("tf_keras", reason="needs Keras 2: python -m pip install tf_keras")

ROWS, BATCH = 8, 4
NEW, OLD = tf_keras.optimizers, tf_keras.optimizers.legacy
KINDS = pytest.mark.parametrize("kind", [NEW.SGD, OLD.SGD], ids=["new", "legacy"])
BY_USERS = pytest.mark.skipif(
    os.environ.get("TF_USE_LEGACY_KERAS") != "1", reason="tf.keras is Keras 3; a job with TF_USE_LEGACY_KERAS=1 runs it"
)


def model() -> Any:
    """A small model with equal weights on all ranks."""
    layers = [tf_keras.layers.Dense(5, activation="tanh"), tf_keras.layers.Dense(TARGETS)]
    result = tf_keras.Sequential([tf_keras.layers.Input((FEATURES,)), *layers])
    fill(result.weights)
    return result


def fitted(optimizer: Any, x: np.ndarray, y: np.ndarray, batch: int, traced: bool = False) -> Any:
    result = model()
    result.compile(optimizer, "mse", run_eagerly=not traced)  # a traced step takes long to make
    result.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    return result


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (NEW.Adam, {"global_clipnorm": 0.25, "use_ema": True, "ema_overwrite_frequency": 2, "weight_decay": 0.1}),
        (OLD.SGD, {"momentum": 0.5, "clipnorm": 0.125}),
    ],
    ids=["new", "legacy"],
)
def test_fit_equals_one_process_on_the_joined_batch(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    optimizer = hvd.DistributedOptimizer(kind(0.05, **settings), name="mine", bucket_nbytes=64)
    assert type(optimizer).__name__ == kind.__name__
    ours = fitted(optimizer, *data(hvd.rank(), ROWS), BATCH, traced=True)
    reference = fitted(kind(0.05, **settings), *joined(ROWS, BATCH), BATCH * hvd.size())
    assert_same_bits_on_all_ranks(ours.weights)
    assert not np.array_equal(values(ours.weights)[0], values(model().weights)[0])
    assert_close(ours.weights, reference.weights)
    assert len(channels(optimizer)) == 1
    for name in ("model.keras", "model.h5"):
        ours.save(tmp_path / name)
        loaded = tf_keras.models.load_model(tmp_path / name)
        assert loaded.optimizer.__class__ is kind
        assert type(loaded.optimizer) is kind
        # tf_keras does not read the variables of legacy optimizers from .keras files
        if kind is NEW.Adam or name == "model.h5":
            for got, expected in zip(loaded.optimizer.variables(), optimizer.variables(), strict=True):
                assert np.array_equal(got.numpy(), expected.numpy())
    assert hvd.DistributedOptimizer(optimizer, name="mine", bucket_nbytes=64) is optimizer
    with pytest.raises(InvalidError, match="wrapped already, with another name, bucket_nbytes"):
        hvd.DistributedOptimizer(optimizer)
    assert type(optimizer.from_config(optimizer.get_config())) is kind
    if kind is OLD.SGD:  # the others cannot be copied, plain ones neither
        assert type(copy.deepcopy(optimizer)) is kind
    with pytest.raises(InvalidError, match="are not pickled"):
        pickle.dumps(optimizer)


@KINDS
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(kind: Any) -> None:
    first, second = tf.Variable([8.0], name="first"), tf.Variable([8.0], name="second")
    optimizer = hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum)
    optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), first), (None, second)])
    optimizer.apply_gradients([(tf.constant([4.0]), first), (tf.constant([2.0]) if hvd.rank() == 0 else None, second)])
    total = sum(range(hvd.size())) + 4.0 * hvd.size()
    assert [first.numpy().tolist(), second.numpy().tolist()] == [[8.0 - total], [6.0]]
    # both kinds take the older name of the option
    optimizer.apply_gradients([(tf.constant([1.0]), first)], experimental_aggregate_gradients=False)
    assert first.numpy().tolist() == [7.0 - total]


# What a loop may do between the loss and the update, and whether the gradients that arrive are the sum or this rank's.
ORDERS = [
    ("compute", "apply", "sum"),
    ("compute", "skip", "sum"),
    ("compute, aggregate", "apply", "sum"),
    ("compute, aggregate", "skip", "sum"),
    ("compute, change", "skip", "sum"),
    ("compute, change", "apply", "refused"),
    ("compute, change", "aggregate", "refused"),
    ("compute, change one", "apply", "refused"),
    ("tape", "apply", "sum"),
    ("tape", "skip", "own"),
    ("tape, aggregate", "apply", "sum"),
    ("tape, aggregate", "skip", "sum"),
    ("minimize", "", "sum"),
]


def take_step(optimizer: Any, kind: Any, both: Any, before: str, last: str) -> None:
    """Compute the gradients of two variables and apply them, in one of the orders."""

    def loss() -> tf.Tensor:
        return tf.reduce_sum(both[0] + 2.0 * both[1]) * (hvd.rank() + 1.0)

    if before == "minimize":
        optimizer.minimize(loss, both)
        return
    if before.startswith("compute"):
        private = hasattr(kind, "_compute_gradients")
        pairs = (optimizer._compute_gradients if private else optimizer.compute_gradients)(loss, both)
    else:
        with tf.GradientTape() as tape:
            value = loss()
        pairs = list(zip(tape.gradient(value, both), both, strict=True))
    aggregate = getattr(optimizer, "aggregate_gradients" if kind is NEW.SGD else "_aggregate_gradients")
    if before.endswith("aggregate"):
        pairs = aggregate(pairs)
    if before.endswith("change"):
        pairs = [(tf.clip_by_value(gradient, -99.0, 99.0), variable) for gradient, variable in pairs]
    if before.endswith("change one"):
        pairs = [(pairs[0][0] * 1.0, pairs[0][1]), pairs[1]]
    if last == "aggregate":
        aggregate(pairs)
        return
    skip = {"skip_gradients_aggregation": True} if kind is NEW.SGD else {"experimental_aggregate_gradients": False}
    optimizer.apply_gradients(pairs, **(skip if last == "skip" else {}))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@KINDS
def test_every_order_of_calls_reduces_once(kind: Any, traced: bool) -> None:
    scaled = tf_keras.mixed_precision.LossScaleOptimizer
    wrap = lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum)  # noqa: E731 - a sum shows what is reduced twice
    makes = {
        "plain": lambda: wrap(kind(1.0)),
        "wrapped outside": lambda: wrap(scaled(kind(1.0), initial_scale=8.0)),
        "wrapped inside": lambda: scaled(wrap(kind(1.0)), initial_scale=8.0),
    }
    total = sum(range(1, hvd.size() + 1))
    for place, (where, make) in enumerate(makes.items()):
        for number, (before, last, expected) in enumerate(ORDERS):
            if where != "plain" and ("change" in before or "aggregate" in before):
                continue  # a loss-scale optimizer has no such method
            if traced and (place + number + (kind is NEW.SGD)) % 2:
                continue  # tracing takes long: each order is traced with one kind of optimizer and one wrapper
            if (where, before, last) == ("wrapped inside", "compute", "apply"):
                expected = "refused"  # the one outside divides by its scale in between
            both = tf.Variable([8.0]), tf.Variable([4.0])
            step = functools.partial(take_step, make(), kind, both, before, last)
            run = tf.function(step, autograph=False) if traced else step
            if expected == "refused":
                with pytest.raises(InvalidError, match="cannot tell whether the gradients given to apply_gradients"):
                    run()
                continue
            factor = {"sum": total, "own": hvd.rank() + 1}[expected]
            run()
            got = [variable.numpy().tolist() for variable in both]
            assert got == [[8.0 - factor], [4.0 - 2 * factor]], (where, before, last)


@KINDS
def test_an_average_of_changed_gradients_is_taken_again_and_every_optimizer_has_both_names(kind: Any) -> None:
    variable, other = tf.Variable([8.0]), tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(kind(1.0))
    loss = lambda: variable * (hvd.rank() + 1.0)  # noqa: E731 - of a step
    mean = (hvd.size() + 1) / 2
    for method in (optimizer.compute_gradients, optimizer._compute_gradients):
        variable.assign([8.0])
        ((gradient, _), (missing, _)) = method(loss, [variable, other])
        assert missing is None
        assert gradient.numpy().tolist() == [mean]
        optimizer.apply_gradients([(gradient / 2, variable)])
        assert variable.numpy().tolist() == [8.0 - mean / 2]
    # gradients of a tape are reduced by the same optimizer still
    optimizer.apply_gradients([(tf.constant([hvd.rank() + 1.0]), variable)])
    assert variable.numpy().tolist() == [8.0 - 1.5 * mean]
    with pytest.raises(InvalidError, match="reduced by the compute_gradients of another optimizer, 'SGD', already"):
        hvd.DistributedOptimizer(kind(1.0)).apply_gradients([(gradient, variable)])
    if kind is NEW.SGD:
        with pytest.raises(InvalidError, match="grad_loss must be None; only legacy optimizers have it"):
            optimizer._compute_gradients(loss, [variable], tf.constant([1.0]))
        return

    @tf.function
    def step() -> None:
        gradients = optimizer.get_gradients(loss(), [variable])
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        optimizer.get_updates(loss(), [variable])

    step()
    assert variable.numpy().tolist() == [8.0 - 3.5 * mean]


@pytest.mark.parametrize("how", ["compute", "compute, skip", "apply", "apply, average"])
@KINDS
def test_several_passes_add_up_before_one_update(kind: Any, how: str) -> None:
    variable, unused = tf.Variable([[1.0], [2.0], [4.0]], name="variable"), tf.Variable([1.0], name="unused")
    average = how.endswith("average")
    optimizer = hvd.DistributedOptimizer(
        kind(1.0), backward_passes_per_step=2, average_aggregated_gradients=average, op=hvd.Sum
    )

    def step(count: tf.Tensor) -> None:
        if how.startswith("compute"):
            pairs = optimizer.compute_gradients(lambda: count * tf.gather(variable, [1]), [variable, unused])
            assert pairs[1][0] is None
        else:
            slices = tf.IndexedSlices(tf.reshape(count, [1, 1]), [1], [3, 1])
            pairs = [(slices, variable), (None, unused)]
        optimizer.apply_gradients(pairs, **({"experimental_aggregate_gradients": False} if "skip" in how else {}))

    # each way is traced with one kind of optimizer
    traced = (kind is NEW.SGD) == (how in ("compute", "apply, average"))
    run = tf.function(step, autograph=False) if traced else step
    expected = 2.0
    for number in range(4):
        run(tf.constant(float(number * 2 + hvd.rank())))
        if number % 2:
            both = sum(2 * number + 2 * (number - 1) + 2 * rank for rank in range(hvd.size()))
            expected -= both / (2 if average else 1)
        assert variable.numpy().ravel().tolist() == [1.0, expected, 4.0]
    assert int(optimizer.iterations) == 2
    if how.startswith("compute"):
        with pytest.raises(InvalidError, match="cannot tell whether the gradients"):
            optimizer.apply_gradients([(tf.ones((3, 1)), variable)])


def test_a_loop_with_a_tape_broadcasts_inside_its_traced_first_step() -> None:
    """As Horovod's example with a tape does it: `variables()` has parentheses in Keras 2."""
    ours, optimizer = model(), NEW.SGD(0.02, momentum=0.5)
    fill(ours.weights, salt=hvd.rank())

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, first: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(ours(x, training=True) - y))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, ours.trainable_variables)
        optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))
        if first:
            hvd.broadcast_variables(ours.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        return loss

    for salt in range(3):
        step(*(tf.constant(part) for part in data(hvd.rank(), BATCH, salt)), salt == 0)
        assert_same_bits_on_all_ranks([*ours.weights, *optimizer.variables()])
    assert int(optimizer.iterations) == 3


@BY_USERS
@KINDS
def test_a_script_that_resumes_from_checkpoints_of_rank_0(kind: Any, tmp_path: Path) -> None:
    """As Horovod's ImageNet example does it, with the Keras face, files of HDF5 and a chain of schedules."""
    import hvd_ext.keras as face

    assert tf.keras.Model is tf_keras.Model
    x, y = data(hvd.rank(), ROWS)
    initial, rates = 0.5 * hvd.size(), []
    for begin, end in ((0, 2), (2, 4)):
        found = max((int(path.stem.split("-")[1]) for path in tmp_path.glob("*.h5")), default=0)
        resumed = face.broadcast(found, 0, name="resume_from_epoch")
        assert resumed == begin
        if resumed > 0 and hvd.rank() == 0:
            ours = face.load_model(str(tmp_path / f"checkpoint-{int(resumed)}.h5"), compression=hvd.Compression.none)
            assert type(ours).__module__.startswith("tf_keras.")
            assert ours.optimizer.__class__ is kind
        else:
            ours = model()
            fill(ours.weights, salt=hvd.rank())
            ours.compile(face.DistributedOptimizer(kind(initial, momentum=0.5)), "mse", metrics=["mae"])
        callbacks = [
            face.callbacks.BroadcastGlobalVariablesCallback(0),
            face.callbacks.MetricAverageCallback(),
            face.callbacks.LearningRateWarmupCallback(initial_lr=initial, warmup_epochs=1, verbose=0),
            face.callbacks.LearningRateScheduleCallback(
                initial_lr=initial, multiplier=lambda epoch: 1.0, start_epoch=1, end_epoch=2
            ),
            face.callbacks.LearningRateScheduleCallback(
                initial_lr=initial, multiplier=lambda epoch: 0.1, start_epoch=2
            ),
            tf_keras.callbacks.ReduceLROnPlateau(patience=10),
        ]
        if hvd.rank() == 0:
            callbacks.append(tf_keras.callbacks.ModelCheckpoint(str(tmp_path / "checkpoint-{epoch}.h5")))
        options = {"steps_per_epoch": 2, "epochs": end, "initial_epoch": int(resumed), "verbose": 0}
        history = ours.fit(
            tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH), callbacks=callbacks, **options
        )
        rates += history.history["lr"]
        assert_same_bits_on_all_ranks(ours.weights)
        hvd.barrier()
    np.testing.assert_allclose(rates, [initial, initial, initial / 10, initial / 10], rtol=1e-6)
    mine = ours.evaluate(x, y, verbose=0)
    score = face.allreduce(mine)
    np.testing.assert_allclose(score.numpy(), np.mean(hvd.allgather_object(mine), axis=0), rtol=1e-5)


@BY_USERS
def test_load_model_reads_the_file_of_rank_0(tmp_path: Path) -> None:
    x, y = data(hvd.rank(), ROWS)
    ours = fitted(hvd.DistributedOptimizer(NEW.Adam(0.02)), x, y, BATCH)
    loaded = []
    for name in ("model.keras", "model.h5"):
        if hvd.rank() == 0:
            ours.save(tmp_path / name)
        loaded.append(hvd.load_model(tmp_path / name, root_rank=0))
        assert type(loaded[-1]).__module__.startswith("tf_keras.")
    for each in (ours, *loaded):
        each.run_eagerly = True
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=hvd.callbacks.synchronized())
    for again in loaded:
        assert_same_bits_on_all_ranks([*again.weights, *again.optimizer.variables()])
        assert_equal(again.weights, ours.weights)


@pytest.mark.parametrize("kind", [OLD.SGD, OLD.RMSprop], ids=["SGD", "RMSprop"])
def test_velocities_of_legacy_optimizers_follow_the_learning_rate(kind: Any) -> None:
    variable, other = tf.Variable([8.0]), tf.Variable([8.0, 4.0])
    optimizer = hvd.DistributedOptimizer(kind(0.5, momentum=0.5))
    velocities = Velocities(optimizer)  # before there are any
    optimizer.apply_gradients([(tf.constant([2.0]), variable), (tf.constant([4.0, 2.0]), other)])
    slots = [optimizer.get_slot(one, "momentum") for one in (variable, other)]
    kept = [one for one in optimizer.variables() if not any(one is slot for slot in slots)]
    before, rest = values(slots), values(kept)
    assert all(value.any() for value in before)
    velocities.scale(4.0)
    for got, wanted in zip(values(slots), before, strict=True):
        np.testing.assert_array_equal(got, 4 * wanted)
    assert_equal(values(kept), rest)


def test_a_model_whose_weights_are_frozen_may_have_a_plain_optimizer() -> None:
    ours = model()
    fill(ours.weights, salt=hvd.rank())
    ours.trainable = False
    ours.compile("sgd", "mse", run_eagerly=True)
    own = ours.weights[0]
    before = own.numpy()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1, local_variables=[own])
    ours.fit(*data(hvd.rank(), BATCH), callbacks=[callback], verbose=0)
    assert np.array_equal(own.numpy(), before)
    assert_same_bits_on_all_ranks(ours.weights[1:])
    root = model()
    fill(root.weights, salt=hvd.size() - 1)
    for got, expected in zip(ours.weights[1:], root.weights[1:], strict=True):
        assert np.array_equal(got.numpy(), expected.numpy())


@pytest.mark.parametrize("how", ["outside", "inside", "legacy"])
def test_all_ranks_skip_a_step_in_which_one_overflows(how: str) -> None:
    wrap, scaled = hvd.DistributedOptimizer, tf_keras.mixed_precision.LossScaleOptimizer
    kind = OLD.SGD if how == "legacy" else NEW.SGD
    if how == "inside":
        optimizer = scaled(wrap(kind(1.0)), initial_scale=8.0)  # as compile() does under mixed_float16
    else:
        optimizer = wrap(scaled(kind(1.0), initial_scale=8.0))
    variable = tf.Variable([4.0], name="variable")

    @tf.function
    def step(gradient: tf.Tensor) -> None:
        optimizer.get_scaled_loss(gradient)
        (unscaled,) = optimizer.get_unscaled_gradients([gradient])
        optimizer.apply_gradients([(unscaled, variable)])

    last = hvd.size() - 1
    step(tf.constant([float("inf") if hvd.rank() == last else 8.0]))
    assert variable.numpy().tolist() == [4.0]
    assert float(optimizer.loss_scale) == 4.0
    step(tf.constant([4.0 * hvd.rank()]))
    np.testing.assert_allclose(variable.numpy(), [4.0 - last / 2], rtol=1e-6)
    assert float(optimizer.loss_scale) == 4.0
    assert_same_bits_on_all_ranks([variable])


def test_what_cannot_be_is_refused_in_words() -> None:
    wrap, scaled = hvd.DistributedOptimizer, tf_keras.mixed_precision.LossScaleOptimizer
    with pytest.raises(InvalidError, match="before the loss-scale optimizer sees"):
        wrap(scaled(NEW.SGD()), backward_passes_per_step=2)
    variable = tf.Variable([4.0])
    around = scaled(wrap(NEW.SGD(), backward_passes_per_step=2))
    with pytest.raises(InvalidError, match="before the loss-scale optimizer sees"):
        around.apply_gradients([(tf.constant([1.0]), variable)])
    with pytest.raises(InvalidError, match="inside of a loss-scale optimizer: it is wrapped already"):
        wrap(scaled(wrap(OLD.SGD())))
    with pytest.raises(InvalidError, match="gradient_aggregator"):
        wrap(OLD.SGD(gradient_aggregator=lambda pairs: pairs))
    with pytest.raises(InvalidError, match="a tf_keras LossScaleOptimizer skips a step on the rank"):
        wrap(scaled(NEW.SGD())).register_local_var(variable)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable)
    gradient = tape.gradient(loss, variable)
    with pytest.raises(InvalidError, match="has been reduced by a DistributedGradientTape already"):
        wrap(NEW.SGD()).apply_gradients([(gradient, variable)])
    compiled = tf.function(wrap(NEW.SGD()).apply_gradients, jit_compile=True, autograph=False)
    with pytest.raises(InvalidError, match="XLA cannot communicate"):
        compiled([(tf.constant([1.0]), variable)])
    if hvd.size() > 1:
        with pytest.raises(hvd.errors.MismatchError, match="the optimizer's momentum must be the same"):
            wrap(NEW.SGD(momentum=hvd.rank() / 8)).apply_gradients([(tf.constant([1.0]), variable)])


def test_layers_of_a_rank_of_its_own() -> None:
    network = model()
    optimizer = hvd.PartialDistributedOptimizer(NEW.SGD(1.0), local_layers=network.layers[1])
    network.compile(optimizer, "mse", run_eagerly=True)
    before = values(network.weights)
    x, y = data(hvd.rank(), BATCH)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(network(x) - y))
    own = tape.gradient(loss, network.trainable_weights)
    network.train_on_batch(x, y)
    assert_same_bits_on_all_ranks(network.layers[0].weights)
    for index in (2, 3):
        expected = before[index] - own[index].numpy() / hvd.size()
        np.testing.assert_allclose(values(network.weights)[index], expected, rtol=1e-5, atol=1e-6)
