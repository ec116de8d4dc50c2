"""The public names of `hvd_ext`, for type checkers, for editors, and for `__init__.py`, which reads them here.

`x as x` means that a name is public.
"""

from hvd_ext import (
    data as data,
    elastic as elastic,
    errors as errors,
    keras as keras,
    runner as runner,
    state as state,
    tensorflow as tensorflow,
)
from hvd_ext.compression.any_of import AnyOf as AnyOf
from hvd_ext.compression.low_rank import LowRank as LowRank
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
from hvd_ext.keras.optimizers.global_weights import local_weights as local_weights
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
from hvd_ext.options.local_steps import LocalSteps as LocalSteps
from hvd_ext.options.unsupported import Adasum as Adasum
from hvd_ext.runner import run as run
from hvd_ext.tensorflow.collectives.grouped import (
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
)
from hvd_ext.tensorflow.collectives.joining import join as join
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

__version__: str
