"""The first epoch over photographs: the processor time of decoding and keeping, beside decoding alone."""

from __future__ import annotations

import shutil
import statistics

from hvd_ext.bench.data_goals import CPU, OURS
from hvd_ext.bench.data_memory import spent
from hvd_ext.bench.data_pictures import decoded, write_pictures
from hvd_ext.bench.data_ways import ours, photographs, room
from hvd_ext.bench.data_worker import Task, Tell
from hvd_ext.bench.jobs import rotated

PHOTOGRAPHS, BATCH, SIDE = 1024, 32, 96


def measure(task: Task, tell: Tell) -> None:
    """Read all photographs once with each contestant in turn, each time into an empty cache."""
    import tensorflow as tf

    from hvd_ext.data.sources import folder as pictures_of

    count = task.count(PHOTOGRAPHS, BATCH)
    folder = task.path("photographs")
    paths = write_pictures(folder, count)
    place = f"photographs, {SIDE} x {SIDE}"

    def load(contents: tf.Tensor) -> tf.Tensor:
        return decoded(contents, SIDE)

    def epoch(way: str, turn: int) -> tuple[float, float]:
        kept = task.path(f"{way}-{turn}")
        if way == OURS:
            cache = ours(pictures_of(folder, "*.jpg", labels=False), load, room(count, 3 * SIDE * SIDE))
            data = cache.dataset(batch_size=BATCH, shuffle=True, seed=turn)
        else:
            data = photographs(way, paths, load, BATCH, kept, tf.io.read_file)
        cpu_s, wall_s, seen = spent(lambda: sum(len(batch) for batch in data))
        if seen != count:
            raise RuntimeError(f"first epoch of {way}: {seen} samples, must be {count}")
        if way == OURS:
            cache.close()
        shutil.rmtree(kept, ignore_errors=True)
        return cpu_s / count, wall_s / count

    for way in task.contestants:
        epoch(way, -1)  # TensorFlow starts, files get into memory
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in task.contestants}
    for turn in range(task.repetitions):
        for way in rotated(task.contestants, turn):
            found[way].append(epoch(way, turn))
            tell(place, way, CPU, [])  # a sign of life
    for way in task.contestants:
        cpu_s, wall_s = zip(*found[way], strict=True)
        facts = {"sample_bytes": 3 * SIDE * SIDE, "batch": BATCH, "count": count}
        tell(place, way, CPU, cpu_s, wall_samples=wall_s, wall_median=statistics.median(wall_s), **facts)
