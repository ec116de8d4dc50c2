"""The part of the doctor that starts MPI, in a separate process: `python -m hvd_ext.doctor.job_meeting`.

MPI may hang, crash, or end the process it runs in. The rank that has started this process survives and reports that.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvd_ext import options
from hvd_ext.build.child import MARK
from hvd_ext.doctor.job_facts import mapped
from hvd_ext.engine import libraries
from hvd_ext.errors import HvdExtError
from hvd_ext.job import consensus, process, runtime
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

ELEMENTS = 1 << 20  # 4 MiB of float32: the network decides the time, and slow networks still manage it
TIMES = 5


def mpi_library() -> dict[str, Any]:
    """Find the MPIs in this process: "said", the version text of the engine's MPI, and "mapped", the paths of all."""
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(str(libraries.LIBRARIES / libraries.ENGINE_LIBRARY)).MPI_Get_library_version(text, ctypes.byref(length))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return {"said": text.value.decode(errors="replace"), "mapped": mapped(maps)}


def timed_allreduce() -> dict[str, Any]:
    """Sum a buffer over the ranks several times, and check every element.

    Returns:
        "nbytes" of the buffer, "seconds" of the fastest sum, "algorithm", and "wrong", the number of wrong elements.
    """
    job = runtime.current()
    laid_out = layout(job.tree, [Tensor("doctor", (ELEMENTS,), "float32")], options.Sum)
    channel = job.open("doctor", laid_out)
    pattern = np.arange(ELEMENTS, dtype=np.float32) % 251
    size, seconds, wrong = job.engine.size, [], 0
    for _ in range(TIMES):
        mine, result = [pattern + job.engine.rank], [np.empty_like(pattern)]
        begin_s = time.monotonic()
        job.engine.reduce(channel, mine, result)
        seconds.append(time.monotonic() - begin_s)
        wrong += int(np.count_nonzero(result[0] != size * pattern + size * (size - 1) / 2))
    job.engine.close_channel(channel)
    return {
        "nbytes": 4 * ELEMENTS,
        "seconds": min(seconds),
        "algorithm": laid_out.buckets[0].plan.algorithm,
        "wrong": wrong,
    }


def meet(facts: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Start MPI with the other ranks, exchange all ranks' facts, and sum a buffer with them, each in limited time.

    Returns:
        "mpi" of this rank. If the ranks met: "rank", "answers" (the facts of all ranks with their "mpi") and
        "allreduce". If something failed: "error".
    """
    met: dict[str, Any] = {}
    try:
        met["mpi"] = mpi_library()
        process.init(options.Options(stall_warn_s=0, stall_fatal_s=limit_s))
        job = runtime.current()
        met["answers"] = consensus.exchange(job.engine, "doctor", lambda: {**facts, "mpi": met["mpi"]})
        met["rank"] = job.engine.rank
        met["allreduce"] = timed_allreduce()
        process.shutdown()
    except (HvdExtError, OSError, AttributeError) as error:
        met["error"] = f"{type(error).__name__}: {error}"
    return met


def main() -> None:
    """Read the facts and the limit from stdin, meet the other ranks, and print the result after a mark."""
    request = json.load(sys.stdin)
    met = meet(request["facts"], request["limit_s"])
    print(f"\n{MARK}{json.dumps(met)}", flush=True)


if __name__ == "__main__":
    main()
