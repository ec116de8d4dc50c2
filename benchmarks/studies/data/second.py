"""The second job of a host: what it reads from the source, what it decodes, and when its first batch is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.studies.data.goals import DECODED, FIRST_BATCH, OURS, SOURCE_BYTES, START
from benchmarks.studies.data.ways import ours, photographs, room
from benchmarks.studies.data.worker import Task, Tell
from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.pictures import decoded, write_pictures

PHOTOGRAPHS, BATCH, SIDE = 1024, 32, 96


class Counted:
    """Reads files and counts what it reads."""

    def __init__(self) -> None:
        self.files = self.bytes = 0

    def read(self, path: bytes) -> bytes:
        """Give the contents of a file."""
        contents = Path(path.decode()).read_bytes()
        self.files, self.bytes = self.files + 1, self.bytes + len(contents)
        return contents


def measure(task: Task, tell: Tell) -> None:
    """Fill all caches if the task says "fill"; else open them as a new job does, and read an epoch of each."""
    import numpy as np
    import tensorflow as tf

    count = task.count(PHOTOGRAPHS, BATCH)
    paths = write_pictures(task.path("photographs"), count)
    turn, fill = task.facts.get("turn", 0), task.facts.get("fill", False)
    facts = {"sample_bytes": 3 * SIDE * SIDE, "batch": BATCH, "count": count}
    # what TensorFlow does once in a process shall not count for the first of them
    list(tf.data.Dataset.from_tensor_slices(paths[:2]).map(lambda path: decoded(tf.io.read_file(path), SIDE)))

    for way in rotated(task.contestants, turn):
        source = Counted()

        def read(path: tf.Tensor, source: Counted = source) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(source.read, [path], tf.string), ())

        def load(path: tf.Tensor, read: Any = read) -> tf.Tensor:
            return decoded(read(path), SIDE)

        begin, cpu, cache = time.perf_counter(), time.process_time(), None
        if way.startswith(OURS):
            disk = task.path("disk") if way == "datacache-disk" else None
            memory = room(count, 3 * SIDE * SIDE)
            name = kept_name(task) if disk is None else "bench-second"
            cache = ours(np.array(paths), load, memory, disk, keep=disk is None, name=name)
            data = cache.dataset(batch_size=BATCH, shuffle=True, seed=turn)
        else:
            data = photographs(way, paths, lambda contents: decoded(contents, SIDE), BATCH, task.path(way), read)
        batches = iter(data)
        seen = len(next(batches))
        first_s, first_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        seen += sum(len(batch) for batch in batches)
        if not fill:
            wrong = "" if seen == count else f"{seen} samples in an epoch, must be {count}"
            tell("photographs", way, FIRST_BATCH, [first_s], **facts, wrong=wrong)
            tell("photographs", way, START, [first_cpu_s], **facts)
            tell("photographs", way, SOURCE_BYTES, [source.bytes], **facts)
            tell("photographs", way, DECODED, [source.files], **facts)
        if cache is not None:
            cache.close()


def kept_name(task: Task) -> str:
    """Name the cache whose memory stays: it is one of the whole machine, so each benchmark has its own."""
    return f"bench-{task.path().name[-40:].strip('._-')}"


def clear_kept(task: Task) -> None:
    """Delete the memory that the jobs have left to each other."""
    # imported here, because no other part needs it where the benchmark is started
    from hvd_ext.data import store

    for found in store.in_memory():
        if found.name == kept_name(task):
            found.clear()
