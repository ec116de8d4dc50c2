"""A job of one rank, and a supervisor that the test plays."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

import hvd_ext as hvd
from hvd_ext.job import membership


class Session:
    """Stands for the connection with the supervisor; its worlds have one rank."""

    changed = waits = False
    last: str | None = None
    ends_with: str | None = None  # why the next world is the last one
    world = -1

    def join(self) -> tuple[membership.World, list[int]]:
        """Begin the next world."""
        self.changed, self.last = False, self.ends_with
        self.world += 1
        return membership.World(self.world, 0, "", (membership.Peer(0, "here", (), 0),)), []


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A job of one rank."""
    keras.utils.set_random_seed(3)
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def session(job: None, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A supervisor; the job begins before it."""
    session = Session()
    monkeypatch.setattr(membership, "session", lambda: session)
    return session
