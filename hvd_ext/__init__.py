"""Distributed training for Keras 3 on TensorFlow: `import hvd_ext as hvd`.

The names are loaded when they are first used: importing the package needs neither TensorFlow nor MPI nor the native
library.
"""

# ruff: noqa: F401 - the imports below are for type checkers only
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PROCESS = "hvd_ext.process"
_COLLECTIVES = "hvd_ext.tensorflow.collectives"
_CALLBACKS = "hvd_ext.keras.callbacks"

# public name -> the module that has it; an empty name in a pair (module, "") stands for the module itself
_NAMES: dict[str, tuple[str, str]] = {
    **{
        name: (_PROCESS, name)
        for name in (
            "init",
            "shutdown",
            "is_initialized",
            "rank",
            "size",
            "local_rank",
            "local_size",
            "cross_rank",
            "cross_size",
            "is_homogeneous",
            "mpi_enabled",
            "mpi_built",
            "mpi_threads_supported",
            "gloo_enabled",
            "gloo_built",
        )
    },
    **{
        name: (_COLLECTIVES, name)
        for name in ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier")
    },
    **{name: ("hvd_ext.objects", name) for name in ("broadcast_object", "allgather_object")},
    **{name: ("hvd_ext.trace.recording", name) for name in ("start_trace", "stop_trace")},
    "broadcast_variables": ("hvd_ext.tensorflow.variables", "broadcast_variables"),
    "DistributedOptimizer": ("hvd_ext.keras.optimizer", "DistributedOptimizer"),
    "callbacks": (_CALLBACKS, ""),
    "BroadcastGlobalVariablesCallback": (_CALLBACKS, "BroadcastGlobalVariablesCallback"),
    "MetricAverageCallback": (_CALLBACKS, "MetricAverageCallback"),
    "Average": ("hvd_ext.options", "Average"),
    "Sum": ("hvd_ext.options", "Sum"),
    "Compression": ("hvd_ext.options", "Compression"),
    "Options": ("hvd_ext.options", "Options"),
    "errors": ("hvd_ext.errors", ""),
}

__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from hvd_ext import errors
    from hvd_ext.keras import callbacks
    from hvd_ext.keras.callbacks import (
        BroadcastGlobalVariablesCallback,
        MetricAverageCallback,
    )
    from hvd_ext.keras.optimizer import DistributedOptimizer
    from hvd_ext.objects import allgather_object, broadcast_object
    from hvd_ext.options import Average, Compression, Options, Sum
    from hvd_ext.process import (
        cross_rank,
        cross_size,
        gloo_built,
        gloo_enabled,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        rank,
        shutdown,
        size,
    )
    from hvd_ext.tensorflow.collectives import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        reducescatter,
    )
    from hvd_ext.tensorflow.variables import broadcast_variables
    from hvd_ext.trace.recording import start_trace, stop_trace


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hvd_ext' has no attribute {name!r}")
    module_name, attribute = _NAMES[name]
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
