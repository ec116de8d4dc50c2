"""Who started this process: read from the environment, without MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvd_ext import options
from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job.log import logger
from hvd_ext.options import environment

_logged: set[str] = set()  # what this process has been warned of

# variable with the number of ranks -> who sets it
_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec, or another one that speaks PMI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH2's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
# variables that show that a launcher has started an MPI job, but not with how many ranks
_MARKS = ("PMIX_RANK", "PMI_RANK", "PMI_FD")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process was started.

    Args:
        mpi: whether a launcher of MPI jobs has started it.
        size: the number of ranks according to the launcher, or None if it does not say.
        by: the launcher in words, with the variable that revealed it.
    """

    mpi: bool
    size: int | None
    by: str


def examine(environ: Mapping[str, str]) -> Launch:
    """Find out how the process was started.

    Returns:
        The launch; without a launcher `mpi` is false and the job has one rank.

    Raises:
        InvalidError: Horovod's elastic mode, or `horovodrun` with Gloo instead of MPI. Their ranks form no MPI job, and
            without this check each of them would train alone.
    """
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise InvalidError(
            "launcher (HOROVOD_ELASTIC=1): horovodrun runs elastic jobs with Gloo; start them with python -m hvd_ext "
            "run, which takes the same flags"
        )
    launch = _mpi_launch(environ)
    size = environ.get("HOROVOD_SIZE", "")
    gloo = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ or "HOROVOD_RANK" in environ
    if gloo and not (launch.mpi and size in ("", str(launch.size))):
        raise InvalidError(
            f"launcher (horovodrun with Gloo, HOROVOD_RANK={environ.get('HOROVOD_RANK', '')} of HOROVOD_SIZE={size}): "
            "hvd_ext runs on MPI, and these processes are no MPI job; start them with horovodrun --mpi or with mpirun"
        )
    return launch


def check_size(launch: Launch, size: int) -> None:
    """Raise `CommunicationError` unless MPI has as many ranks as the launcher started: it may be another MPI's."""
    if launch.size is not None and launch.size != size:
        if launch.by.startswith("srun"):
            raise CommunicationError(
                f"launcher ({launch.by}) started {launch.size} processes, but MPI sees {size}: srun starts MPI jobs "
                "only with the interface that the MPI of the build speaks; use srun --mpi=pmix (Open MPI) or "
                "srun --mpi=pmi2 (MPICH); srun --mpi=list names what there is"
            )
        raise CommunicationError(
            f"launcher ({launch.by}) started {launch.size} processes, but the MPI that hvd_ext was built with sees "
            f"{size}: they are of different MPIs; use the mpirun that belongs to the MPI of the build (python -m "
            "hvd_ext doctor names both), or build again: python -m hvd_ext build"
        )


def warn_of_unheeded(environ: Mapping[str, str], rank: int) -> None:
    """Warn of Horovod's variables that have no effect here; only rank 0 does, once for each variable and process."""
    for setting, why in environment.unheeded(environ) if rank == 0 else ():
        if setting not in _logged:
            _logged.add(setting)
            logger.warning("environment variable %s has no effect in hvd_ext: %s", setting, why)


def warn_of_unread(settings: options.Options, environ: Mapping[str, str], rank: int) -> None:
    """Warn on rank 0 of variables that are not read because `init` was given `Options`."""
    names = options.unread(settings, environ) if rank == 0 else []
    if names:
        logger.warning(
            "init was given Options, so it does not read %s; hvd_ext.options.from_environment().replace(...) gives the "
            "options of the environment with changes",
            ", ".join(names),
        )


def _mpi_launch(environ: Mapping[str, str]) -> Launch:
    for variable, launcher in _SIZES.items():
        text = environ.get(variable, "")
        if text.isdigit():
            return Launch(True, int(text), f"{launcher}, {variable}={text}")
    for variable in _MARKS:
        if variable in environ:
            return Launch(True, None, f"a launcher that sets {variable}")
    return Launch(False, None, "none")
