"""Nothing that the tests of jobs have started outlives them."""

from __future__ import annotations

from tests.mpi import fork_server, jobs


def pytest_sessionfinish() -> None:
    """Ends the jobs that still run when the session is stopped before its end."""
    jobs.stop()
    fork_server.stop()
