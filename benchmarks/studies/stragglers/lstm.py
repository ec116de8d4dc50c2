"""An LSTM on sequences of unequal lengths, where nothing is slept: one of two ranks that any launcher starts.

    mpirun -np 2 --bind-to core python -m benchmarks.studies.stragglers.lstm FILE.json [SEEDS]

The lengths are those of the videos of UCF101 in eager-SGD, section 2.1, divided by four: a median of 167 frames, from
29 to 1,776, with a standard deviation of 97. As is usual, sequences of similar lengths share a batch, so that a rank
computes in proportion to the length of its batch. Each frame is the prototype of the sequence's class under noise, so
that the network has to remember. Modes take turns, with other weights and another order of batches for each seed.

Beside the measured speed-up stands that of the model, which plays the computing times that rank 0 saw.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.studies.markdown import table
from hvd_ext.bench import jobs, results
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.simulation.rounds import Rules, play

BENCHMARK = "training of an LSTM on unequal sequences"
HEADINGS = ("mode", "step", "x full", "x full, modelled", "active ranks", "mean staleness", "accuracy", "sd")
MODES = ("full", "majority", "solo")
SEEDS, EPOCHS, STALENESS = 3, 6, 4
TRAIN, TEST, BATCH = 1600, 800, 16
CLASSES, FEATURES, UNITS, SIGNAL = 8, 16, 48, 0.3
SHORTER, SHORTEST, LONGEST = 4, 29, 1776
MEDIAN, SIGMA = 167, 0.5  # of a logarithmic normal distribution, whose standard deviation is 97

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


def lengths(count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the lengths of sequences, in frames."""
    drawn = random.lognormal(np.log(MEDIAN), SIGMA, count).clip(SHORTEST, LONGEST)
    return np.asarray(drawn // SHORTER, np.int64)


def batches(count: int, random: np.random.Generator, prototypes: npt.NDArray[np.float64]) -> list[Batch]:
    """Make sequences, and put those of similar lengths together: [batch, frames, features], padded with zeros."""
    made = []
    ordered = np.sort(lengths(count, random))
    for begin in range(0, count, BATCH):
        of_batch = ordered[begin : begin + BATCH]
        classes = random.integers(CLASSES, size=len(of_batch))
        frames = np.zeros((len(of_batch), int(of_batch[-1]), FEATURES), np.float32)
        for place, length in enumerate(of_batch):
            noise = random.standard_normal((int(length), FEATURES))
            frames[place, :length] = SIGNAL * prototypes[classes[place]] + noise
        made.append((frames, classes.astype(np.int32)))
    return made


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = [
        [
            row["mode"],
            seconds(row["step_seconds"]),
            ratio(row["x_full"]),
            ratio(row["modelled_x_full"]),
            "" if row["active_ranks"] is None else f"{row['active_ranks']:.2f}",
            "" if row["mean_staleness"] is None else f"{row['mean_staleness']:.2f}",
            f"{statistics.fmean(row['accuracies']):.2%}",
            f"{100 * statistics.stdev(row['accuracies']):.2f}" if len(row["accuracies"]) > 1 else "",
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def trained(mode: str, seed: int) -> dict[str, Any]:
    """Train once; all ranks get the same answer."""
    import keras
    import tensorflow as tf

    import hvd_ext as hvd
    from hvd_ext.job import runtime
    from hvd_ext.keras.optimizers.optimizer import channels
    from hvd_ext.simulation.rounds import active, staleness
    from hvd_ext.tensorflow.gradients.quorum import computing_s

    keras.utils.set_random_seed(seed)
    prototypes = np.random.default_rng(seed).standard_normal((CLASSES, FEATURES)) / np.sqrt(FEATURES) * 2
    own = batches(TRAIN, np.random.default_rng((seed, 1, hvd.rank())), prototypes)
    test = batches(TEST, np.random.default_rng((seed, 2)), prototypes)
    model = keras.Sequential(
        [
            keras.layers.Input((None, FEATURES)),
            keras.layers.Masking(),
            keras.layers.LSTM(UNITS),
            keras.layers.Dense(CLASSES),
        ]
    )
    options = {} if mode == "full" else {"sync": mode, "staleness": STALENESS}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.003), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    order = np.random.default_rng((seed, 3, hvd.rank()))

    def drawn() -> Any:
        for place in order.permutation(len(own)):
            yield own[place]

    spec = (tf.TensorSpec((None, None, FEATURES), tf.float32), tf.TensorSpec((None,), tf.int32))
    data = tf.data.Dataset.from_generator(drawn, output_signature=spec).apply(
        tf.data.experimental.assert_cardinality(len(own))
    )
    ends: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            hvd.barrier()
            ends.append(time.perf_counter())

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Clock()]
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=hvd.callbacks.synchronized(callbacks))
    right = sum(int((np.argmax(model.predict_on_batch(x), -1) == y).sum()) for x, y in test)
    about: dict[str, Any] = {
        "step_s": (ends[-1] - ends[0]) / (EPOCHS - 1) / len(own),
        "accuracy": right / TEST,
        "active": None,
        "staleness": None,
        "modelled": 1.0,
    }
    if mode != "full":
        found = runtime.current().engine.rounds(channels(optimizer)[0].handle)
        late = staleness(found.arrived)
        about["active"] = float(active(found.arrived).mean())
        about["staleness"] = float(late @ np.arange(len(late)) / late.sum())
        if hvd.rank() == 0:
            step_s, round_s = computing_s(found), float(np.quantile(found.finished_s - found.begins_s, 0.25))
            ours, full = play(step_s, Rules(mode, staleness=STALENESS), round_s), play(step_s, Rules(), round_s)
            about["modelled"] = ours.rounds_per_s() / full.rounds_per_s()
    hvd.shutdown()
    hvd.init()
    return about


def main(arguments: Sequence[str]) -> None:
    """Train all modes, and write the file.

    Args:
        arguments: the file, and the number of seeds if it is not `SEEDS`.
    """
    import tensorflow as tf

    import hvd_ext as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    run = results.begin_run(jobs.Launcher(os.environ.get(jobs.VARIABLE, "mpirun")).describe())
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for seed in range(int(arguments[1]) if len(arguments) > 1 else SEEDS):
        for mode in MODES[seed % len(MODES) :] + MODES[: seed % len(MODES)]:
            found[mode].append(trained(mode, seed))
            if hvd.rank() == 0:
                print(f"seed {seed}, {mode}: {found[mode][-1]}", flush=True)
    rows = []
    full_s = statistics.median(one["step_s"] for one in found["full"])
    for mode, some in found.items():
        step_s = statistics.median(one["step_s"] for one in some)
        rows.append(
            {
                "ranks_per_host": [hvd.size()],
                "mode": mode,
                "step_seconds": step_s,
                "x_full": full_s / step_s,
                "modelled_x_full": statistics.median(one["modelled"] for one in some),
                "active_ranks": None if mode == "full" else statistics.fmean(one["active"] for one in some),
                "mean_staleness": None if mode == "full" else statistics.fmean(one["staleness"] for one in some),
                "accuracies": [one["accuracy"] for one in some],
                "samples": [one["step_s"] for one in some],
            }
        )
    if hvd.rank() == 0:
        results.save(Path(arguments[0]), results.result_of(run, rows, BENCHMARK))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
