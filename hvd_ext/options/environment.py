"""One table of Horovod's environment variables: which of them are heeded here, and why the others are not.

`hvd_ext.options.from_environment` reads those that are heeded (our own variables take precedence), `hvd_ext.job.launch`
warns of the others, the doctor lists both, and the migration page is generated from the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

# Variables with these prefixes, such as HOROVOD_WITH_MPI, configure Horovod's build and have no meaning in a job.
BUILD_PREFIXES = (
    "HOROVOD_WITH_",
    "HOROVOD_WITHOUT_",
    "HOROVOD_BUILD_",
    "HOROVOD_GPU_",
    "HOROVOD_NCCL_",
    "HOROVOD_CUDA_",
)
# Constants of Horovod's C interface that look like variables.
NOT_VARIABLES = ("HOROVOD_PROCESS_SET_ERROR_",)

HEEDED, IGNORED, REFUSED, LAUNCHER = "heeded", "ignored", "refused", "launcher"


@dataclasses.dataclass(frozen=True)
class Variable:
    """One of Horovod's environment variables.

    Attributes:
        status: HEEDED (the variable fills a field of `Options`), IGNORED (a user who sets it is warned once), REFUSED
            (`init` raises), or LAUNCHER (Horovod's launchers set or read it; ignoring it loses nothing, so no one is
            warned).
        note: what the variable does here, or what to use instead, without a full stop.
        field: the field of `Options` that the variable fills; empty unless it is heeded.
        read: converts the variable's text to the field's value, or to None to leave the default; raises ValueError.
        rule: what the text must be, for the error message.
        harmless: texts with which an ignored variable asks only for what happens anyway.
    """

    name: str
    status: str
    note: str
    field: str = ""
    read: Callable[[str], Any] | None = None
    rule: str = ""
    harmless: tuple[str, ...] = ()


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _bucket(text: str) -> int:
    return max(1, _natural(text))  # in Horovod 0 means no fusion, so each tensor gets its own bucket


def _never(text: str) -> float | None:
    return 0.0 if _natural(text) > 0 else None


def _folder(text: str) -> str | None:
    return None if text == "DYNAMIC" else text.removesuffix(".json")


_OFF = ("0",)
_NUMBER = "a whole number, at least 0"


def _ignored(name: str, note: str, *harmless: str) -> Variable:
    return Variable(name, IGNORED, note, harmless=harmless)


def _of_launcher(name: str, note: str) -> Variable:
    return Variable(name, LAUNCHER, note)


# If two rows set the same field, the later one takes precedence.
VARIABLES: tuple[Variable, ...] = (
    Variable(
        "HOROVOD_FUSION_THRESHOLD",
        HEEDED,
        "HVD_EXT_BUCKET_NBYTES: approximate size in bytes of the buckets of gradients; 0: a bucket for each tensor",
        "bucket_nbytes",
        _bucket,
        f"{_NUMBER}, in bytes",
    ),
    Variable(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        HEEDED,
        "HVD_EXT_STALL_WARN_S: seconds after which a missing rank is named; 0: never",
        "stall_warn_s",
        _natural,
        f"{_NUMBER}, in seconds",
    ),
    Variable(
        "HOROVOD_STALL_CHECK_DISABLE",
        HEEDED,
        "HVD_EXT_STALL_WARN_S=0: missing ranks are not named",
        "stall_warn_s",
        _never,
        "0 or 1",
    ),
    Variable(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        HEEDED,
        "HVD_EXT_STALL_FATAL_S: seconds after which waiting for a rank fails; 0: never",
        "stall_fatal_s",
        _natural,
        f"{_NUMBER}, in seconds",
    ),
    Variable(
        "HOROVOD_TIMELINE",
        HEEDED,
        "HVD_EXT_TRACE: a folder of this name, without .json, with a trace of every rank; DYNAMIC: call start_trace",
        "trace",
        _folder,
        "a path",
    ),
    Variable("HOROVOD_ELASTIC", REFUSED, "horovodrun's elastic mode: python -m hvd_ext run has its flags"),
    Variable(
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        REFUSED,
        "horovodrun --gloo starts no MPI job: use horovodrun --mpi or mpirun",
    ),
    Variable("HOROVOD_RANK", REFUSED, "set by horovodrun --gloo, whose processes are no MPI job"),
    _ignored("HOROVOD_CYCLE_TIME", "there are no cycles: a bucket starts when its last gradient has arrived"),
    _ignored("HOROVOD_CACHE_CAPACITY", "there is no cache of responses: the order of the buckets is agreed once"),
    _ignored(
        "HOROVOD_DISABLE_GROUP_FUSION", "HVD_EXT_BUCKET_NBYTES and groups= decide which gradients share a bucket", *_OFF
    ),
    _ignored(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "the algorithm is chosen for the hosts automatically; HVD_EXT_ALGORITHM=two_level forces one",
        *_OFF,
    ),
    _ignored("HOROVOD_HIERARCHICAL_ALLGATHER", "allgather always takes the hosts into account", *_OFF),
    _ignored("HOROVOD_TORUS_ALLREDUCE", "HVD_EXT_ALGORITHM=torus2d forces this algorithm", *_OFF),
    _ignored("HOROVOD_AUTOTUNE", "nothing is tuned while training: plans are priced before the first step", *_OFF),
    _ignored("HOROVOD_AUTOTUNE_LOG", "there is no autotuning"),
    _ignored("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "there is no autotuning"),
    _ignored("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "there is no autotuning"),
    _ignored("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "there is no autotuning"),
    _ignored("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "there is no autotuning"),
    _ignored("HOROVOD_TIMELINE_MARK_CYCLES", "there are no cycles", *_OFF),
    _ignored("HOROVOD_MPI_THREADS_DISABLE", "the engine needs an MPI that several threads may use", *_OFF),
    _ignored("HOROVOD_THREAD_AFFINITY", "the engine's thread is not pinned; bind ranks with mpirun --bind-to"),
    _ignored("HOROVOD_LOG_LEVEL", 'use logging.getLogger("hvd_ext").setLevel(...)'),
    _ignored("HOROVOD_LOG_HIDE_TIME", "the format of log lines is that of Python's logging"),
    _ignored("HOROVOD_ENABLE_XLA_OPS", "XLA compiles what is around the reduction (jit_compile)", *_OFF),
    _ignored("HOROVOD_ENABLE_ASYNC_COMPLETION", "tensors of a GPU go through host memory", *_OFF),
    _ignored("HOROVOD_BATCH_D2D_MEMCOPIES", "tensors of a GPU go through host memory", *_OFF),
    _ignored("HOROVOD_NUM_NCCL_STREAMS", "there is no NCCL: tensors of a GPU go through host memory"),
    _ignored("HOROVOD_ADASUM_MPI_CHUNK_SIZE", "there is no Adasum"),
    _ignored("HOROVOD_CPU_OPERATIONS", "everything goes through MPI", "mpi", "MPI"),
    _ignored("HOROVOD_CONTROLLER", "everything goes through MPI", "mpi", "MPI"),
    _ignored("HOROVOD_GLOO_IFACE", "with Open MPI: mpirun --mca btl_tcp_if_include NAME"),
    _ignored("HOROVOD_GLOO_TIMEOUT_SECONDS", "HVD_EXT_STALL_FATAL_S limits all waiting"),
    _of_launcher("HOROVOD_DYNAMIC_PROCESS_SETS", "not needed: process sets may be added at any time"),
    _of_launcher("HOROVOD_SIZE", "read together with HOROVOD_RANK"),
    _of_launcher("HOROVOD_LOCAL_RANK", "local_rank() is found by MPI"),
    _of_launcher("HOROVOD_LOCAL_SIZE", "local_size() is found by MPI"),
    _of_launcher("HOROVOD_CROSS_RANK", "cross_rank() is found by MPI"),
    _of_launcher("HOROVOD_CROSS_SIZE", "cross_size() is found by MPI"),
    _of_launcher("HOROVOD_HOSTNAME", "hosts are found by MPI"),
    _of_launcher("HOROVOD_GLOO_RENDEZVOUS_PORT", "read together with HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    _of_launcher("HOROVOD_START_TIMEOUT", "of horovodrun itself; init() waits as HVD_EXT_STALL_FATAL_S says"),
    _of_launcher("HOROVOD_SECRET_KEY", "of horovodrun itself"),
    _of_launcher("HOROVOD_ELASTIC_TIMEOUT", "of Horovod's elastic launcher"),
    _of_launcher("HOROVOD_SPARK_PYTHONPATH", "of Horovod on Spark"),
    _of_launcher("HOROVOD_SPARK_START_TIMEOUT", "of Horovod on Spark"),
    _of_launcher("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "of Horovod on Spark"),
    _of_launcher("HOROVOD_SPARK_WORK_DIR", "of Horovod on Spark"),
)


def heeded(environ: Mapping[str, str]) -> list[str]:
    """List as "NAME=text: what it does" Horovod's variables that are set and fill a field of `Options`."""
    rows = [row for row in VARIABLES if row.status == HEEDED and environ.get(row.name)]
    return [f"{row.name}={environ[row.name]}: {row.note}" for row in rows]


def unheeded(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """List as (NAME=text, why), by name, Horovod's variables without effect; unknown ones are among them."""
    rows = {row.name: row for row in VARIABLES}
    without_effect = []
    for name, text in sorted(environ.items()):
        if not name.startswith("HOROVOD_") or not text or name.startswith(BUILD_PREFIXES):
            continue
        row = rows.get(name)
        if row is None:
            without_effect.append((f"{name}={text}", "Horovod 0.28.1 has no such variable, and hvd_ext has none"))
        elif row.status == IGNORED and text not in row.harmless:
            without_effect.append((f"{name}={text}", row.note))
    return without_effect
