"""Who started the process, from the environment."""

from __future__ import annotations

import pytest

from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.launch import Launch, check_size, examine
from hvd_ext.process import place_of


@pytest.mark.parametrize(
    ("environ", "mpi", "size"),
    [
        ({}, False, None),
        ({"SLURM_NTASKS": "4"}, False, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True, 4),
        ({"PMI_SIZE": "2"}, True, 2),
        ({"SLURM_STEP_NUM_TASKS": "3"}, True, 3),
        ({"PMIX_RANK": "0"}, True, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, True, 2),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_FUSION_THRESHOLD": "1"}, True, 2),
    ],
)
def test_launchers_are_known_by_their_variables(environ: dict[str, str], mpi: bool, size: int | None) -> None:
    launch = examine(environ)
    assert (launch.mpi, launch.size) == (mpi, size)


@pytest.mark.parametrize(
    "environ",
    [
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_gloo_is_refused_with_the_command_that_works(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match=r"Gloo.*horovodrun --mpi or with mpirun"):
        examine(environ)


def test_elastic_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"HOROVOD_ELASTIC=1\)"):
        examine({"HOROVOD_ELASTIC": "1", "OMPI_COMM_WORLD_SIZE": "2"})


def test_sizes_that_differ_are_refused_with_both() -> None:
    launch = examine({"OMPI_COMM_WORLD_SIZE": "4"})
    check_size(launch, 4)
    check_size(Launch(True, None, "?"), 7)
    with pytest.raises(CommunicationError, match=r"OMPI_COMM_WORLD_SIZE=4\) started 4 processes.*sees 1"):
        check_size(launch, 1)


def test_places_are_counted_per_host_as_horovod_does() -> None:
    hosts = ("a", "b", "a", "a", "b", "c")
    # rank: local_rank, local_size, cross_rank, cross_size
    assert [place_of(rank, hosts) for rank in range(6)] == [
        (0, 3, 0, 3),
        (0, 2, 1, 3),
        (1, 3, 0, 2),
        (2, 3, 0, 1),
        (1, 2, 1, 2),
        (0, 1, 2, 3),
    ]
