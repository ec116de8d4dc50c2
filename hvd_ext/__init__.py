"""Distributed training for Keras 3 on TensorFlow: `import hvd_ext as hvd`.

The names are loaded when they are first used: importing the package needs neither TensorFlow nor MPI nor the native
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# module -> its public names
_MODULES: dict[str, tuple[str, ...]] = {
    "hvd_ext.job.process": (
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
    "hvd_ext.job.process_sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "hvd_ext.tensorflow.collectives.single": (
        "allreduce",
        "allgather",
        "broadcast",
        "reducescatter",
        "alltoall",
        "barrier",
    ),
    "hvd_ext.tensorflow.collectives.grouped": ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"),
    "hvd_ext.tensorflow.collectives.rank_ops": (
        "rank_op",
        "size_op",
        "local_rank_op",
        "local_size_op",
        "process_set_included_op",
    ),
    "hvd_ext.tensorflow.collectives.variables": ("broadcast_variables", "broadcast_global_variables", "broadcast_"),
    "hvd_ext.tensorflow.gradients.tape": ("DistributedGradientTape", "PartialDistributedGradientTape"),
    "hvd_ext.tensorflow.devices": ("pin_gpu",),
    "hvd_ext.tensorflow.topk.ops": ("mstopk", "topk_error_feedback"),
    "hvd_ext.tensorflow.sharing": ("pto",),
    "hvd_ext.tensorflow.collectives.objects": ("broadcast_object", "allgather_object"),
    "hvd_ext.job.recording": ("start_trace", "stop_trace", "start_timeline", "stop_timeline"),
    "hvd_ext.keras.optimizers.optimizer": ("DistributedOptimizer", "PartialDistributedOptimizer", "explain", "flush"),
    "hvd_ext.keras.optimizers.catching_up": ("catch_up",),
    "hvd_ext.keras.checkpoint.load_model": ("load_model",),
    "hvd_ext.keras.sync_batch_norm": ("SyncBatchNormalization",),
    "hvd_ext.keras.optimizers.learning_rate": ("scale_learning_rate",),
    "hvd_ext.keras.callbacks": (
        "BroadcastGlobalVariablesCallback",
        "MetricAverageCallback",
        "LearningRateScheduleCallback",
        "LearningRateWarmupCallback",
        "BestModelCheckpoint",
        "verbose",
    ),
    "hvd_ext.data": ("shard",),
    "hvd_ext.data.cache": ("DataCache",),
    "hvd_ext.compression.quantized": ("Quantized",),
    "hvd_ext.compression.sign": ("Sign",),
    "hvd_ext.compression.topk": ("TopK", "Warmup"),
    "hvd_ext.runner": ("run",),
    "hvd_ext.options": ("Average", "Sum", "Min", "Max", "Product", "Compression", "Options"),
    "hvd_ext.options.unsupported": ("Adasum", "join", "elastic"),
}

# public name -> (module, its name there); an empty name stands for the module itself
_NAMES: dict[str, tuple[str, str]] = {
    **{name: (module, name) for module, names in _MODULES.items() for name in names},
    "callbacks": ("hvd_ext.keras.callbacks", ""),
    "optimizers": ("hvd_ext.keras.optimizers", ""),
    "errors": ("hvd_ext.errors", ""),
}

# Modules that are attributes too. `from hvd_ext import *` leaves them out, because scripts import their own `keras`.
_SUBMODULES = ("data", "keras", "runner", "state", "tensorflow")

if TYPE_CHECKING:
    # The same names again for type checkers and editors, to which `x as x` means that a name is public. A test compares
    # the two lists.
    from hvd_ext import (
        data as data,
        errors as errors,
        keras as keras,
        runner as runner,
        state as state,
        tensorflow as tensorflow,
    )
    from hvd_ext.compression.quantized import Quantized as Quantized
    from hvd_ext.compression.sign import Sign as Sign
    from hvd_ext.compression.topk import TopK as TopK, Warmup as Warmup
    from hvd_ext.data import shard as shard
    from hvd_ext.data.cache import DataCache as DataCache
    from hvd_ext.job.process import (
        ccl_built as ccl_built,
        cross_rank as cross_rank,
        cross_size as cross_size,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rank as rank,
        rocm_built as rocm_built,
        shutdown as shutdown,
        size as size,
    )
    from hvd_ext.job.process_sets import (
        ProcessSet as ProcessSet,
        add_process_set as add_process_set,
        global_process_set as global_process_set,
        remove_process_set as remove_process_set,
    )
    from hvd_ext.job.recording import (
        start_timeline as start_timeline,
        start_trace as start_trace,
        stop_timeline as stop_timeline,
        stop_trace as stop_trace,
    )
    from hvd_ext.keras import callbacks as callbacks, optimizers as optimizers
    from hvd_ext.keras.callbacks import (
        BestModelCheckpoint as BestModelCheckpoint,
        BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback as LearningRateScheduleCallback,
        LearningRateWarmupCallback as LearningRateWarmupCallback,
        MetricAverageCallback as MetricAverageCallback,
        verbose as verbose,
    )
    from hvd_ext.keras.checkpoint.load_model import load_model as load_model
    from hvd_ext.keras.optimizers.catching_up import catch_up as catch_up
    from hvd_ext.keras.optimizers.learning_rate import scale_learning_rate as scale_learning_rate
    from hvd_ext.keras.optimizers.optimizer import (
        DistributedOptimizer as DistributedOptimizer,
        PartialDistributedOptimizer as PartialDistributedOptimizer,
        explain as explain,
        flush as flush,
    )
    from hvd_ext.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from hvd_ext.options import (
        Average as Average,
        Compression as Compression,
        Max as Max,
        Min as Min,
        Options as Options,
        Product as Product,
        Sum as Sum,
    )
    from hvd_ext.options.unsupported import (
        Adasum as Adasum,
        elastic as elastic,
        join as join,
    )
    from hvd_ext.runner import run as run
    from hvd_ext.tensorflow.collectives.grouped import (
        grouped_allgather as grouped_allgather,
        grouped_allreduce as grouped_allreduce,
        grouped_reducescatter as grouped_reducescatter,
    )
    from hvd_ext.tensorflow.collectives.objects import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
    )
    from hvd_ext.tensorflow.collectives.rank_ops import (
        local_rank_op as local_rank_op,
        local_size_op as local_size_op,
        process_set_included_op as process_set_included_op,
        rank_op as rank_op,
        size_op as size_op,
    )
    from hvd_ext.tensorflow.collectives.single import (
        allgather as allgather,
        allreduce as allreduce,
        alltoall as alltoall,
        barrier as barrier,
        broadcast as broadcast,
        reducescatter as reducescatter,
    )
    from hvd_ext.tensorflow.collectives.variables import (
        broadcast_ as broadcast_,
        broadcast_global_variables as broadcast_global_variables,
        broadcast_variables as broadcast_variables,
    )
    from hvd_ext.tensorflow.devices import pin_gpu as pin_gpu
    from hvd_ext.tensorflow.gradients.tape import (
        DistributedGradientTape as DistributedGradientTape,
        PartialDistributedGradientTape as PartialDistributedGradientTape,
    )
    from hvd_ext.tensorflow.sharing import pto as pto
    from hvd_ext.tensorflow.topk.ops import mstopk as mstopk, topk_error_feedback as topk_error_feedback
else:
    # Hidden from type checkers, because with `__getattr__` every name would seem to exist.
    __all__ = ["__version__", *_NAMES]

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"hvd_ext.{name}")
        if name not in _NAMES:
            from hvd_ext.options.unsupported import ABSENT

            instead = f" as Horovod has it: {ABSENT[name]}" if name in ABSENT else ""
            raise AttributeError(f"module 'hvd_ext' has no attribute {name!r}{instead}")
        module_name, attribute = _NAMES[name]
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name not in ("tensorflow", "keras"):
                raise
            raise ModuleNotFoundError(
                f"hvd_ext.{name} needs {error.name}, which this Python does not have; `python -m hvd_ext doctor` says "
                "what is missing, and how to install it",
                name=error.name,
            ) from error
        value = getattr(module, attribute) if attribute else module
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *_SUBMODULES})

    importlib.import_module("hvd_ext.keras.saved_classes").register()
