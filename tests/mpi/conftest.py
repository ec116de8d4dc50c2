"""Nothing that the tests of jobs have started outlives them."""

from __future__ import annotations

from tests.mpi import several


def pytest_sessionfinish() -> None:
    """Ends the jobs that still run when the session is stopped before its end."""
    several.stop()
