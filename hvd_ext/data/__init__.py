"""Data for several ranks: each rank's part with equally many steps, in an order that training can go on in anywhere.

`shard` divides data. The package loads its modules, and TensorFlow, when a name of it is used first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.data.sharding import shard as shard

# public name -> the module that has it
_NAMES = {"shard": "hvd_ext.data.sharding"}

__all__ = ["shard"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
