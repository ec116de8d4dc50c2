"""Prices beside measured times, where the ranks have measured their links: one rank of a job that any launcher starts.

    python -m hvd_ext cluster run --hosts 2,2 --rate 100mbit -- python -m benchmarks.studies.prices FILE.json

The ranks measure their links anew. Then every algorithm that is priced within 1.5 of the best one sums buffers of each
size, NumPy arrays in and out. A sample is the time of the slowest rank, of calls that follow each other for 5 ms.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_ext import options
from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus, network, process, runtime
from hvd_ext.planning import planner, registry
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology import write

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
NEAR = 1.5
SAMPLES, SAMPLE_S, PAUSE_S = 7, 0.005, 0.005


def sampled(job: runtime.Runtime, name: str, nbytes: int) -> list[float]:
    """Time an algorithm; all ranks get the same answer.

    Args:
        job: the job.
        name: the algorithm.
        nbytes: the size of the buffer.

    Returns:
        The samples, in seconds.
    """
    laid_out = layout(job.tree, [Tensor("buffer", (nbytes // 4,), "float32")], options.Sum, algorithm=name)
    channel = job.open(f"prices of {name}", laid_out)
    buffer = np.ones(nbytes // 4, np.float32)
    step = job.engine.prepare(channel, [buffer], [np.empty_like(buffer)])
    step()
    begin = time.perf_counter()
    step()
    took_s = max(time.perf_counter() - begin, 1e-6)
    calls = max(consensus.exchange(job.engine, "calls", lambda: min(50, math.ceil(SAMPLE_S / took_s))))
    samples = []
    for _ in range(SAMPLES):
        job.engine.exchange("prices", b"")
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        samples.append((time.perf_counter() - begin) / calls)
    job.engine.close_channel(channel)
    seen = consensus.exchange(job.engine, "samples", lambda: samples)
    return [max(values) for values in zip(*seen, strict=True)]


def main(arguments: Sequence[str]) -> None:
    """Measure, print a row for each size and algorithm, and write them to a file.

    Args:
        arguments: the file, and sizes in bytes if others than `SIZES` are wanted.
    """
    settings = dataclasses.replace(options.from_environment(), topology=None, probe="refresh", algorithm="auto")
    process.init(settings)
    job = runtime.current()
    if job.network is None or job.network.source != network.MEASURED:
        raise HvdExtError("prices: the links could not be measured")
    rows: list[dict[str, Any]] = []
    for nbytes in [int(text) for text in arguments[1:]] or SIZES:
        names = [name for name in registry.names() if registry.supports(registry.get(name), job.tree) is None]
        prices = {name: planner.price(job.tree, name, nbytes).seconds for name in names}
        for name in (name for name in names if prices[name] <= NEAR * min(prices.values())):
            samples = sampled(job, name, nbytes)
            median = statistics.median(samples)
            rows.append(
                {"bytes": nbytes, "algorithm": name, "price_s": prices[name], "median_s": median, "samples_s": samples}
            )
            if job.engine.rank == 0:
                words = f"price {prices[name] * 1e3:.3f} ms, median {median * 1e3:.3f} ms: {prices[name] / median:.2f}"
                print(f"{nbytes:>10} {name:20} {words} (of the least {prices[name] / min(samples):.2f})", flush=True)
    if job.engine.rank == 0:
        found = {"hosts": job.hosts, "probe_s": job.network.seconds, "topology": write.text(job.tree), "rows": rows}
        Path(arguments[0]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    process.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
