"""What the engine reports: the shards whose residuals a rank keeps, and its counters."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class ResidualShard(NamedTuple):
    """The elements [begin, begin + elements) of a sparse bucket, whose residual and velocity this rank keeps."""

    begin: int
    elements: int
    has_velocity: bool


@dataclasses.dataclass(frozen=True)
class TopKStatistics:
    """Entries and bytes that this rank has sent for a channel's sparse buckets, and its committed and dropped steps."""

    entries: int
    value_bytes: int
    index_bytes: int
    head_bytes: int
    committed: int
    dropped: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine has done on this rank since it started."""

    buckets: int
    calls: int
    segments: int
    bytes_sent: int
    bytes_received: int
