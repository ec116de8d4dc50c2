"""Elastic states on several ranks: what a late worker receives, and ranks that hear of a change at different times."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import elastic
from hvd_ext.errors import CommunicationError
from hvd_ext.job import membership
from hvd_ext.keras.checkpoint import model_state
from hvd_ext.keras.elastic_fit import progress
from hvd_ext.keras.elastic_fit.carried import Carried
from hvd_ext.keras.optimizers.comparable import variables_of

X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_all_ranks_get_the_weights_slots_and_values_of_rank_0(name: str, rank: int) -> None:
    library = keras if name == "keras" else pytest.importorskip(name)
    keras.utils.set_random_seed(rank + 1)
    model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(3), library.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(library.optimizers.Adam(0.1)), "mse")
    model.other = library.optimizers.SGD(0.1, momentum=0.9)
    state = elastic.KerasState(model, batch=0, epoch=rank, losses=[rank])
    if rank == 0:  # as if it had trained before the others came
        model.other.build(model.trainable_variables[:2])
        for variable in variables_of(model.other)[2:]:
            variable.assign_add(tf.ones_like(tf.convert_to_tensor(variable)))
        model.optimizer.learning_rate.assign(0.25)
    state.sync()
    assert (state.epoch, state.losses) == (0, [0])
    every = [*model.weights, *variables_of(model.optimizer), *variables_of(model.other)]
    ranks = hvd.allgather_object([tf.convert_to_tensor(variable).numpy() for variable in every])
    for values in ranks:
        for value, expected in zip(values, ranks[0], strict=True):
            np.testing.assert_array_equal(value, expected)
    callbacks = [elastic.UpdateEpochStateCallback(state), elastic.CommitStateCallback(state)]
    model.fit(X, X[:, :1], batch_size=4, callbacks=callbacks, verbose=0)
    assert state.epoch == 1


def test_a_change_that_one_rank_has_heard_of_interrupts_all(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        """Stands for the connection with the supervisor."""

        changed = False

    session: Any = Session()
    monkeypatch.setattr(membership, "session", lambda: session)
    state = elastic.ObjectState(batch=0)
    state.commit()
    session.changed = rank == size - 1
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        state.commit()


def compiled(rank: int) -> keras.Model:
    keras.utils.set_random_seed(rank + 1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.125 * (rank + 1))), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.array(variable.numpy()) for variable in (*model.weights, *model.optimizer.variables)]


def test_a_rank_has_all_weights_of_the_one_that_is_ahead_or_none(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, last = compiled(rank), size - 1
    ahead = int(rank == last)
    own = progress.Progress(0, 2, 4 + ahead, 24 + ahead, size, rates=progress.rates_of(model), metrics=[])
    meeting = progress.furthest(own, [progress.Logs([0, 1], {"loss": [rank, 0.5]})])
    assert meeting is not None
    assert (meeting.source, meeting.fit, meeting.keys[last]) == (last, 0, (0, 25, 2, 5))
    assert meeting.logs == [([0, 1], {"loss": [last, 0.5]})]
    before = values(model)

    def torn(listed: Any, root: int) -> None:
        if rank != root:
            listed[0].assign(listed[0] + 7.0)
        raise CommunicationError("a rank is lost while it sends")

    if size > 1:
        with monkeypatch.context() as patched:
            patched.setattr(model_state, "send", torn)
            with pytest.raises(CommunicationError):
                progress.take(model, own, meeting)
    for now, expected in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(now, expected)
    met = progress.take(model, own, meeting)
    assert (met.updates, met.step) == (25, 5)
    assert float(model.optimizer.learning_rate) == 0.125 * size
    for of_rank in hvd.allgather_object(values(model)):
        for now, expected in zip(values(model), of_rank, strict=True):
            np.testing.assert_array_equal(now, expected)


def test_ranks_that_are_all_new_begin_with_this_call() -> None:
    assert progress.furthest(None, []) is None


def test_a_rank_has_the_copy_of_another(rank: int, size: int) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.TopK(0.02))
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(X * (rank + 1), X[:, :1], batch_size=4, verbose=0)
    carried = Carried(redundancy=1)
    carried.copy(model, 4)
    carried.leave(model, 4, together=False)
    (own,) = carried._parts
    assert own.states
    parts = hvd.allgather_object((own, carried._copy))
    copies = {copy.rank for _, copy in parts if copy is not None}
    assert copies == (set(range(size)) if size > 1 else set())
    for own, copy in parts:
        if copy is not None:
            assert copy.rank != own.rank
            original = parts[copy.rank][0]
            for owner, arrays in copy.states.items():
                for name, array in arrays.items():
                    np.testing.assert_array_equal(array, original.states[owner][name])
