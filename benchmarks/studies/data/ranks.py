"""Four ranks of a host: the memory of all of them together, each with its fair share of what several have mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.data.goals import MEMORY, OURS
from benchmarks.studies.data.memory import pss_bytes
from benchmarks.studies.data.samples import Numbered
from benchmarks.studies.data.ways import ours, room
from benchmarks.studies.data.worker import Task, Tell

if TYPE_CHECKING:
    import tensorflow as tf

SAMPLES, BATCH, SIDE, POOL = 8192, 32, 96, 31
NOTHING = "nothing"


def measure(task: Task, tell: Tell) -> None:
    """Be a rank of a job that reads epochs; rank 0 tells the memory of all ranks after each of them."""
    import hvd_ext as hvd

    hvd.init()
    run(task, tell)
    hvd.shutdown()


def run(task: Task, tell: Tell) -> None:
    """Do it in a job that has begun."""
    import hvd_ext as hvd

    (way,) = task.contestants
    numbered, count = Numbered(SIDE, POOL), task.count(SAMPLES, BATCH * task.facts["ranks"])
    data, cache = data_of(way, numbered, count, hvd.rank(), hvd.size())
    data_bytes = count * (numbered.nbytes + 4)
    facts = {"data_bytes": data_bytes, "ranks": hvd.size(), "count": count, "batch": BATCH}
    for epoch in range(task.repetitions + 1):
        wrong = ""
        for pictures, labels in data:
            wrong = wrong or numbered.fault(pictures, labels)
        hvd.barrier()  # nobody goes on before all have looked
        everyone = hvd.allgather_object((pss_bytes(), wrong))
        hvd.barrier()
        if hvd.rank() == 0 and epoch:
            fault = next((one for _, one in everyone if one), "")
            tell("summed PSS", way, MEMORY, [sum(one for one, _ in everyone)], **facts, wrong=fault)
    if cache is not None:
        cache.close()


def data_of(way: str, numbered: Numbered, count: int, rank: int, size: int) -> tuple[tf.data.Dataset, Any]:
    """Make the batches of a rank, and give the cache of ours if there is one."""
    import tensorflow as tf

    if way == OURS:
        cache = ours(np.arange(count), numbered.load, room(count, numbered.nbytes + 4))
        return cache.dataset(batch_size=BATCH, shuffle=True, seed=1), cache
    if way == NOTHING:
        batch = (numbered.pictures(np.zeros(BATCH, np.int64)), np.zeros(BATCH, np.int32))
        return tf.data.Dataset.from_tensors(batch).repeat(count // size // BATCH).prefetch(2), None
    samples = tf.data.Dataset.range(count)
    if way == "cache-part":
        data = samples.shard(size, rank).map(numbered.load).cache().shuffle(count // size)
    else:
        data = samples.map(numbered.load).cache().shuffle(count, seed=1).shard(size, rank)
    return data.batch(BATCH, drop_remainder=True).prefetch(2), None


def beside_nothing(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Take the memory of the job without data from that of the others; its row goes."""
    without = [row for row in rows if row["contestant"] == NOTHING]
    if not without:
        return [dict(row) for row in rows]
    (base,) = without
    median = sorted(base["samples"])[len(base["samples"]) // 2]
    return [
        {**row, "samples": [one - median for one in row["samples"]], "nothing_bytes": median}
        for row in rows
        if row["contestant"] != NOTHING
    ]
