"""The rows of starting and stopping a job, of process sets and of collectives."""

from __future__ import annotations

from docs.horovod.row import OTHER, REFUSED, Row, callable_rows, same
from hvd_ext import runner
from hvd_ext.options import unsupported

_LIFE, _SETS, _COLLECTIVES, _LEFT = "The job", "Process sets", "Collectives", "Names that are gone"
_RUN = "A job from a notebook or a program"

_PLACED = "accepted without effect: GPU tensors go through host memory"
_NO_MATTER = "accepted without effect"
_SCOPE = "accepted without effect: names of scopes are not used"
_SESSION = "accepted without effect: objects are sent without a session"
_VALUE = "of Horovod's Keras module: `import hvd_ext.keras as hvd` keeps this name, and the order of arguments"

_ODD = {"device_dense": _PLACED, "device_sparse": _PLACED, "ignore_name_scope": _SCOPE}

_LIFE_ROWS = (
    *callable_rows(
        _LIFE,
        "init",
        "comm process_sets",
        "",
        {"comm": "first or by keyword: None, or all ranks in their order; for some of the ranks use a process set"},
    ),
    *same(_LIFE, "shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous"),
    *same(_LIFE, "mpi_enabled mpi_built mpi_threads_supported gloo_enabled gloo_built"),
    *same(_LIFE, "nccl_built ddl_built ccl_built cuda_built rocm_built", "as in Horovod without that library"),
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
            "file_path": "names a folder (without .json), into which each rank writes its trace: see docs/trace.md",
            "mark_cycles": "!" + unsupported.INSTEAD["mark_cycles"],
        },
    ),
    *same(_LIFE, "stop_timeline"),
    *same(_LIFE, "join", "returns an int; not with `sync`, `delay`, `local_steps` and `LowRank`"),
)

_RUN_ROWS = (
    *callable_rows(
        _RUN,
        "run",
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args "
        "network_interface executable np min_np max_np",
        "`horovod.run`; runs on MPI, shows the output of rank 0, and raises an exception of a rank: see docs/launch.md",
        {
            "hosts": "the hosts share the folder for temporary files (`TMPDIR`)",
            "hostfile": "the hosts share the folder for temporary files (`TMPDIR`)",
            "disable_cache": _NO_MATTER,
            "use_mpi": _NO_MATTER,
            "output_filename": "the folder has a file `rank.0.txt` for rank 0, and so on",
            "verbose": "prints the command",
            **{name: f"!{words}" for name, words in runner.REFUSED.items()},
        },
    ),
    Row(
        _RUN,
        "runner",
        "run",
        OTHER,
        "`from hvd_ext.runner import run` works; of Horovod's runner there is only hvd_ext.run(function, np=4)",
    ),
    Row(_RUN, "experimental_run_tf_function", "an error of Keras", REFUSED, unsupported.INSTEAD["experimental"]),
)

_SET_ROWS = (
    *callable_rows(
        _SETS,
        "ProcessSet",
        "ranks_or_comm",
        "a list of ranks, or an mpi4py communicator with its ranks in MPI's order; each rank passes its own, as "
        "`Comm.Split` returns it",
    ),
    *same(_SETS, "ProcessSet.size ProcessSet.rank ProcessSet.included ProcessSet.process_set_id ProcessSet.ranks"),
    *same(_SETS, "ProcessSet.mpi_comm", "the communicator that was passed, or None"),
    *same(_SETS, "global_process_set"),
    *callable_rows(_SETS, "add_process_set", "process_set", "at any time, without a setting; communicators too"),
    *callable_rows(_SETS, "remove_process_set", "process_set"),
    *callable_rows(_SETS, "process_set_included_op", "process_set_id name"),
)

_COLLECTIVE_ROWS = (
    *callable_rows(
        _COLLECTIVES,
        "allreduce",
        "tensor value average device_dense device_sparse compression op prescale_factor postscale_factor name "
        "process_set ignore_name_scope",
        "also takes bfloat16, and integers of 8 and 16 bits, whose overflow is an error; averages of integers never "
        "wrap around; a difference between ranks raises on all of them. IndexedSlices come back with each index once; "
        "averages of their integers are floats, "
        "as in Horovod",
        {**_ODD, "value": _VALUE},
    ),
    *callable_rows(
        _COLLECTIVES,
        "grouped_allreduce",
        "tensors average device_dense device_sparse compression op prescale_factor postscale_factor process_set "
        "ignore_name_scope name",
        "may mix dense and sparse tensors, with which Horovod fails",
        _ODD,
    ),
    *callable_rows(
        _COLLECTIVES,
        "allgather",
        "tensor value name ignore_name_scope process_set",
        "as in Horovod, its gradient is that of the average of the ranks' losses",
        {**_ODD, "value": _VALUE},
    ),
    *callable_rows(
        _COLLECTIVES,
        "grouped_allgather",
        "tensors name ignore_name_scope process_set",
        "gradients as of allgather",
        _ODD,
    ),
    *callable_rows(
        _COLLECTIVES,
        "broadcast",
        "tensor value root_rank name ignore_name_scope process_set",
        "root_rank is a rank of the job, even with a process set; as in Horovod, its gradient is that of the average "
        "of the ranks' losses",
        {**_ODD, "value": _VALUE},
    ),
    *callable_rows(_COLLECTIVES, "alltoall", "tensor splits name ignore_name_scope process_set", "", _ODD),
    *callable_rows(
        _COLLECTIVES,
        "reducescatter",
        "tensor value device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
        "as in Horovod, its gradient is that of the sum of the ranks' losses, times the number of ranks",
        {**_ODD, "value": _VALUE},
    ),
    *callable_rows(
        _COLLECTIVES,
        "grouped_reducescatter",
        "tensors device_dense compression op process_set prescale_factor postscale_factor",
        "gradients as of reducescatter",
        _ODD,
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
    Row(_LEFT, "broadcast_object_fn", "broadcast_object", OTHER, unsupported.ABSENT["broadcast_object_fn"]),
    Row(_LEFT, "BroadcastGlobalVariablesHook", "", REFUSED, unsupported.ABSENT["BroadcastGlobalVariablesHook"]),
    Row(_LEFT, "gpu_available", "", REFUSED, unsupported.ABSENT["gpu_available"]),
    Row(_LEFT, "tensorflow.data.compute_service", "", REFUSED, unsupported.ABSENT["data"]),
    Row(_LEFT, "LocalGradientAggregationHelper", "", REFUSED, unsupported.ABSENT["LocalGradientAggregationHelper"]),
)

ROWS = (*_LIFE_ROWS, *_RUN_ROWS, *_SET_ROWS, *_COLLECTIVE_ROWS, *_LEFT_ROWS)
