"""The rows of the life of a job and of the collectives."""

from __future__ import annotations

from hvd_ext import refused
from hvd_ext.migration.row import OTHER, REFUSED, Row, callable_rows, same

_LIFE, _SETS, _COLLECTIVES, _LEFT = "The job", "Process sets", "Collectives", "Names that are gone"

_PLACED = "accepted; changes nothing: tensors of a GPU go through host memory"
_SCOPE = "accepted; changes nothing: names of scopes are not used"
_SESSION = "must be None: there are no sessions in TensorFlow 2"
_VALUE = "of the Keras face: `import hvd_ext.keras as hvd` keeps this name, and its order of arguments"

_ODD = {"device_dense": _PLACED, "device_sparse": _PLACED, "ignore_name_scope": _SCOPE}

_LIFE_ROWS = (
    *callable_rows(
        _LIFE,
        "init",
        "comm process_sets",
        "",
        {"comm": "by keyword: None or all ranks; for a part of the ranks use a process set"},
    ),
    *same(_LIFE, "shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous"),
    *same(_LIFE, "mpi_enabled mpi_built mpi_threads_supported gloo_enabled gloo_built"),
    *same(_LIFE, "nccl_built ddl_built ccl_built cuda_built rocm_built", "as Horovod without that library"),
    *callable_rows(_LIFE, "rank_op", "name"),
    *callable_rows(_LIFE, "local_rank_op", "name"),
    *callable_rows(_LIFE, "local_size_op", "name"),
    *callable_rows(_LIFE, "size_op", "process_set_id name"),
    *callable_rows(
        _LIFE,
        "start_timeline",
        "file_path mark_cycles",
        "",
        {
            "file_path": "names a folder (without .json), in which each rank leaves its trace: see docs/trace.md",
            "mark_cycles": "!" + refused.INSTEAD["mark_cycles"],
        },
    ),
    *same(_LIFE, "stop_timeline"),
    Row(_LIFE, "join", "", REFUSED, refused.INSTEAD["join"]),
)

_SET_ROWS = (
    *callable_rows(
        _SETS,
        "ProcessSet",
        "ranks_or_comm",
        "",
        {"ranks_or_comm": "a list of ranks, as the first argument, not by keyword; no mpi4py communicator"},
    ),
    *same(_SETS, "ProcessSet.size ProcessSet.rank ProcessSet.included ProcessSet.process_set_id ProcessSet.ranks"),
    Row(
        _SETS,
        "ProcessSet.mpi_comm",
        "",
        REFUSED,
        "communicators of mpi4py are not taken, give the ranks that they have in the job",
    ),
    *same(_SETS, "global_process_set"),
    *callable_rows(_SETS, "add_process_set", "process_set", "at any time, without a setting"),
    *callable_rows(_SETS, "remove_process_set", "process_set"),
    *callable_rows(_SETS, "process_set_included_op", "process_set_id name"),
)

_GRADIENT = "its gradient is that of the sum of the ranks' losses; Horovod divides it by their number"
_SCATTER_GRADIENT = "its gradient is that of the sum of the ranks' losses; Horovod's is that times their number"

_COLLECTIVE_ROWS = (
    *callable_rows(
        _COLLECTIVES,
        "allreduce",
        "tensor value average device_dense device_sparse compression op prescale_factor postscale_factor name "
        "process_set ignore_name_scope",
        "also of bfloat16, and of whole numbers of 8 and 16 bits, whose overflow is an error; a difference between "
        "ranks is an error on all",
        {**_ODD, "value": _VALUE},
    ),
    *callable_rows(
        _COLLECTIVES,
        "grouped_allreduce",
        "tensors average device_dense device_sparse compression op prescale_factor postscale_factor process_set "
        "ignore_name_scope name",
        "dense and sparse tensors mixed; Horovod fails there",
        _ODD,
    ),
    *callable_rows(
        _COLLECTIVES,
        "allgather",
        "tensor value name ignore_name_scope process_set",
        _GRADIENT,
        {**_ODD, "value": _VALUE},
        OTHER,
    ),
    *callable_rows(
        _COLLECTIVES, "grouped_allgather", "tensors name ignore_name_scope process_set", _GRADIENT, _ODD, OTHER
    ),
    *callable_rows(
        _COLLECTIVES,
        "broadcast",
        "tensor value root_rank name ignore_name_scope process_set",
        f"root_rank is a rank of the job, also in a process set; {_GRADIENT}",
        {**_ODD, "value": _VALUE},
        OTHER,
    ),
    *callable_rows(_COLLECTIVES, "alltoall", "tensor splits name ignore_name_scope process_set", "", _ODD),
    *callable_rows(
        _COLLECTIVES,
        "reducescatter",
        "tensor value device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
        _SCATTER_GRADIENT,
        {**_ODD, "value": _VALUE},
        OTHER,
    ),
    *callable_rows(
        _COLLECTIVES,
        "grouped_reducescatter",
        "tensors device_dense compression op process_set prescale_factor postscale_factor",
        _SCATTER_GRADIENT,
        _ODD,
        OTHER,
    ),
    *callable_rows(
        _COLLECTIVES,
        "broadcast_object",
        "obj root_rank session name process_set",
        "",
        {"session": _SESSION},
    ),
    *callable_rows(_COLLECTIVES, "allgather_object", "obj session name process_set", "", {"session": _SESSION}),
)

_LEFT_ROWS = (
    Row(_LEFT, "broadcast_object_fn", "broadcast_object", OTHER, refused.ABSENT["broadcast_object_fn"]),
    Row(_LEFT, "gpu_available", "", REFUSED, refused.ABSENT["gpu_available"]),
    Row(_LEFT, "tensorflow.data.compute_service", "", REFUSED, refused.ABSENT["data"]),
    Row(_LEFT, "LocalGradientAggregationHelper", "", REFUSED, refused.ABSENT["LocalGradientAggregationHelper"]),
)

ROWS = (*_LIFE_ROWS, *_SET_ROWS, *_COLLECTIVE_ROWS, *_LEFT_ROWS)
