"""What `DistributedOptimizer` makes of an optimizer, and what it refuses; nothing here needs the native library."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.keras.optimizers.models import optimizers
from hvd_ext.keras.optimizers.optimizer import Distributed, channels


@keras.saving.register_keras_serializable(package="tests", name="Slow")
class SlowSGD(keras.optimizers.SGD):
    """A registered optimizer of a user's own."""

    def __init__(self, *args: object, halvings: int = 1, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.halvings = halvings

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "halvings": self.halvings}


def test_the_optimizer_itself_is_wrapped_and_keeps_its_state() -> None:
    optimizer = keras.optimizers.Adam(0.25)
    variable = keras.Variable(np.zeros(3, np.float32))
    optimizer.apply([tf.ones(3)], [variable])
    state = [value.numpy() for value in optimizer.variables]
    wrapped = hvd.DistributedOptimizer(optimizer)
    for before, after in zip(state, wrapped.variables, strict=True):
        np.testing.assert_array_equal(before, after.numpy())
    assert wrapped is optimizer
    assert isinstance(wrapped, Distributed)
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert keras.optimizers.get(wrapped) is wrapped
    wrapped.learning_rate = 0.125
    assert float(wrapped.learning_rate) == 0.125
    assert channels(wrapped) == ()


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD(0.5, momentum=0.5), SlowSGD(0.5, halvings=3)])
def test_it_is_serialized_as_the_plain_optimizer_and_comes_back_plain(optimizer: keras.optimizers.Optimizer) -> None:
    plain_class = type(optimizer)
    plain = keras.saving.serialize_keras_object(optimizer)
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert keras.saving.serialize_keras_object(wrapped) == plain
    assert keras.optimizers.serialize(wrapped) == plain
    assert type(keras.saving.deserialize_keras_object(plain)) is plain_class
    assert type(type(wrapped).from_config(wrapped.get_config())) is plain_class
    assert type(wrapped.__class__.from_config(wrapped.get_config())) is plain_class
    assert type(pickle.loads(pickle.dumps(wrapped))) is plain_class


def test_wrapping_again_with_equal_options_gives_the_same_object_as_it_was() -> None:
    variable = keras.Variable(np.zeros(3, np.float32))
    how = {"op": hvd.Sum, "groups": [[variable]], "compression": hvd.Compression.fp16, "backward_passes_per_step": 2}
    optimizer = keras.optimizers.SGD(0.5)
    wrapped = hvd.DistributedOptimizer(optimizer, **how)
    reducer, kind = wrapped._hvd_ext.reducer, type(wrapped)
    assert hvd.DistributedOptimizer(wrapped, **how) is wrapped
    assert hvd.DistributedOptimizer(optimizer, "SGD", **{**how, "groups": ((variable,),)}) is wrapped
    assert hvd.PartialDistributedOptimizer(optimizer, **how) is wrapped
    assert wrapped._hvd_ext.reducer is reducer
    assert type(wrapped) is kind
    assert wrapped.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, "another op"),
        ({"op": hvd.Sum, "check_every": 3}, "another check_every"),
        ({"op": hvd.Sum, "name": "other"}, "another name"),
        ({"compression": hvd.TopK(0.5)}, "another op, compression"),
    ],
)
def test_wrapping_again_with_other_options_is_refused_and_changes_nothing(other: dict[str, object], words: str) -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Sum)
    reducer = wrapped._hvd_ext.reducer
    with pytest.raises(InvalidError, match=f"wrapped already, with {words};"):
        hvd.DistributedOptimizer(wrapped, **other)
    assert wrapped._hvd_ext.reducer is reducer
    assert hvd.DistributedOptimizer(wrapped, op=hvd.Sum) is wrapped


def test_local_layers_are_options_too() -> None:
    layers = [keras.layers.Dense(2), keras.layers.Dense(3)]
    wrapped = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.5), local_layers=layers)
    assert hvd.PartialDistributedOptimizer(wrapped, local_layers=reversed(layers)) is wrapped
    for face, how in ((hvd.DistributedOptimizer, {}), (hvd.PartialDistributedOptimizer, {"local_layers": layers[0]})):
        with pytest.raises(InvalidError, match="another local_layers"):
            face(wrapped, **how)


