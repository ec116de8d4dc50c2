"""Data for several ranks: each rank's part with equally many steps, in an order that training can go on in anywhere.

`shard` divides data. `hvd_ext.DataCache` and `cached` load samples once on each host; `folder`, `tfrecord` and `tar`
are what it loads them from. The package loads its modules, and TensorFlow, when a name of it is used first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.data.folders import folder as folder
    from hvd_ext.data.sharding import shard as shard
    from hvd_ext.data.stream import cached as cached
    from hvd_ext.data.tar_files import tar as tar
    from hvd_ext.data.tfrecord_files import tfrecord as tfrecord

# public name -> the module that has it
_NAMES = {
    "cached": "hvd_ext.data.stream",
    "folder": "hvd_ext.data.folders",
    "shard": "hvd_ext.data.sharding",
    "tar": "hvd_ext.data.tar_files",
    "tfrecord": "hvd_ext.data.tfrecord_files",
}

__all__ = ["cached", "folder", "shard", "tar", "tfrecord"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
