"""Prices beside measured times, where the ranks have measured their links: one rank of a job that any launcher starts.

    python -m hvd_ext cluster run --hosts 2,2 --rate 100mbit -- python -m benchmarks.studies.prices FILE.json LINKS

The ranks measure their links anew. Then `auto` and every algorithm that is priced within 1.5 of the best one (2.5 below
1 MB) sum buffers of each size, NumPy arrays in and out, in turns. A sample is the time of the slowest rank, of calls
that follow each other for 5 ms; one more call before them does not count. Rows are added to the file.
"""

from __future__ import annotations

import dataclasses
import math
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
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus, network, process, runtime
from hvd_ext.planning import lane_prices, planner, registry, sparse_planner
from hvd_ext.planning.layout import Layout, layout
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology import write

BENCHMARK = "prices of measured networks, float32, sum"
HEADINGS = ("ranks", "links", "bytes", "algorithm", "price", "median", "price / median", "x best fixed")
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
NEAR, NEAR_BELOW_1_MB = 1.5, 2.5
SAMPLES, SAMPLE_S, PAUSE_S = 7, 0.005, 0.005
MOST_CALLS = 1000  # in a sample


def laid_out(job: runtime.Runtime, name: str, nbytes: int) -> Layout:
    """Lay a buffer out.

    Args:
        job: the job.
        name: an allreduce algorithm, or "hitopk@" and a density.
        nbytes: the size of the buffer.
    """
    algorithm, _, density = name.partition("@")
    tensors = [Tensor("buffer", (2, nbytes // 8), "float32")]  # what has one dimension is sent whole
    if density:
        return layout(job.tree, tensors, options.Sum, codec=TopK(float(density)), sparse_algorithm=algorithm)
    return layout(job.tree, tensors, options.Sum, algorithm=algorithm)


def price_of(job: runtime.Runtime, name: str, nbytes: int) -> float:
    """Price an algorithm, see `laid_out`, in seconds."""
    if "@" not in name:
        return planner.price(job.tree, name, nbytes).seconds
    sparsity = lane_prices.sparsity_of(job.tree, TopK(float(name.partition("@")[2])))
    return sparse_planner.sparse_price(laid_out(job, name, nbytes).buckets[0].plan, job.tree, nbytes, sparsity).seconds


def step_of(job: runtime.Runtime, name: str, nbytes: int) -> tuple[int, Callable[[], None]]:
    """Open a channel with a buffer of random values; return its handle, and a function that runs a step."""
    channel = job.open(f"prices of {name}", laid_out(job, name, nbytes))
    buffer = np.random.default_rng(job.engine.rank).standard_normal(nbytes // 4, np.float32)
    reduce = job.engine.prepare(channel, [buffer], [np.empty_like(buffer)])
    if "@" not in name:
        return channel, reduce
    density = float(name.partition("@")[2])

    def topk_step() -> None:
        job.engine.begin_topk_step(channel, density)
        reduce()
        job.engine.end_step(channel, True)

    return channel, topk_step


def sampled(job: runtime.Runtime, names: Sequence[str], nbytes: int) -> dict[str, list[float]]:
    """Time algorithms in turns; all ranks get the same answer.

    Args:
        job: the job.
        names: the algorithms, see `laid_out`.
        nbytes: the size of the buffer.

    Returns:
        The samples of each algorithm, in seconds.
    """
    channels: list[int] = []
    steps: dict[str, Callable[[], None]] = {}
    calls: dict[str, int] = {}
    for name in names:
        channel, step = step_of(job, name, nbytes)
        channels.append(channel)
        steps[name] = step
        step()
        begin = time.perf_counter()
        step()
        wanted = min(MOST_CALLS, math.ceil(SAMPLE_S / max(time.perf_counter() - begin, 1e-6)))
        calls[name] = max(consensus.exchange(job.engine, "calls", lambda wanted=wanted: wanted))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(SAMPLES):
        for name in names:
            job.engine.exchange("prices", b"")
            time.sleep(PAUSE_S)
            steps[name]()  # does not count: the ranks meet in it after the pause
            begin = time.perf_counter()
            for _ in range(calls[name]):
                steps[name]()
            samples[name].append((time.perf_counter() - begin) / calls[name])
    for channel in channels:
        job.engine.close_channel(channel)
    seen = consensus.exchange(job.engine, "samples", lambda: samples)
    return {name: [max(values) for values in zip(*(rank[name] for rank in seen), strict=True)] for name in names}


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table: of each cluster and size, "auto" first."""
    lines = [
        [
            results.cluster_name(row),
            row["links"],
            f"{row['bytes']:,}",
            row["algorithm"],
            seconds(row["price_seconds"]),
            seconds(row["seconds_median"]),
            ratio(row["price_seconds"] / row["seconds_median"]),
            ratio(row["x_best"]),
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, print a row for each size and algorithm, and add them to a file.

    Args:
        arguments: the file, words for the links, and sizes in bytes if others than `SIZES` are wanted. "told" among
            them: the topology is the one that the job was told, and nothing is measured. Names with a density
            ("hitopk@0.01") among them: these are timed, and nothing else.
    """
    path, links, *texts = arguments
    told, sparse = "told" in texts, [text for text in texts if "@" in text]
    texts = [text for text in texts if text.isdigit()]
    settings = dataclasses.replace(options.from_environment(), algorithm="auto")
    if not told:
        settings = dataclasses.replace(settings, topology=None, probe="refresh")
    process.init(settings)
    job = runtime.current()
    if not told and len(job.tree.hosts()) > 1 and (job.network is None or job.network.source != network.MEASURED):
        raise HvdExtError("prices: the links could not be measured")
    launcher = jobs.Launcher(os.environ.get(jobs.VARIABLE, "mpirun")).describe()
    record = command.Record(BENCHMARK, launcher, Path(path), append=True)
    network_of = {"probe_seconds": job.network.seconds, "topology": write.text(job.tree)} if job.network else {}
    rows: list[dict[str, Any]] = []
    for nbytes in [int(text) for text in texts] or SIZES:
        names = sparse or [name for name in registry.names() if registry.supports(registry.get(name), job.tree) is None]
        prices = {name: price_of(job, name, nbytes) for name in names}
        if not sparse:
            near = NEAR_BELOW_1_MB if nbytes < 1 << 20 else NEAR
            prices = {name: price for name, price in prices.items() if price <= near * min(prices.values())}
        timed = [*prices] if sparse else ["auto", *prices]
        samples = sampled(job, timed, nbytes)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        best = min(medians[name] for name in prices)
        for name in timed:
            price = prices.get(name, min(prices.values()))
            row = {
                "ranks_per_host": [len(host) for host in job.tree.hosts()],
                "links": links,
                "bytes": nbytes,
                "algorithm": name,
                "price_seconds": price,
                "seconds_median": medians[name],
                "x_best": medians[name] / best,
                "samples": samples[name],
            }
            rows.append(row)
            if job.engine.rank == 0:
                words = f"price {seconds(price)}, median {seconds(medians[name])}: {price / medians[name]:.2f}"
                print(f"{nbytes:>10} {name:20} {words}; {row['x_best']:.2f} of the best fixed", flush=True)
    if job.engine.rank == 0:
        record.keep(rows, **network_of)
    process.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
