"""A script written for Horovod, unchanged but for its import line, under horovodrun."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.mpi import jobs

SCRIPT = """
import os

import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

rows = np.arange(24 * 6).reshape(24, 6)
images = ((rows * 7 % 17 - 8) / 8).astype("float32")
labels = (np.arange(24) % 3).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(4)

tf.keras.utils.set_random_seed(1 + hvd.rank())
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((6,)),
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.Dense(3, activation="softmax"),
    ]
)

scaled_lr = 0.01 * hvd.size()
opt = tf.keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(
    opt, backward_passes_per_step=1, average_aggregated_gradients=True, compression=hvd.Compression.none
)
model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 1 if hvd.rank() == 0 else 0

model.fit(dataset, steps_per_epoch=6 // hvd.size(), callbacks=callbacks, epochs=3, verbose=verbose)

score = hvd.allreduce(float(hvd.rank()), name="score")
print("score", float(score), flush=True)
np.savez(f"trained-{hvd.rank()}.npz", *model.get_weights())
"""


def trained_in_one_process(size: int) -> list[np.ndarray]:
    """Train what rank 0 begins with on the joined batches, with the rates of the warm-up."""
    import keras

    rows = np.arange(24 * 6).reshape(24, 6)
    images = ((rows * 7 % 17 - 8) / 8).astype("float32")
    labels = (np.arange(24) % 3).astype("int64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(), run_eagerly=True)
    steps = 6 // size
    shards = [(np.resize(images[rank::size], (72, 6)), np.resize(labels[rank::size], 72)) for rank in range(size)]
    for step in range(3 * steps):
        part = slice(4 * step, 4 * step + 4)
        epochs = min((step + 1) / steps, 2.0)
        model.optimizer.learning_rate = 0.01 * size * (1 / size) * (epochs * (size - 1) / 2 + 1)
        batch = [np.concatenate([shard[index][part] for shard in shards]) for index in (0, 1)]
        model.train_on_batch(*batch)
    return model.get_weights()


@jobs.NEEDS_HOROVOD
def test_a_script_for_horovod_runs_with_another_import(tmp_path: Path) -> None:
    before, after = "import horovod.tensorflow.keras as hvd", "import hvd_ext as hvd"
    assert SCRIPT.count(before) == 1
    jobs.run(tmp_path, SCRIPT.replace(before, after), launcher=jobs.HORVODRUN).must_succeed("score 0.5")
    trained = [np.load(tmp_path / f"trained-{rank}.npz") for rank in range(2)]
    for first, second, expected in zip(
        *(list(one.values()) for one in trained), trained_in_one_process(2), strict=True
    ):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected, rtol=2e-5, atol=2e-6)
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == [f"checkpoint-{n}.keras" for n in (1, 2, 3)]
