"""One job of several in turn that train with TopK, each from the checkpoints of the one before.

Arguments: folders; in each a folder of checkpoints for each of `CASES`. Where there is none yet the job trains `BEFORE`
steps, else it goes on from the newest. Then it saves, and trains `AFTER` steps more; rank 0 writes the weights. In each
folder there is one for each of `UNTIL` too, see `switched`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.topk_jobs import OPTIONS, gradients, hosts_of, restart
from tests.ranks.training import assert_same_bits_on_all_ranks, data, fill, model, values

BEFORE, AFTER = 3, 2

# the momentum, whether TopK takes it over, and what becomes of the ranks' gradients
CASES: dict[str, tuple[float, bool, Any]] = {
    "plain": (0.0, False, hvd.Average),
    "momentum": (0.5, True, hvd.Average),
    "sum": (0.0, False, hvd.Sum),
}


# the update step from which gradients are sent whole: after the first checkpoint, and before it
UNTIL = {"until, later": 4, "until, past": 2}
MOST_RANKS = 4


def switched(directory: Path, until: int) -> list[np.ndarray]:
    """Go on from a folder's checkpoint or begin, and train with gradients whose average any number of ranks has alike.

    Returns:
        The weights, and the optimizer's slots.
    """
    made = model()
    weights = made.trainable_weights
    optimizer = keras.optimizers.SGD(0.125, momentum=0.5)
    topk = hvd.TopK(**OPTIONS, momentum_correction=True, until=until)
    made.compile(hvd.DistributedOptimizer(optimizer, compression=topk), "mse", run_eagerly=True)
    checkpoint = hvd.callbacks.Checkpoint(directory)
    checkpoint.set_model(made)
    epoch, _ = checkpoint.restore()
    share = MOST_RANKS // hvd.size()

    def step(number: int) -> None:
        every = [
            gradients(hvd.rank() * share + place, number, [tuple(weight.shape) for weight in weights])
            for place in range(share)
        ]
        optimizer.apply([tf.constant(sum(parts) / np.float32(share)) for parts in zip(*every, strict=True)], weights)

    for number in range(BEFORE) if epoch == 0 else ():
        step(number)
    if epoch:  # all ranks leave this one out
        optimizer.apply([tf.fill(weight.shape, np.nan) for weight in weights], weights)
    checkpoint.save(epoch + 1)
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    assert int(optimizer.iterations.numpy()) == BEFORE + AFTER
    assert_same_bits_on_all_ranks([*weights, *optimizer.variables])
    return values([*weights, *optimizer.momentums])


def trained(directory: Path, momentum: float, correction: bool, op: Any) -> list[np.ndarray]:
    """Go on from a folder's checkpoint or begin, save what waits then, and train; all ranks call it."""
    made = model()
    shapes = [tuple(weight.shape) for weight in made.trainable_weights]
    # powers of two and sixteenths, so that all that waits is exact in float32, and halves and one and a half of it
    optimizer = keras.optimizers.SGD(0.125, momentum=momentum)
    topk = hvd.TopK(**OPTIONS, momentum_correction=correction)
    made.compile(hvd.DistributedOptimizer(optimizer, op=op, compression=topk), "mse", run_eagerly=True)
    checkpoint = hvd.callbacks.Checkpoint(directory)
    checkpoint.set_model(made)
    fill(made.weights, salt=LAUNCHED_SIZE)
    epoch, _ = checkpoint.restore()
    if epoch == 0:
        steps = [gradients(hvd.rank(), step, shapes) for step in range(BEFORE)]
    else:
        # what waits comes to the ranks at the first step; all ranks leave this one out, and it changes nothing
        steps = [[np.full(shape, np.nan, np.float32) for shape in shapes]]
    for own in steps:
        made.optimizer.apply([tf.constant(one) for one in own], made.trainable_weights)
    checkpoint.save(epoch + 1)
    for step in range(AFTER):
        made.train_on_batch(*data(hvd.rank(), 4, step))
    assert int(made.optimizer.iterations.numpy()) == BEFORE + AFTER
    assert_same_bits_on_all_ranks(made.weights)
    return values(made.weights)


def main() -> None:
    """Train in all folders."""
    restart(hosts_of(LAUNCHED_SIZE))
    for folder in map(Path, sys.argv[1:]):
        for case, options in CASES.items():
            weights = trained(folder / case, *options)
            if hvd.rank() == 0:
                np.savez(folder / f"{case}.npz", *weights)
        for case, until in UNTIL.items():
            found = switched(folder / case, until)
            if hvd.rank() == 0:
                np.savez(folder / f"{case}.npz", *found)


if __name__ == "__main__":
    main()
