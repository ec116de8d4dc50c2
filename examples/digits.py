"""Train handwritten digits on several ranks with hvd_ext.

horovodrun --mpi -np 4 python examples/digits.py        (mpirun -np 4 does as well)
"""

from __future__ import annotations

import argparse

import keras
from handwritten import BATCH, SEED, Report, digits_of, emit, fingerprint, layers

import hvd_ext as hvd
from hvd_ext.keras.optimizer import channels


def main(epochs: int, algorithm: str | None, report: str | None) -> None:
    """Train the digits.

    Args:
        epochs: passes over the training digits.
        algorithm: how gradients are summed; None leaves the choice to hvd_ext.
        report: file for the progress; None prints it.
    """
    hvd.init()
    keras.utils.set_random_seed(SEED + hvd.rank())
    train, test = digits_of(hvd.rank(), hvd.size())
    model = keras.Sequential(layers())

    optimizer = keras.optimizers.Adam(1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm)  # the one line that makes it distributed

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if hvd.rank() == 0:
        callbacks.append(Report(report))
        emit(report, "start", ranks=hvd.size())
    verbose = 2 if hvd.rank() == 0 and report is None else 0
    model.fit(*train, batch_size=BATCH, epochs=epochs, validation_data=test, callbacks=callbacks, verbose=verbose)

    prints = hvd.allgather_object(fingerprint(model))
    if hvd.rank() == 0:
        chosen = channels(optimizer)[0].chosen
        emit(report, "end", equal=len(set(prints)) == 1, algorithm=chosen.algorithm, why=chosen.why)
        if report is None:
            print(f"algorithm {chosen.algorithm}: {chosen.why}")
            print(f"weights equal on all {hvd.size()} ranks: {len(set(prints)) == 1}")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train handwritten digits on several ranks with hvd_ext.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--algorithm")
    parser.add_argument("--report", help="file for the progress")
    given = parser.parse_args()
    main(given.epochs, given.algorithm, given.report)
