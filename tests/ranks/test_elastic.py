"""Elastic states on several ranks: what a late worker receives, and ranks that hear of a change at different times."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import elastic
from hvd_ext.job import membership
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
