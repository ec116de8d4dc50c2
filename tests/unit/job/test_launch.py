"""Who started the process, from the environment."""

from __future__ import annotations

import pytest

from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job.launch import Launch, check_size, examine, warn_of_unheeded, warn_of_unread
from hvd_ext.job.process import place_of
from hvd_ext.options import Options

SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "mpi", "size"),
    [
        ({}, False, None),
        ({"SLURM_NTASKS": "4"}, False, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True, 4),
        ({"PMI_SIZE": "2"}, True, 2),
        ({"SLURM_STEP_NUM_TASKS": "3"}, True, 3),
        ({"PMIX_RANK": "0"}, True, None),
        # srun --mpi=pmix, srun --mpi=pmi2, srun without an interface for MPI, and mpirun inside an allocation
        ({**SRUN, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, True, 4),
        ({**SRUN, "PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "5"}, True, 4),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, True, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "8"}, True, 8),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, False, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, True, 2),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_FUSION_THRESHOLD": "1"}, True, 2),
    ],
)
def test_launchers_are_known_by_their_variables(environ: dict[str, str], mpi: bool, size: int | None) -> None:
    launch = examine(environ)
    assert (launch.mpi, launch.size) == (mpi, size)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, r"Gloo.*horovodrun --mpi or with mpirun"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, r"Gloo.*horovodrun --mpi or with mpirun"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "1"}, r"Gloo.*horovodrun --mpi or with"),
        ({"HOROVOD_ELASTIC": "1", "OMPI_COMM_WORLD_SIZE": "2"}, r"HOROVOD_ELASTIC=1\)"),
    ],
)
def test_gloo_and_elastic_jobs_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        examine(environ)


def test_sizes_that_differ_are_refused_with_both_and_under_srun_with_its_option() -> None:
    launch = examine({"OMPI_COMM_WORLD_SIZE": "4"})
    check_size(launch, 4)
    check_size(Launch(True, None, "?"), 7)
    with pytest.raises(CommunicationError, match=r"OMPI_COMM_WORLD_SIZE=4\) started 4 processes.*sees 1"):
        check_size(launch, 1)
    launch = examine({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    with pytest.raises(CommunicationError, match=r"SLURM_STEP_NUM_TASKS=4\) started 4.*sees 1.*srun --mpi=pmix"):
        check_size(launch, 1)


def test_variables_without_effect_are_said_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"HOROVOD_CYCLE_TIME": "17.5", "HOROVOD_FUSION_THRESHOLD": "8", "HOROVOD_WITH_MPI": "1"}
    warn_of_unheeded(environ, 1)
    assert caplog.messages == []
    warn_of_unheeded(environ, 0)
    warn_of_unheeded(environ, 0)
    assert len(caplog.messages) == 1
    assert "HOROVOD_CYCLE_TIME=17.5 has no effect in hvd_ext: there are no cycles" in caplog.messages[0]


def test_rank_0_warns_of_variables_that_given_options_leave_out(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"HVD_EXT_TRACE": "t", "HVD_EXT_ALGORITHM": "ring"}
    warn_of_unread(Options(), environ, 1)
    warn_of_unread(Options(algorithm="tree", trace="u"), environ, 0)
    assert caplog.messages == []
    warn_of_unread(Options(), environ, 0)
    (message,) = caplog.messages
    assert "does not read HVD_EXT_ALGORITHM, HVD_EXT_TRACE; hvd_ext.options.from_environment()" in message


def test_places_are_counted_per_host_as_horovod_does() -> None:
    hosts = ("a", "b", "a", "a", "b", "c")
    # rank: local_rank, local_size, cross_rank, cross_size
    places = [(0, 3, 0, 3), (0, 2, 1, 3), (1, 3, 0, 2), (2, 3, 0, 1), (1, 2, 1, 2), (0, 1, 2, 3)]
    assert [place_of(rank, hosts) for rank in range(6)] == places
