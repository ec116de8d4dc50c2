"""What the digits examples share: the data of a rank, the model, and the report that the demo follows."""

from __future__ import annotations

import hashlib
import time
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from hvd_ext.bench.sampling import emit

TEST_IMAGES = 360
BATCH = 32
EPOCHS = 10
SEED = 1
RATE = 2e-3
TEST_EVERY = 7


class Digits(NamedTuple):
    """Handwritten digits: images float32 [count, 8, 8, 1] with values 0 to 1, labels int64 [count]."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def digits_of(rank: int, size: int) -> tuple[Digits, Digits]:
    """Return a rank's part of the training digits, and the test digits.

    Args:
        rank: this rank.
        size: the number of ranks.

    Returns:
        The rank's own training digits, and all test digits. All ranks have the same whole number of batches, because a
        rank with one more step would wait for the others forever.

    Raises:
        ValueError: there are too many ranks to give each of them a batch.
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
    """Make the layers of a convolutional network with 1.1 million parameters, whose outputs are logits of 10 digits."""
    return [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]


def fingerprint(model: keras.Model) -> str:
    """Return a digest of all trained weights, which two ranks share if their weights are equal bit for bit."""
    return hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in model.trainable_variables)).hexdigest()


class Report(keras.callbacks.Callback):
    """Writes the progress of the training to a file that the demo follows; only rank 0 has one."""

    def __init__(self, path: str | None, test: Digits) -> None:
        """Store the path of the file (None for no report) and the test digits."""
        super().__init__()
        self._path, self._test = path, test
        self._begin = 0.0
        self._seconds: list[float] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Report the length of the training."""
        total = self.params["epochs"] * self.params["steps"]
        emit(self._path, "start", total=total, parameters=self.model.count_params())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock of a step, so that tests between two steps are not timed."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock of the step, and test the model every few steps."""
        self._seconds.append(time.perf_counter() - self._begin)
        if self._path is not None and len(self._seconds) == TEST_EVERY:
            self._tell()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Test the trained model."""
        if self._path is not None and self._seconds:
            self._tell()

    def _tell(self) -> None:
        predicted = np.argmax(self.model(self._test.images, training=False), axis=1)
        emit(self._path, "test", seconds=self._seconds, accuracy=float(np.mean(predicted == self._test.labels)))
        self._seconds = []
