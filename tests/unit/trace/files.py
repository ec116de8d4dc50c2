"""Hand-made traces of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def span(category: str, rank: int, begin: float, end: float, **about: Any) -> dict[str, Any]:
    """A span of step 1 of Adam, in us; `about` goes to its args."""
    about = {"channel": "Adam", "lane": 1, "step": 1, **about}
    shape = {"name": category, "cat": category, "ph": "X", "ts": begin, "dur": end - begin}
    return {**shape, "pid": rank, "tid": 1, "args": about}


def submitted(rank: int, at: float, step: int = 1) -> dict[str, Any]:
    """The moment in which a rank's last tensor came."""
    about = {"channel": "Adam", "lane": 1, "step": step}
    return {"name": "x", "cat": "submitted", "ph": "i", "s": "t", "ts": at, "pid": rank, "tid": 1, "args": about}


def document(rank: int, events: list[dict[str, Any]], size: int = 2, **about: Any) -> dict[str, Any]:
    """A rank's file; `about` changes what it says of itself."""
    plain = {"version": 1, "job": "one", "rank": rank, "size": size, "dropped": 0, "clock_uncertainty_us": 2.0}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**plain, **about}}


def put(folder: Path, rank: int, events: list[dict[str, Any]], size: int = 2, **about: Any) -> Path:
    """Writes a rank's file."""
    path = folder / f"rank_{rank}.json"
    path.write_text(json.dumps(document(rank, events, size, **about)), encoding="utf-8")
    return path


# Rank 0: on its way 10..40 and 50..60 (40 us), exposed 30..45 and 55..70 (30 us), both at once 30..40 and 55..60 (15).
# Rank 1: on its way 20..40 (20 us), exposed 100..101 (1 us), never both.
RANK_0 = [
    span("step", 0, 0, 70),
    span("reduce", 0, 10, 30, bucket=0),
    span("reduce", 0, 25, 40, bucket=1),
    span("reduce", 0, 50, 60, bucket=2),
    span("exposed", 0, 30, 45),
    span("exposed", 0, 55, 70),
    submitted(0, 28),
]
RANK_1 = [
    span("step", 1, 5, 101),
    span("reduce", 1, 20, 40, bucket=0),
    span("reduce", 1, 22, 25, bucket=1),
    span("exposed", 1, 100, 101),
    submitted(1, 91.5),
]
