"""What the engine tells: the shards that a rank keeps, and what it has counted."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class KeptShard(NamedTuple):
    """What a sparse bucket keeps on this rank: the bucket's elements [begin, begin + elements)."""

    begin: int
    elements: int
    has_velocity: bool


@dataclasses.dataclass(frozen=True)
class SparseStatistics:
    """What this rank has sent of a channel's sparse buckets since it was opened, in bytes; and its steps."""

    entries: int
    value_bytes: int
    index_bytes: int
    head_bytes: int
    committed: int
    dropped: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine has done since it started, on this rank; sizes in bytes."""

    buckets: int
    calls: int
    segments: int
    bytes_sent: int
    bytes_received: int
