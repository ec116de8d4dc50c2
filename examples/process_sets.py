"""Two trainings in one job: the even ranks try one learning rate, the odd ranks another, and all compare the results.

mpirun -np 4 python examples/process_sets.py        (a single rank makes one training)
"""

from __future__ import annotations

import argparse

import keras
from handwritten import BATCH, SEED, digits_of, fingerprint, layers

import hvd_ext as hvd

RATES = (1e-3, 1e-4)


def main(epochs: int) -> None:
    """Train the digits with two learning rates at once.

    Args:
        epochs: passes over the training digits.
    """
    hvd.init()
    halves = [list(range(first, hvd.size(), 2)) for first in range(min(2, hvd.size()))]
    # every rank adds both sets, also the one that it is not in
    sets = [hvd.add_process_set(ranks) for ranks in halves] if hvd.size() > 1 else [hvd.global_process_set]
    number, mine = next((index, one) for index, one in enumerate(sets) if one.included())

    keras.utils.set_random_seed(SEED)  # equal weights at the start, on all ranks
    train, test = digits_of(mine.rank(), mine.size())
    model = keras.Sequential(layers())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(RATES[number]), process_set=mine)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(*train, batch_size=BATCH, epochs=epochs, verbose=0)
    accuracy = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]

    equal = len(set(hvd.allgather_object(fingerprint(model), process_set=mine))) == 1
    results = hvd.allgather_object((RATES[number], accuracy, equal))
    if hvd.rank() == 0:
        for ranks, (rate, accuracy, equal) in zip(halves, results, strict=False):
            print(f"ranks {ranks}: learning rate {rate}, accuracy {accuracy:.3f}, weights equal: {equal}")
        best = max(results, key=lambda result: result[1])
        print(f"best learning rate: {best[0]}")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train handwritten digits with two learning rates in one job.")
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
