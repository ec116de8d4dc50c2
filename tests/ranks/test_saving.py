"""What is saved, copied or loaded is plain Keras; wrapped again, training goes on as if it had not stopped."""

from __future__ import annotations

import copy
from pathlib import Path

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import CheckpointError, InvalidError, MismatchError
from tests.ranks.compare import are_equal, assert_equal
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.training import assert_same_bits_on_all_ranks, compiled, data, fill, fit, model, values

pytestmark = pytest.mark.ranks(2)

ROWS, BATCH = 8, 4


def trained() -> keras.Model:
    ours = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    ours.compile(optimizer, keras.losses.MeanSquaredError(), run_eagerly=True)
    fit(ours)
    return ours


def test_a_saved_model_loads_plain_and_goes_on_under_the_wrapper_without_losing_state(tmp_path: Path) -> None:
    ours, path = trained(), tmp_path / "model.keras"
    ours.save(path)
    loaded = keras.models.load_model(path)
    loaded.run_eagerly = True
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert_equal(loaded.weights, ours.weights)
    again = hvd.DistributedOptimizer(loaded.optimizer)
    assert again is loaded.optimizer
    assert_equal(again.variables, ours.optimizer.variables)
    fit(ours)
    fit(loaded)
    assert_equal(loaded.weights, ours.weights)
    assert_same_bits_on_all_ranks(loaded.weights)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        copied = copy.deepcopy(ours.optimizer)
    assert type(copied) is keras.optimizers.Adam
    fit(ours)
    assert not are_equal(loaded.weights, ours.weights)
    assert_same_bits_on_all_ranks(ours.weights)  # the original of a copy stays wrapped
    assert not hasattr(hvd.load_model(path, compile=False), "optimizer")
    with pytest.raises(InvalidError, match="the model has no optimizer that op could be for"):
        hvd.load_model(path, compile=False, op=hvd.Sum)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    # three steps end in the middle of an accumulation of two
    "accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=16.0, dynamic_growth_steps=2
    ),
}


def steps(ours: keras.Model, first: int, last: int) -> keras.Model:
    for step in range(first, last):
        ours.train_on_batch(*data(hvd.rank(), BATCH, salt=step))
    return ours


@pytest.mark.skipif(LAUNCHED_SIZE > 2, reason="the same on any number of ranks")
@pytest.mark.parametrize(("name", "ending"), [*((name, "keras") for name in OPTIMIZERS), ("scaled", "h5")])
def test_three_steps_saved_and_loaded_and_three_more_are_six(name: str, ending: str, tmp_path: Path) -> None:
    whole = model()
    # Keras cannot read the names of losses from .h5
    loss = keras.losses.MeanSquaredError()
    whole.compile(hvd.DistributedOptimizer(OPTIMIZERS[name]()), loss, run_eagerly=True)
    steps(whole, 0, 3)
    path = tmp_path / f"model.{ending}"
    each_rank = name == "accumulation"  # of which each has its own part
    if hvd.rank() == 0 or each_rank:
        whole.save(path)  # the others have no such file
    loaded = hvd.load_model(path, root_rank=None if each_rank else 0)
    loaded.run_eagerly = True
    assert_equal(loaded.optimizer.variables, whole.optimizer.variables)
    steps(whole, 3, 6)
    steps(loaded, 3, 6)
    assert_equal([*loaded.weights, *loaded.optimizer.variables], [*whole.weights, *whole.optimizer.variables])
    assert_same_bits_on_all_ranks([*loaded.weights, *loaded.optimizer.variables])


def test_a_file_of_rank_0_lacks_what_the_others_have_accumulated_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = compiled(OPTIMIZERS["accumulation"]())
    for said in (hvd.size() > 1 and hvd.rank() == 0, False):
        steps(ours, 0, 1)
        caplog.clear()
        ours.save(tmp_path / "model.keras")
        loaded = hvd.load_model(tmp_path / "model.keras", root_rank=0)
        assert ("in the middle of a gradient accumulation" in caplog.text) == said
        assert_same_bits_on_all_ranks(loaded.optimizer.variables)


class Halved(keras.optimizers.SGD):
    """An optimizer that Keras does not have."""


def test_a_file_is_read_on_one_rank_and_all_have_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = model()
    ours.compile(Halved(0.5, momentum=0.25), "mse", run_eagerly=True)  # saved without the wrapper
    path = tmp_path / "model.keras"
    fill(ours.weights, salt=hvd.rank())
    ours.save(path)  # every rank has another
    root, compression = hvd.size() - 1, hvd.Compression.bf16
    loaded = hvd.load_model(path, custom_optimizers=[Halved], compression=compression, root_rank=root)
    assert loaded.optimizer.momentum == 0.25
    assert_same_bits_on_all_ranks(loaded.weights)
    if hvd.rank() == root:
        np.testing.assert_array_equal(loaded.weights[0].numpy(), ours.weights[0].numpy())
    if hvd.size() > 1 and hvd.rank() == root:
        assert f"rank 0 has a different file of this name; all ranks use that of rank {root}" in caplog.text
    steps(loaded, 0, 1)
    assert_same_bits_on_all_ranks(loaded.weights)


def test_automatic_names_of_embeddings_and_of_batch_statistics_may_differ() -> None:
    def made() -> keras.Model:
        layers = keras.layers
        hidden = [layers.Embedding(8, 4), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()]
        result = keras.Sequential([layers.Input((3,), dtype="int32"), *hidden, layers.Flatten(), layers.Dense(1)])
        fill(result.weights)
        return result

    if hvd.rank() == 0:
        made()  # so that rank 0 has other names than the others
    ours = compiled(made=made())
    random = np.random.default_rng(hvd.rank())
    x, y = random.integers(0, 8, (ROWS, 3)), random.normal(size=(ROWS, 1))
    before = values(ours.weights)
    ours.fit(x, y, batch_size=BATCH, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)
    assert_same_bits_on_all_ranks(ours.trainable_variables)
    assert not np.array_equal(values(ours.weights)[0], before[0])
    names = hvd.allgather_object([variable.path for variable in ours.trainable_variables])
    assert hvd.size() == 1 or names[0] != names[1]


def test_files_that_cannot_be_loaded_are_errors_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with pytest.raises(
        CheckpointError, match=r"load_model \(.*\): the root rank must have it, but it cannot be read: No"
    ):
        hvd.load_model(path, root_rank=0)
    with pytest.raises(CheckpointError, match=r"load_model \(.*\): Keras cannot load it"):
        hvd.load_model(path)
    ours = model()
    ours.save(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="Keras cannot load it"):
        hvd.load_model(path, root_rank=0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="Keras cannot load it"):
        hvd.load_model(tmp_path / "folder", root_rank=0)
    with pytest.raises(TypeError, match="compresion"):
        hvd.load_model(path, compresion=hvd.Compression.fp16)
    with pytest.raises(InvalidError, match="root_rank"):
        hvd.load_model(path, root_rank=hvd.size())
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="root_rank must be the same on all ranks"):
            hvd.load_model(path, root_rank=min(hvd.rank(), 1))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
