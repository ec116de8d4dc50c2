"""Distributed training for Keras 3 on TensorFlow: `import hvd_ext as hvd`.

The names are loaded when they are first used: importing the package needs neither TensorFlow nor MPI nor the native
library.
"""

# ruff: noqa: F401 - the imports below are for type checkers only
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# module -> the public names that it has
_MODULES: dict[str, tuple[str, ...]] = {
    "hvd_ext.process": (
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
        "nccl_built",
        "ddl_built",
        "ccl_built",
        "cuda_built",
        "rocm_built",
    ),
    "hvd_ext.process_sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "hvd_ext.tensorflow.collectives": (
        "allreduce",
        "allgather",
        "broadcast",
        "reducescatter",
        "alltoall",
        "barrier",
    ),
    "hvd_ext.tensorflow.grouped": ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"),
    "hvd_ext.tensorflow.places": (
        "rank_op",
        "size_op",
        "local_rank_op",
        "local_size_op",
        "process_set_included_op",
    ),
    "hvd_ext.tensorflow.variables": ("broadcast_variables", "broadcast_global_variables", "broadcast_"),
    "hvd_ext.tensorflow.tape": ("DistributedGradientTape", "PartialDistributedGradientTape"),
    "hvd_ext.tensorflow.devices": ("pin_gpu",),
    "hvd_ext.tensorflow.topk": ("mstopk", "topk_error_feedback"),
    "hvd_ext.objects": ("broadcast_object", "allgather_object"),
    "hvd_ext.trace.recording": ("start_trace", "stop_trace"),
    "hvd_ext.keras.optimizer": ("DistributedOptimizer",),
    "hvd_ext.keras.partial": ("PartialDistributedOptimizer",),
    "hvd_ext.keras.saving": ("load_model",),
    "hvd_ext.keras.sync_batch_norm": ("SyncBatchNormalization",),
    "hvd_ext.keras.learning_rate": ("scale_learning_rate",),
    "hvd_ext.keras.callbacks": (
        "BroadcastGlobalVariablesCallback",
        "MetricAverageCallback",
        "LearningRateScheduleCallback",
        "LearningRateWarmupCallback",
        "BestModelCheckpoint",
        "verbose",
    ),
    "hvd_ext.data": ("shard",),
    "hvd_ext.compression.topk": ("TopK", "Warmup"),
    "hvd_ext.keras.flushing": ("flush",),
    "hvd_ext.runner": ("run",),
    "hvd_ext.options": ("Average", "Sum", "Min", "Max", "Product", "Compression", "Options"),
    "hvd_ext.refused": ("Adasum", "join", "elastic", "start_timeline", "stop_timeline"),
}

# public name -> the module that has it; an empty name in a pair (module, "") stands for the module itself
_NAMES: dict[str, tuple[str, str]] = {
    **{name: (module, name) for module, names in _MODULES.items() for name in names},
    "callbacks": ("hvd_ext.keras.callbacks", ""),
    "errors": ("hvd_ext.errors", ""),
    "runner": ("hvd_ext.runner", ""),
}

__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from hvd_ext import errors, runner
    from hvd_ext.compression.topk import TopK, Warmup
    from hvd_ext.data import shard
    from hvd_ext.keras import callbacks
    from hvd_ext.keras.callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
        verbose,
    )
    from hvd_ext.keras.flushing import flush
    from hvd_ext.keras.learning_rate import scale_learning_rate
    from hvd_ext.keras.optimizer import DistributedOptimizer
    from hvd_ext.keras.partial import PartialDistributedOptimizer
    from hvd_ext.keras.saving import load_model
    from hvd_ext.keras.sync_batch_norm import SyncBatchNormalization
    from hvd_ext.objects import allgather_object, broadcast_object
    from hvd_ext.options import Average, Compression, Max, Min, Options, Product, Sum
    from hvd_ext.process import (
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
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
        nccl_built,
        rank,
        rocm_built,
        shutdown,
        size,
    )
    from hvd_ext.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
    from hvd_ext.refused import Adasum, elastic, join, start_timeline, stop_timeline
    from hvd_ext.runner import run
    from hvd_ext.tensorflow.collectives import allgather, allreduce, alltoall, barrier, broadcast, reducescatter
    from hvd_ext.tensorflow.devices import pin_gpu
    from hvd_ext.tensorflow.grouped import grouped_allgather, grouped_allreduce, grouped_reducescatter
    from hvd_ext.tensorflow.places import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
    from hvd_ext.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
    from hvd_ext.tensorflow.topk import mstopk, topk_error_feedback
    from hvd_ext.tensorflow.variables import broadcast_, broadcast_global_variables, broadcast_variables
    from hvd_ext.trace.recording import start_trace, stop_trace


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        from hvd_ext.refused import ABSENT

        instead = f" as Horovod has it: {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"module 'hvd_ext' has no attribute {name!r}{instead}")
    module_name, attribute = _NAMES[name]
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
