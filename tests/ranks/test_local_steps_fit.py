"""Local steps in Keras' `fit`: weights of the model, saving, checkpoints, and what differs between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError
from tests.ranks.compare import assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import hosts
from tests.ranks.training import assert_same_bits_on_all_ranks, checkpoint, policy_of, shared, values

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, 3), pytest.mark.usefixtures("apart")]
# Ten seconds each on three ranks.
on_two = pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the other tests show what is different on more ranks")


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
        pytest.param(hvd.LocalSteps(4), None, marks=on_two),
        (hvd.LocalSteps(4, overlap=3, outer=keras.optimizers.Adam(0.1)), hvd.Quantized(4, min_elements=1)),
        pytest.param(hvd.LocalSteps(5, fragments=2, overlap=2, start=3), hvd.TopK(0.25, min_elements=1), marks=on_two),
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
    of_whole, of_second = (policy_of(one.optimizer).save() for one in (whole, second))
    assert len(of_whole) == len(of_second)
    for (name, array), saved in zip(of_whole.items(), of_second.values(), strict=True):
        np.testing.assert_array_equal(array, saved, err_msg=name)


@on_two
@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_the_outer_step_under_way_ends_where_a_restored_job_has_no_overlap(outer: Any) -> None:
    first, second = (model(hvd.LocalSteps(4, overlap=overlap, outer=outer)) for overlap in (3, 0))
    fit(first)  # six updates: the outer step of the fourth one is under way
    saved = policy_of(first.optimizer).save()
    assert "fragment/0/change/0" in saved
    second.optimizer._hvd_ext.reducer.restore({0: (saved, lambda: iter(hvd.allgather_object(saved)))})
    x = batches(hvd.rank(), 4)
    for trained in (first, second):
        trained.fit(x, x, batch_size=4, verbose=0)  # in the first one it ends after the seventh update
    of_first, of_second = (policy_of(one.optimizer).global_weights for one in (first, second))
    assert_equal([one for _, one in of_second], [one.numpy() for _, one in of_first])
    before = [saved[f"fragment/0/global/{number}"] for number in range(len(of_first))]
    assert not any(np.array_equal(one.numpy(), old) for (_, one), old in zip(of_second, before, strict=True))


@on_two
def test_another_number_of_ranks_goes_on_from_the_global_weights_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    trained = model(hvd.LocalSteps(4), compression=hvd.TopK(0.1, min_elements=1))
    fit(trained)
    policy = policy_of(trained.optimizer)
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
    pairs = policy_of(trained.optimizer).global_weights
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
    for variable, one in pairs:
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


@pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank has no buckets to send")
def test_explain_has_the_buckets_of_a_host_and_of_outer_steps() -> None:
    trained = model(hvd.LocalSteps(4, start=2))
    fit(trained)
    text = hvd.explain(trained.optimizer)
    assert all(f"{name}: 1 bucket" in text for name in ("Adam", "Adam, outer steps", "Adam, before local steps"))


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


def test_a_part_of_a_model_has_the_global_weights_too(tmp_path: Path) -> None:
    trained = model(hvd.LocalSteps(4))
    part = keras.Model(trained.inputs, trained.layers[0].output)
    fit(trained)
    wanted = [one.numpy() for _, one in policy_of(trained.optimizer).global_weights][:2]
    for got, one in zip(part.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(got, one)
