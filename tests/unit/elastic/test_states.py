"""States: what a commit copies, and what a restore sets."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import elastic


def module(name: str) -> Any:
    """Keras 3 or Keras 2."""
    return keras if name == "keras" else pytest.importorskip(name)


def compiled(library: Any, optimizer: Any = None) -> Any:
    """A small model with a wrapped optimizer."""
    model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(3), library.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizer or library.optimizers.Adam(0.1)), "mse")
    return model


def everything(model: Any) -> list[np.ndarray]:
    """The weights and the optimizer's variables."""
    slots = model.optimizer.variables
    return [value.numpy() for value in (*model.weights, *(slots() if callable(slots) else slots))]


X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
Y = X[:, :1] * 2


def test_a_commit_copies_and_a_restore_copies_again() -> None:
    state = elastic.ObjectState(losses=[1], epoch=0)
    state.losses.append(2)
    state.epoch = 1
    state.commit()
    state.losses.append(3)
    state.restore()
    assert (state.losses, state.epoch) == ([1, 2], 1)
    state.losses.append(4)
    state.restore()
    assert state.losses == [1, 2]


def test_other_ranks_get_the_values_of_rank_0() -> None:
    state = elastic.ObjectState(lambda values: {"epoch": 7, "losses": [1]}, lambda: 1, epoch=0, losses=[])
    state.sync()
    assert (state.epoch, state.losses) == (7, [1])
    state.epoch = 8
    state.restore()
    assert state.epoch == 7


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lock": threading.Lock()}, r"'lock' \(lock\): a commit must be able to copy it"),
        ({"commit": 1}, "'commit': the state has an attribute of this name"),
    ],
)
def test_values_that_no_state_can_have_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(hvd.errors.InvalidError, match=words):
        elastic.ObjectState(**values)


def test_variables_are_committed_and_restored_in_place() -> None:
    variables = [tf.Variable([1.0, 2.0]), keras.Variable(np.float32([3.0]))]
    state = elastic.TensorFlowState(variables, step=0)
    variables[0].assign([4.0, 5.0])
    state.step = 1
    state.commit()
    variables[0].assign([6.0, 7.0])
    variables[1].assign([8.0])
    state.step = 2
    state.restore()
    assert (list(variables[0].numpy()), list(variables[1].numpy()), state.step) == ([4.0, 5.0], [3.0], 1)
    state.sync()


def test_a_state_of_no_variables_or_of_a_session_is_refused() -> None:
    with pytest.raises(hvd.errors.InvalidError, match="pass the variables"):
        elastic.TensorFlowState()
    with pytest.raises(hvd.errors.InvalidError, match="session must be None"):
        elastic.TensorFlowState([tf.Variable(1.0)], session=object())


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_weights_and_slots_go_back_to_the_commit(name: str) -> None:
    library = module(name)
    model = compiled(library)
    state = elastic.KerasState(model, batch=0)
    first = everything(model)
    assert len(first) >= len(model.weights) + 2 * len(model.trainable_variables)  # the slots are there
    model.fit(X, Y, batch_size=4, verbose=0)
    trained = everything(model)
    assert not np.array_equal(first[0], trained[0])
    state.commit()
    model.fit(X, Y, batch_size=4, verbose=0)
    state.restore()
    for value, expected in zip(everything(model), trained, strict=True):
        np.testing.assert_array_equal(value, expected)
    state.sync()
    state.reset()
    assert model.train_function is None
    model.fit(X, Y, batch_size=4, verbose=0)


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_a_model_trains_on_after_its_world_has_ended(name: str) -> None:
    library = module(name)
    model, straight = compiled(library), compiled(library)
    straight.set_weights(model.get_weights())
    state = elastic.KerasState(model)
    for _ in range(2):
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        hvd.shutdown()
        hvd.init()
        state.on_reset()
        state.sync()
        straight.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        straight.train_function = None  # it is of the world that has ended, too
    for value, expected in zip(everything(model), everything(straight), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_the_optimizer_of_a_tape_belongs_to_the_state() -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    state = elastic.TensorFlowKerasState(model, optimizer, batch=0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    assert any(np.any(slot.numpy()) for slot in optimizer.momentums)
    state.restore()
    assert not any(np.any(slot.numpy()) for slot in optimizer.momentums)
    assert int(optimizer.iterations) == 0


def test_slots_that_are_made_after_the_commit_become_zeros() -> None:
    model = compiled(keras)
    model.other = keras.optimizers.SGD(0.1, momentum=0.9)
    state = elastic.TensorFlowKerasState(model)
    state.sync()
    model.other.build(model.trainable_variables)
    model.other.momentums[0].assign_add(keras.ops.ones_like(model.other.momentums[0]))
    state.restore()
    assert not np.any(model.other.momentums[0].numpy())


def test_a_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(hvd.errors.InvalidError, match="must be built first"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_local_variables_are_refused() -> None:
    model = compiled(keras)
    model.optimizer.register_local_var(model.trainable_variables[0])
    with pytest.raises(hvd.errors.InvalidError, match="local variables"):
        elastic.KerasState(model).sync()
