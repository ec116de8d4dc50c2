"""The callbacks in a real `fit`: what they count, and how training resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import elastic

STEPS, EPOCHS = 4, 3
X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
Y = X[:, :1] * 2


def compiled(library: Any) -> Any:
    """A small model with a wrapped optimizer."""
    model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(library.optimizers.SGD(0.1, momentum=0.5)), "mse")
    return model


def listed(state: elastic.State, every: int = 1, commit_first: bool = False) -> list[Any]:
    """The callbacks, in either order."""
    callbacks = [
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
        elastic.CommitStateCallback(state, every),
    ]
    return callbacks[::-1] if commit_first else callbacks


def interrupting(library: Any, at: dict[int, Any]) -> Any:
    """A callback that raises or calls what belongs to a batch, counted over all `fit`s."""

    class Interrupting(library.callbacks.Callback):
        """Counts the batches."""

        seen = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            """Raise or call."""
            what = at.get(self.seen)
            type(self).seen += 1
            if isinstance(what, Exception):
                raise what
            if what is not None:
                what()

    return Interrupting()


def train(state: Any, callbacks: list[Any]) -> None:
    """Trains as docs/elastic.md does."""
    while state.epoch < EPOCHS:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).skip(state.batch)
        state.model.fit(
            data,
            initial_epoch=state.epoch,
            epochs=state.epoch + 1,
            steps_per_epoch=STEPS - state.batch,
            callbacks=callbacks,
            verbose=0,
        )


@pytest.mark.parametrize("commit_first", [False, True])
@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_training_resumes_in_the_middle_of_an_epoch(name: str, commit_first: bool, session: Any) -> None:
    library = keras if name == "keras" else pytest.importorskip(name)
    model, straight = compiled(library), compiled(library)
    straight.set_weights(model.get_weights())
    state = elastic.KerasState(model, batch=0, epoch=0)
    begun: list[tuple[int, int]] = []

    def change() -> None:
        session.changed = True

    def noted(state: Any) -> None:
        begun.append((state.epoch, state.batch))
        train(state, [*listed(state, 1, commit_first), interruptions])

    # a failure in the third batch; a change at the end of batch 5, the first one of epoch 1, and one in an epoch's last
    interruptions = interrupting(library, {2: elastic.HorovodInternalError("rank 1 has left"), 5: change, 12: change})
    elastic.run(noted)(state)
    assert begun == [(0, 0), (0, 2), (1, 1), (3, 0)]
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    for _ in range(EPOCHS):
        straight.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for value, expected in zip(model.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_rare_commits_lose_the_batches_since(session: Any) -> None:
    state = elastic.KerasState(compiled(keras), batch=0, epoch=0)
    begun: list[tuple[int, int]] = []

    def noted(state: Any) -> None:
        begun.append((state.epoch, state.batch))
        train(state, [*listed(state, 3), interruptions])

    interruptions = interrupting(keras, {6: elastic.HorovodInternalError("rank 1 has left")})
    elastic.run(noted)(state)
    assert begun == [(0, 0), (1, 0)]


@pytest.mark.parametrize("initial", [0, 2])
def test_epochs_count_from_the_state_whatever_number_keras_begins_with(initial: int) -> None:
    model = compiled(keras)
    state = elastic.KerasState(model, batch=0, epoch=2)
    epochs = initial + 3
    model.fit(X, Y, initial_epoch=initial, epochs=epochs, batch_size=4, callbacks=listed(state), verbose=0)
    assert (state.epoch, state.batch) == (5, 0)


def test_a_callback_of_an_earlier_fit_updates_nothing() -> None:
    model = compiled(keras)
    state = elastic.KerasState(model, batch=0, epoch=0)
    model.fit(X, Y, batch_size=4, callbacks=listed(state), verbose=0)
    model.fit(X, Y, batch_size=4, callbacks=[elastic.CommitStateCallback(state)], verbose=0)
    assert (state.epoch, state.batch) == (1, 0)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_number_of_batches_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(hvd.errors.InvalidError, match="batches_per_commit"):
        elastic.CommitStateCallback(elastic.ObjectState(), wrong)
