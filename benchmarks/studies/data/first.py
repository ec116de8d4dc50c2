"""The first epoch over photographs: the processor time of decoding and keeping, beside decoding alone."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.studies.data.goals import CPU, OURS
from benchmarks.studies.data.memory import spent
from benchmarks.studies.data.ways import ours, photographs, room
from benchmarks.studies.data.worker import Task, Tell
from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.pictures import decoded, write_pictures

PHOTOGRAPHS, BATCH, SIDE = 2048, 32, 96


def measure(task: Task, tell: Tell) -> None:
    """Read all photographs once with each contestant in turn, each time into an empty cache."""
    import tensorflow as tf

    from hvd_ext.data.folders import folder as pictures_of

    count = task.count(PHOTOGRAPHS, BATCH)
    folder = task.path("photographs")
    paths = write_pictures(folder, count)
    place = f"photographs, {SIDE} x {SIDE}"

    def load(contents: tf.Tensor) -> tf.Tensor:
        return decoded(contents, SIDE)

    def opened(way: str, turn: int) -> tuple[tf.data.Dataset, Callable[[], None]]:
        if way == OURS:
            cache = ours(pictures_of(folder, "*.jpg", labels=False), load, room(count, 3 * SIDE * SIDE))
            return cache.dataset(batch_size=BATCH, shuffle=True, seed=turn), cache.close
        kept = task.path(f"{way}-{turn}")
        data = photographs(way, paths, load, BATCH, kept, tf.io.read_file)
        return data, lambda: shutil.rmtree(kept, ignore_errors=True)

    def epoch(way: str, turn: int) -> tuple[float, float, float]:
        open_s, _, (data, close) = spent(lambda: opened(way, turn))
        cpu_s, wall_s, seen = spent(lambda: sum(len(batch) for batch in data))
        if seen != count:
            raise RuntimeError(f"first epoch of {way}: {seen} samples, must be {count}")
        close()
        return open_s, cpu_s / count, wall_s / count

    epoch("decode", -1)  # TensorFlow starts, files get into memory
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in task.contestants}
    for turn in range(task.repetitions):
        for way in rotated(task.contestants, turn):
            found[way].append(epoch(way, turn))
            tell(place, way, CPU, [])  # a sign of life
    for way in task.contestants:
        open_s, cpu_s, wall_s = zip(*found[way], strict=True)
        facts: dict[str, Any] = {"sample_bytes": 3 * SIDE * SIDE, "batch": BATCH, "count": count}
        facts["open_cpu_seconds"] = open_s  # not in the figures: once in a job, whatever the epoch's length
        tell(place, way, CPU, cpu_s, wall_samples=wall_s, wall_median=statistics.median(wall_s), **facts)
