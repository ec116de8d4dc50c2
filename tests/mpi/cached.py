"""Jobs that use data caches; what `test_data_cache.py` does to them, and what it expects of them, stands there.

Arguments: the name of a function of `TASKS`, and its arguments in JSON. Samples that are decoded, and samples that have
come to the end of the input, are written to files of the job at once, so that they are known of a killed job too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_ext as hvd

BATCH = 8
FILE_NBYTES = 3000


def note(file: str, numbers: Sequence[int]) -> None:
    """Append numbers to a file of the job; several processes may do it at the same time."""
    path = Path(os.environ["HVD_EXT_TEST_OUTPUT"]) / file
    with path.open("ab", buffering=0) as out:
        out.write(np.asarray(numbers, "<i8").tobytes())


def result(value: Any) -> None:
    """Write what this rank hands to the test."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    Path(os.environ["HVD_EXT_TEST_OUTPUT"], f"result{rank}.json").write_text(json.dumps(value))


def contents(number: int, nbytes: int) -> np.ndarray:
    """Give the bytes of a sample."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def write_files(folder: Path, samples: int) -> None:
    """Write the files of a source: each begins with its number."""
    folder.mkdir()
    for number in range(samples):
        data = np.array([number], "<i8").tobytes() + contents(number, FILE_NBYTES).tobytes()
        (folder / f"{number:05}.bin").write_bytes(data)


def loading(nbytes: int, pause_s: float = 0.0) -> Callable[[tf.Tensor], Any]:
    """Make a load of numbers: a sample is a number and bytes."""

    def make(number: np.ndarray) -> np.ndarray:
        note("decoded", [int(number)])
        time.sleep(pause_s)
        return contents(int(number), nbytes)

    def load(number: tf.Tensor) -> Any:
        row = tf.numpy_function(make, [number], tf.uint8)
        row.set_shape([nbytes])
        return number, row

    return load


def load_file(text: tf.Tensor) -> Any:
    """Load a file of `write_files`."""

    def decoded(number: np.ndarray) -> np.ndarray:
        note("decoded", [int(number)])
        return number

    number = tf.numpy_function(decoded, [tf.io.decode_raw(tf.strings.substr(text, 0, 8), tf.int64)[0]], tf.int64)
    number.set_shape(())
    row = tf.io.decode_raw(tf.strings.substr(text, 8, FILE_NBYTES), tf.uint8)
    row.set_shape([FILE_NBYTES])
    return number, row


def seen(dataset: tf.data.Dataset) -> list[int]:
    """Go through an epoch and check every byte.

    Returns:
        The numbers of the samples.
    """
    found: list[int] = []
    for numbers, rows in dataset.as_numpy_iterator():
        for number, row in zip(numbers.tolist(), rows, strict=True):
            np.testing.assert_array_equal(row, contents(number, len(row)), f"sample {number}")
        note("seen", numbers)
        found += numbers.tolist()
    return found


def fill(caches: Sequence[dict[str, Any]]) -> None:
    """Go through an epoch of each cache on all ranks."""
    hvd.init()
    stats = []
    for one in caches:
        load = loading(one["nbytes"], one["pause_s"])
        places = {name: one[name] for name in ("memory", "disk", "keep")}
        cache = hvd.DataCache(one["name"], np.arange(one["samples"]), load, **places, progress=False)
        seen(cache.dataset(BATCH, shuffle=True, seed=one["seed"]))
        hvd.barrier()
        stats.append(cache.stats())
        if one.get("clear") and hvd.rank() == 0:
            cache.clear()
        cache.close()
    result(stats)


def together(source: str, disk: str, meet: str, seed: int) -> None:
    """Fill a cache at the same time as another job."""
    cache = hvd.DataCache(
        "together", hvd.data.folder(source, labels=False), load_file, memory="4MB", disk=disk, progress=False
    )
    Path(meet, str(seed)).touch()
    while len(os.listdir(meet)) < 2:
        time.sleep(0.01)
    found = seen(cache.dataset(BATCH, shuffle=True, seed=seed))
    result([found, cache.stats()])


def later(source: str, disk: str) -> None:
    """Read what the earlier jobs have stored, without the source."""
    begin_s = time.perf_counter()
    cache = hvd.DataCache(
        "together", hvd.data.folder(source, labels=False), load_file, memory="1MB", disk=disk, progress=False
    )
    iterator = iter(cache.dataset(BATCH, shuffle=True))
    next(iterator)
    first_s = time.perf_counter() - begin_s
    found = seen(cache.dataset(BATCH, shuffle=True))
    result([found, cache.stats(), first_s])


def limits(small_disk: str, cgroup: str) -> None:
    """Fill a disk, and memory in a cgroup; an empty text leaves one out."""
    outcome: dict[str, Any] = {}
    if small_disk:
        cache = hvd.DataCache("full", np.arange(60), loading(400_000), memory=None, disk=small_disk, progress=False)
        epochs = [seen(cache.dataset(2, shuffle=True)) for _ in range(2)]
        outcome["disk"] = [epochs, cache.stats()]
        cache.close()
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
        cache = hvd.DataCache("grouped", np.arange(300), loading(1_000_000), memory="400MB", progress=False)
        epochs = [seen(cache.dataset(1, shuffle=True)) for _ in range(2)]
        outcome["cgroup"] = [epochs, cache.stats()]
        cache.close()
    result(outcome)


def hosts(disk: str, samples: int) -> None:
    """Go through two epochs on ranks of several hosts."""
    hvd.init()
    cache = hvd.DataCache("hosts", np.arange(samples), loading(4000), memory="8MB", disk=disk, progress=False)
    data = cache.dataset(BATCH, shuffle=True)
    first = seen(data)
    hvd.barrier()
    middle = cache.stats()
    second = seen(data)
    stats = cache.stats()
    hvd.barrier()
    result({"host": os.uname().nodename, "epochs": [first, second], "first": middle, "second": stats})


def train(folder: str, disk: str) -> None:
    """Begin to train, or go on, and die; the job that begins trains to the end too, with and without a crash."""
    from hvd_ext.keras.checkpoint.callback import newest

    hvd.init()
    of = Path(folder)
    begins = newest(of / "job") is None
    # the batches that a job leaves out, two here, count for the crash
    outcome: dict[str, Any] = {"steps": _trained(of / "job", disk, every=7 if begins else 4, crash=8 if begins else 7)}
    if begins:
        if hvd.rank() == 0:
            shutil.copytree(of / "job", of / "same")
        hvd.barrier()
        weights: list[Any] = []
        outcome["whole"] = _trained(None, disk, weights=weights)
        outcome["same"] = _trained(of / "same", disk, every=100, weights=weights)
        pairs = zip(*weights, strict=True)
        outcome["equal"] = [np.any(whole) and np.array_equal(whole, same) for whole, same in pairs]
        outcome["equal"] = list(map(bool, outcome["equal"]))
    result(outcome)


def _trained(
    directory: Path | None, disk: str, every: int = 0, crash: int = 0, weights: list[Any] | None = None
) -> list[list[Any]]:
    """Train three epochs, from the newest checkpoint, with a crash after so many steps if any are left.

    Returns:
        Of each step the samples of all ranks: (number, seed, seed).
    """
    from hvd_ext.keras.checkpoint.callback import Checkpoint
    from tests.ranks.test_checkpoint import Crash, CrashError
    from tests.ranks.test_data_going_on import Recorded, samples
    from tests.ranks.training import values

    rows: list[Any] = []

    class Seeded(Recorded):
        """Writes down the seeds of samples too."""

        def train_step(self, data: Any) -> Any:
            rows.append(data[0].numpy().tolist())
            return super().train_step(data)

    def load(x: tf.Tensor, y: tf.Tensor) -> Any:
        def decoded(number: np.ndarray) -> np.ndarray:
            note("decoded", [int(number)])
            return number

        number = tf.numpy_function(decoded, [x[0]], tf.float32)
        number.set_shape(())
        return tf.concat([[number], x[1:]], 0), y

    def seeded(sample: Any, seeds: tf.Tensor) -> Any:
        x, y = sample
        return tf.concat([x[:, :1], tf.cast(seeds, tf.float32) / 2.0**31], 1), y

    # the batch of all ranks together is always 8; 43 samples are more than 5 steps on any number of ranks
    cache = hvd.DataCache("trained", samples(43), load, memory="1MB", disk=disk, progress=False)
    data = cache.dataset(8 // hvd.size(), shuffle=True, seed=3, drop_remainder=True, keys=True).map(seeded)
    callbacks: list[Any] = [Crash(crash)] if crash else []
    if directory is not None:
        callbacks.append(Checkpoint(directory, every=None, every_steps=every))
    made = Seeded()
    try:
        made.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=hvd.callbacks.synchronized(callbacks))
    except CrashError:
        assert crash
    if weights is not None:
        weights.append(values([*made.weights, *made.optimizer.variables]))
    cache.close()
    ranks = hvd.allgather_object(rows)
    return [[row for own in step for row in own] for step in zip(*ranks, strict=True)]


TASKS = {task.__name__: task for task in (fill, together, later, limits, hosts, train)}  # type: dict[str, Callable[..., None]]


def main(arguments: Sequence[str]) -> None:
    """Run a task."""
    task, settings = arguments
    TASKS[task](**json.loads(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
