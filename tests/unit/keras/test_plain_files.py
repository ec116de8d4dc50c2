"""What is saved under the wrapper loads in a program that has Keras and TensorFlow only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.test_saving import OPTIMIZERS
from tests.ranks.training import data, model, values

PLAIN = """
import sys
from pathlib import Path
import keras, numpy as np, tensorflow as tf

folder, names = Path(sys.argv[1]), sys.argv[2:]
data = np.load(folder / "data.npz")

def same(what, seen, expected):
    assert len(seen) == len(expected.files), (what, len(seen), len(expected.files))
    for place, variable in enumerate(seen):
        assert np.array_equal(variable.numpy(), expected[f"arr_{place}"]), (what, variable.path)

def fresh(like):
    made = keras.models.clone_model(like)
    made.compile(type(like.optimizer).from_config(like.optimizer.get_config()), "mse", run_eagerly=True)
    made.optimizer.build(made.trainable_variables)
    return made

for name in names:
    expected = np.load(folder / f"{name}.npz")
    loaded = keras.models.load_model(folder / f"{name}.keras")
    assert type(loaded.optimizer).__module__.startswith("keras."), type(loaded.optimizer)
    same(f"{name} .keras", loaded.weights + loaded.optimizer.variables, expected)
    weights = fresh(loaded)
    weights.load_weights(folder / f"{name}.weights.h5")
    same(f"{name} .weights.h5", weights.weights + weights.optimizer.variables, expected)
    checkpoint = fresh(loaded)
    tf.train.Checkpoint(model=checkpoint, optimizer=checkpoint.optimizer).restore(
        str(folder / f"{name}.tf-1")
    ).assert_existing_objects_matched()
    same(f"{name} tf.train.Checkpoint", checkpoint.weights + checkpoint.optimizer.variables, expected)
    weights.train_on_batch(data["x"], data["y"])
    moved = weights.trainable_weights[0].numpy()
    checkpoint.train_on_batch(data["x"], data["y"])
    assert np.array_equal(checkpoint.trainable_weights[0].numpy(), moved)

exported = tf.saved_model.load(str(folder / "exported"))
assert np.allclose(exported.serve(data["x"]), data["out"], rtol=1e-6)
assert not [name for name in sys.modules if name.split(".")[0] == "hvd_ext"]
print("all are plain")
"""


@pytest.mark.slow
def test_every_kind_of_file_loads_in_a_program_without_hvd_ext_slots_and_all(tmp_path: Path) -> None:
    hvd.init()
    x, y = data(0, 4)
    for name, make in OPTIMIZERS.items():
        ours = model()
        ours.compile(hvd.DistributedOptimizer(make()), "mse", run_eagerly=True)
        for _ in range(3):
            ours.train_on_batch(x, y)
        ours.save(tmp_path / f"{name}.keras")
        ours.save_weights(tmp_path / f"{name}.weights.h5")
        tf.train.Checkpoint(model=ours, optimizer=ours.optimizer).save(str(tmp_path / f"{name}.tf"))
        np.savez(tmp_path / f"{name}.npz", *values([*ours.weights, *ours.optimizer.variables]))
    ours.export(str(tmp_path / "exported"), verbose=False)
    np.savez(tmp_path / "data.npz", x=x, y=y, out=ours.predict(x, verbose=0))
    command = [sys.executable, "-c", PLAIN, str(tmp_path), *OPTIMIZERS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.splitlines()[-1:] == ["all are plain"], ended.stderr
