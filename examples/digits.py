"""Train handwritten digits on several ranks with hvd_ext.

horovodrun --mpi -np 4 python examples/digits.py        (or mpirun -np 4)
python -m hvd_ext cluster run --hosts 2,1 --rate 100mbit -- python examples/digits.py --density 0.01
"""

from __future__ import annotations

import argparse

import keras
from handwritten import BATCH, EPOCHS, RATE, SEED, Report, digits_of, emit, fingerprint, layers

import hvd_ext as hvd
from hvd_ext.keras.optimizers.optimizer import channels


def main(epochs: int, algorithm: str | None, density: float | None, report: str | None) -> None:
    """Train the digits.

    Args:
        epochs: passes over the training digits.
        algorithm: the allreduce algorithm; None leaves the choice to hvd_ext.
        density: the share of gradient elements that a host sends in each step; None for all of them.
        report: the file for the progress; None to print it.
    """
    hvd.init()
    keras.utils.set_random_seed(SEED + hvd.rank())
    train, test = digits_of(hvd.rank(), hvd.size())
    model = keras.Sequential(layers())

    compression = hvd.Compression.none
    if density is not None:
        warmup = max(1, 3 * epochs * (len(train.labels) // BATCH) // 10)  # three tenths of the training's steps
        compression = hvd.TopK(density, warmup=hvd.Warmup(warmup))
    optimizer = keras.optimizers.Adam(RATE)
    # the only line that makes the training distributed
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm, compression=compression)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if hvd.rank() == 0:
        callbacks.append(Report(report, test))
    verbose = 2 if hvd.rank() == 0 and report is None else 0
    model.fit(*train, batch_size=BATCH, epochs=epochs, validation_data=test, callbacks=callbacks, verbose=verbose)

    prints = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        chosen = channels(optimizer)[0].layout.largest.choice
        emit(report, "end", equal=len(set(prints)) == 1, algorithm=chosen.algorithm, why=chosen.why)
        if report is None:
            print(f"algorithm {chosen.algorithm}: {chosen.why}")
            print(f"weights equal on all {hvd.size()} ranks: {len(set(prints)) == 1}")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train handwritten digits on several ranks with hvd_ext.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--algorithm", help="how gradients are summed; `python -m hvd_ext plan` lists the names")
    parser.add_argument("--density", type=float, help="send this part of the gradients between hosts, such as 0.01")
    parser.add_argument("--report", help="file for the progress")
    given = parser.parse_args()
    main(given.epochs, given.algorithm, given.density, given.report)
