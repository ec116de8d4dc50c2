"""What the tests of training share: data that differ on every rank, models that do not, and two ways to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvd_ext as hvd
from tests.ranks.compare import assert_close

FEATURES, TARGETS = 6, 2


def data(rank: int, rows: int, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Give one rank's data: eighths between -1 and 1, which depend on the rank and on the index.

    Returns:
        Inputs [rows, FEATURES] and targets [rows, TARGETS], float32.
    """
    x = np.arange(rows * FEATURES).reshape(rows, FEATURES) * 7 + rank * 5 + salt
    y = np.arange(rows * TARGETS).reshape(rows, TARGETS) * 11 + rank * 3 + salt
    return ((x % 17 - 8) / 8).astype(np.float32), ((y % 13 - 6) / 8).astype(np.float32)


def joined(rows: int, batch: int, salt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Give the data of all ranks, in an order that turns batches of `batch` rows per rank into joined batches."""
    parts = [data(rank, rows, salt) for rank in range(hvd.size())]
    starts = range(0, rows, batch)
    return tuple(
        np.concatenate([part[index][start : start + batch] for start in starts for part in parts]) for index in (0, 1)
    )


def model(dtype: str | None = None) -> keras.Model:
    """Make a small model with equal weights on all ranks and in every call."""
    result = keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(5, activation="tanh", dtype=dtype),
            keras.layers.Dense(TARGETS, dtype=dtype),
        ]
    )
    fill(result.weights)
    return result


def compiled(
    optimizer: keras.optimizers.Optimizer | None = None,
    made: keras.Model | None = None,
    *,
    metrics: Sequence[Any] = (),
    traced: bool = False,
    **options: Any,
) -> keras.Model:
    """Compile `model()` or another one with a distributed optimizer of these options.

    It trains eagerly unless asked otherwise: callbacks see no difference, and a traced step takes long to make.
    """
    made = model() if made is None else made
    distributed = hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.125), **options)
    made.compile(distributed, "mse", metrics=list(metrics), run_eagerly=not traced)
    return made


def fit(ours: keras.Model, *callbacks: Any, rows: int = 8, batch: int = 4, epochs: int = 1, **more: Any) -> Any:
    """Train a model on this rank's data, in their order; give the history."""
    x, y = data(hvd.rank(), rows)
    options = {"batch_size": batch, "epochs": epochs, "shuffle": False, "verbose": 0, **more}
    return ours.fit(x, y, callbacks=list(callbacks), **options)


class Spy(keras.callbacks.Callback):
    """Notes what a callback behind ours sees, and may want to stop in a step.

    Attributes:
        epochs: the logs of each epoch.
        rates: the learning rate of each step.
        weights: those before the first step.
    """

    def __init__(self, stop_in: int | None = None) -> None:
        super().__init__()
        self.epochs: list[dict[str, Any]] = []
        self.rates: list[float] = []
        self.weights: list[np.ndarray] = []
        self._stop_in = stop_in

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the weights."""
        self.weights = self.weights or values(self.model.weights)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the rate, and stop."""
        self.rates.append(float(self.model.optimizer.learning_rate))
        if len(self.rates) == self._stop_in:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the logs."""
        self.epochs.append(dict(logs or {}))


def fill(variables: Sequence[keras.Variable], salt: int = 0) -> None:
    """Set variables to eighths that depend on the variable and the index."""
    for number, variable in enumerate(variables):
        count = int(np.prod(variable.shape))
        values = (np.arange(count) * 5 + number * 3 + salt) % 11 - 5
        variable.assign(values.reshape(variable.shape).astype(np.float32) / 8)


def values(variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """Copy variables to NumPy."""
    return [variable.numpy() for variable in variables]


def everything(trained: keras.Model) -> list[np.ndarray]:
    """Copy the variables of a model and of its optimizer to NumPy."""
    return values([*trained.variables, *trained.optimizer.variables])


def assert_same_bits_on_all_ranks(variables: Sequence[keras.Variable]) -> None:
    """Check that every rank has the same bits in these variables."""
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values(variables))).hexdigest()
    digests = hvd.allgather_object(digest)
    assert digests == [digest] * hvd.size()


def assert_trained_alike(ours: keras.Model, reference: keras.Model, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Check equal bits on all ranks, and the reference's weights up to rounding; the reference must have moved."""
    assert_same_bits_on_all_ranks(ours.weights)
    untrained = values(model().weights) if len(reference.weights) == 4 else []
    assert_close(ours.weights, reference.weights, rtol, atol)
    for start, end in zip(untrained, values(reference.weights), strict=False):
        assert not np.array_equal(start, end)


def buckets_sent() -> int:
    """Give the number of buckets that this rank has reduced so far."""
    from hvd_ext.job import runtime

    return runtime.current().engine.statistics().buckets


def shared(folder: Path) -> Path:
    """Give a folder that all ranks share: one in rank 0's `folder`."""
    return Path(hvd.broadcast_object(str(folder / "job")))


def checkpoint(made: keras.Model, directory: Path) -> hvd.callbacks.Checkpoint:
    """Make the callback that saves and restores a model."""
    callback = hvd.callbacks.Checkpoint(directory)
    callback.set_model(made)
    return callback


def policy_of(optimizer: Any) -> Any:
    """Give the policy of an optimizer whose variables are of one process set."""
    (local,) = optimizer._hvd_ext.reducer.sets
    return local.policy
