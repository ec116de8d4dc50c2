"""Latency of partial rounds on skewed ranks, as eager-SGD's Fig. 8 and 9: one rank of a job that any launcher starts.

    mpirun --oversubscribe -np 12 python -m benchmarks.studies.skew FILE.json [ROUNDS]

Before each call, which begins at one time on all ranks, rank r sleeps (r + 1) times 20 ms. A sample is the mean over
the ranks of the time in the call: of MPI_Allreduce, and of a channel whose rounds wait for all ranks, for the first, or
for a drawn one. No TensorFlow runs. Rows are added to the file. Rank 0 comes first, while all other engines are idle:
the median of its time in a call of solo is what it takes to wake them and to sum. The processor time is that of a rank,
as a share of a core; nearly all of it passes while its engine is idle.

Source: Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial Collective Operations", sec. 6.1.
With P ranks and a skew of d, communication that takes no time gives means of d (P - 1) / 2 where all are waited for,
and of d (P^2 - 1) / (6 P), over all draws, where a drawn one is: a ratio of 3 P / (P + 1). Then (P + 1) / 2 ranks are
active.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.markdown import table
from hvd_ext import options
from hvd_ext.bench import command, jobs, results
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.engine.partial import Partial
from hvd_ext.job import consensus, process, runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

BENCHMARK = "skewed ranks, float32, sum"
HEADINGS = (
    *("ranks", "bytes", "mode", "mean latency", "closed form", "x solo", "active ranks"),
    *("first rank", "processor"),
)
MODES = ("mpi", "full", "majority", "solo")
SIZES = (4, 1024, 65536)
SKEW_S = 0.020
ROUNDS = 64
STALENESS = 1 << 30  # every round begins afresh on all ranks, so that none falls behind


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = [
        [
            results.cluster_name(row),
            f"{row['bytes']:,}",
            row["mode"],
            seconds(row["seconds_mean"]),
            "" if row["closed_form_seconds"] is None else seconds(row["closed_form_seconds"]),
            ratio(row["x_solo"]),
            "" if row["active_ranks"] is None else f"{row['active_ranks']:.1f}",
            seconds(row["seconds_first"]),
            f"{row['processor_share']:.2%}",
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def closed_form_s(mode: str, ranks: int) -> float | None:
    """The mean latency that the skew alone makes, in seconds; None for solo, whose first rank waits for nobody."""
    if mode == "solo":
        return None
    return SKEW_S * ((ranks - 1) / 2 if mode in ("mpi", "full") else (ranks**2 - 1) / (6 * ranks))


def call_of(job: runtime.Runtime, mode: str, nbytes: int) -> tuple[Callable[[], None], int | None]:
    """Make the call that is timed; and its channel, if it has one."""
    buffer = np.ones(nbytes // 4, np.float32)
    result = np.empty_like(buffer)
    if mode == "mpi":
        from mpi4py import MPI

        return lambda: MPI.COMM_WORLD.Allreduce(buffer, result), None
    laid_out = layout(job.tree, [Tensor("buffer", (nbytes // 4,), "float32")], options.Sum)
    partial = None if mode == "full" else Partial(GradientOptions(sync=mode, staleness=STALENESS), seed=1)
    channel = job.open(f"skew of {mode}", laid_out, partial)
    return job.engine.prepare(channel, [buffer], [result]), channel


def measured(job: runtime.Runtime, mode: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Time a mode; all ranks get the same answer."""
    call, channel = call_of(job, mode, nbytes)
    call()
    own = []
    begin_s, spent_s = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        job.engine.exchange("skew: begin", b"")
        time.sleep((job.engine.rank + 1) * SKEW_S)
        begin = time.perf_counter()
        call()
        own.append(time.perf_counter() - begin)
    share = (time.process_time() - spent_s) / (time.perf_counter() - begin_s)
    seen = consensus.exchange(job.engine, "skew: samples", lambda: own)
    shares = consensus.exchange(job.engine, "skew: processor", lambda: share)
    samples = [statistics.fmean(ranks) for ranks in zip(*seen, strict=True)]
    active = None
    if channel is not None:
        if mode not in ("mpi", "full"):
            found = job.engine.rounds(channel, first=2)
            active = float((found.arrived == found.numbers[:, None]).sum(1).mean())
        job.engine.close_channel(channel)
    return {
        "ranks_per_host": [len(host) for host in job.tree.hosts()],
        "bytes": nbytes,
        "mode": mode,
        "seconds_mean": statistics.fmean(samples),
        "closed_form_seconds": closed_form_s(mode, job.engine.size),
        "x_solo": None,
        "active_ranks": active,
        "seconds_first": statistics.median(ranks[0] for ranks in zip(*seen, strict=True)),
        "processor_share": statistics.fmean(shares),
        "samples": samples,
    }


def main(arguments: Sequence[str]) -> None:
    """Measure, and add a row for each size and mode to the file.

    Args:
        arguments: the file, and the number of rounds if it is not `ROUNDS`.
    """
    process.init(options.from_environment())
    job = runtime.current()
    launcher = jobs.Launcher(os.environ.get(jobs.VARIABLE, "mpirun")).describe()
    record = command.Record(BENCHMARK, launcher, Path(arguments[0]), append=True)
    rounds = int(arguments[1]) if len(arguments) > 1 else ROUNDS
    rows = []
    for nbytes in SIZES:
        found = {mode: measured(job, mode, nbytes, rounds) for mode in MODES}
        for row in found.values():
            row["x_solo"] = row["seconds_mean"] / found["solo"]["seconds_mean"]
            rows.append(row)
            if job.engine.rank == 0:
                words = f"{seconds(row['seconds_mean'])}, x solo {row['x_solo']:.1f}, active {row['active_ranks']}"
                print(f"{job.engine.size} ranks, {nbytes} bytes, {row['mode']}: {words}", flush=True)
    if job.engine.rank == 0:
        record.keep(rows)
    process.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
