"""What a process and its data cost: processor time, memory of its own, memory that is shared."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
PRIVATE = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


def _kilobytes(path: Path, pattern: re.Pattern[str]) -> int:
    found = pattern.search(path.read_text())
    if found is None:
        raise RuntimeError(f"{path}: it must have a line {pattern.pattern}; this kernel does not write it")
    return int(found[1])


def pss_bytes(process: str = "self") -> int:
    """Give the proportional set size: of a page that n processes have mapped, each has an n-th."""
    return 1024 * _kilobytes(Path("/proc", process, "smaps_rollup"), PSS)


def private_bytes(process: str = "self") -> int:
    """Give the anonymous memory of a process, which no other process shares and no file holds."""
    return 1024 * _kilobytes(Path("/proc", process, "status"), PRIVATE)


def spent(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call a function; give the seconds of the processor, of all threads of this process, those of the clock, and its
    result."""
    begin, cpu = time.perf_counter(), time.process_time()
    found = call()
    return time.process_time() - cpu, time.perf_counter() - begin, found
