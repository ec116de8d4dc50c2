"""What the two digits examples share: the data of a rank, the model, and the report that the demo follows."""

from __future__ import annotations

import hashlib
import time
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from hvd_ext.bench.events import emit

TEST_IMAGES = 360
BATCH = 32
SEED = 1


class Digits(NamedTuple):
    """Handwritten digits: images float32 [count, 8, 8, 1] in 0..1, labels int [count]."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def digits_of(rank: int, size: int) -> tuple[Digits, Digits]:
    """Give a rank its part of the training digits, and the test digits.

    Args:
        rank: this rank.
        size: number of ranks.

    Returns:
        The rank's own training digits, a whole number of batches and as many on every rank, since a rank with one step
        more would wait for the others for ever; and all test digits.

    Raises:
        ValueError: when there are too many ranks for a batch each.
    """
    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.target))
    images, labels = (data.images[order, ..., None] / 16).astype(np.float32), data.target[order]
    test = Digits(images[:TEST_IMAGES], labels[:TEST_IMAGES])
    count = (len(labels) - TEST_IMAGES) // size // BATCH * BATCH
    if count == 0:
        raise ValueError(
            f"ranks ({size}) are too many: each needs a batch of {BATCH} of the {len(labels) - TEST_IMAGES} digits"
        )
    mine = slice(TEST_IMAGES + rank, TEST_IMAGES + size * count, size)
    return Digits(images[mine], labels[mine]), test


def layers() -> list[keras.layers.Layer]:
    """The layers of a convolutional network of 150,000 parameters; logits of 10 digits come out."""
    return [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]


def fingerprint(model: keras.Model) -> str:
    """A digest of all trained weights: equal on two ranks when their weights are equal to the last bit."""
    return hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in model.trainable_variables)).hexdigest()


class Report(keras.callbacks.Callback):
    """Writes how the training goes to a file, for whoever follows it; only rank 0 has one."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._path = path
        self._begin = self._end = 0.0
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock; the validation that ends an epoch is not timed."""
        self._begin, self._steps = time.perf_counter(), 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the last step's end."""
        self._end = time.perf_counter()
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the epoch's loss, accuracy on the test digits and seconds."""
        values = logs or {}
        emit(
            self._path,
            "epoch",
            epoch=epoch + 1,
            loss=float(values["loss"]),
            test_accuracy=float(values["val_accuracy"]),
            seconds=self._end - self._begin,
            steps=self._steps,
        )
