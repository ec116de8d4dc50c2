"""What the tests of jobs share; nothing that they have started outlives them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi import fork_server, jobs


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: the sockets of Open MPI have paths of 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="hx") as name:
        yield Path(name)


def pytest_sessionfinish() -> None:
    """Ends the jobs that still run when the session is stopped before its end."""
    jobs.stop()
    fork_server.stop()