def test_a_loss_scale_optimizer_passes_the_momentum_on_if_there_is_one() -> None:
    lars, adam = hvd.optimizers.LARS(momentum=0.75), keras.optimizers.Adam()
    wrapped, other = (hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(one)) for one in (lars, adam))
    assert wrapped.momentum is lars.momentum
    wrapped.momentum = 0.5
    assert float(lars.momentum.numpy()) == 0.5
    assert not hasattr(other, "momentum")


def test_in_mixed_precision_both_optimizers_know_that_they_are_wrapped() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inner = keras.optimizers.SGD(0.5)
        wrapped = hvd.DistributedOptimizer(inner)
        assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
        assert hvd.DistributedOptimizer(inner) is wrapped
        assert hvd.DistributedOptimizer(wrapped) is wrapped
        with pytest.raises(InvalidError, match="optimizer 'SGD': it is wrapped already, with another op"):
            hvd.DistributedOptimizer(inner, op=hvd.Sum)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("optimizer", ["adam", None, keras.optimizers.Adam, object()])
def test_what_is_no_optimizer_of_keras_3_is_refused(optimizer: object) -> None:
    with pytest.raises(InvalidError, match="must be an optimizer of Keras 3"):
        hvd.DistributedOptimizer(optimizer)


def test_optimizers_that_leave_the_update_to_others_are_refused() -> None:
    with pytest.raises(InvalidError, match=r"tf\.compat\.v1 are not supported"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    with pytest.raises(InvalidError, match="wrap each of them"):
        hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.5)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": -1}, "must not be negative"),
        ({"op": 1}, "hvd_ext.Average or hvd_ext.Sum"),
        ({"bucket_nbytes": 0}, "at least 1"),
    ],
)
def test_what_is_refused_leaves_the_optimizer_plain(options: dict[str, object], words: str) -> None:
    optimizer = keras.optimizers.SGD(0.5)
    with pytest.raises(InvalidError, match=words):
        hvd.DistributedOptimizer(optimizer, **options)
    assert type(optimizer) is keras.optimizers.SGD
    with pytest.raises(InvalidError, match="DistributedOptimizer"):
        channels(optimizer)


def test_a_model_that_has_trained_plain_drops_its_traced_step() -> None:
    models = []
    for _ in range(2):
        models.append(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]))
        models[-1].compile(keras.optimizers.SGD(0.5), "mse")
        models[-1].train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    hvd.DistributedOptimizer(models[0].optimizer)
    assert models[0].train_function is None
    assert models[1].train_function is not None


def test_before_init_a_step_is_refused_and_changes_nothing() -> None:
    if hvd.is_initialized():
        pytest.skip("another test in this process has called init()")
    variable = keras.Variable(np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(NotInitializedError, match="init"):
        optimizer.apply([tf.ones(3)], [variable])
    np.testing.assert_array_equal(variable.numpy(), np.zeros(3))
    assert int(optimizer.iterations) == 0


def test_older_ways_to_say_it_are_taken() -> None:
    keywords = {"device_dense": "/gpu:0", "device_sparse": "", "use_locking": True, "sparse_as_dense": True}
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), "name", **keywords, num_groups=0)
    assert isinstance(wrapped, Distributed)
    assert wrapped._hvd_ext.reducer.options.sparse_as_dense


def test_a_models_optimizers_are_found_in_containers_and_parts_but_plain_ones_of_parts_do_not_count() -> None:
    compiled, listed, nested, inside = (hvd.DistributedOptimizer(keras.optimizers.SGD()) for _ in range(4))
    plain = keras.optimizers.SGD()
    part = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    part.compile("adam", "mse")  # as a model from a file
    layer = keras.layers.Dense(1)
    layer.helper = {"optimizer": inside}
    made = keras.Sequential([part, layer])
    made.kept = [listed, {"deep": (nested, plain)}]
    made.compile(compiled, "mse")
    assert {id(one) for one in optimizers(made)} == {id(one) for one in (compiled, listed, nested, plain, inside)}
    assert optimizers(made)[0] is compiled
    made.kept.append(made.kept)  # a circle
    assert len(optimizers(made)) == 5
