"""A worker's connection with its supervisor, which the test plays, and with the other workers of a world."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job import membership
from hvd_ext.job.membership import Session
from tests.waiting import until


class Supervisor:
    """Accepts workers, and says what it is told to."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.connections: dict[int, socket.socket] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        self.heard: list[tuple[int, dict[str, Any]]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        worker = -1
        with connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "hello":
                    worker = message["worker"]
                    self.hellos[worker], self.connections[worker] = message, connection
                self.heard.append((worker, message))

    def environ(self, worker: int) -> dict[str, str]:
        """Gives what a worker finds in its environment."""
        return {
            membership.SUPERVISOR: f"127.0.0.1:{self.server.getsockname()[1]}",
            membership.TOKEN: "token",
            membership.WORKER: str(worker),
        }

    def session(self, worker: int) -> Session:
        """Starts a worker, which has said hello then."""
        session = Session(self.environ(worker))
        until(lambda: worker in self.hellos)
        return session

    def say(self, to: int, /, **message: Any) -> None:
        """Sends a message."""
        self.connections[to].sendall(json.dumps(message).encode() + b"\n")

    def world(self, number: int, workers: list[int], left_out: tuple[int, ...] = ()) -> None:
        """Tells workers of a world, when all of them are ready."""
        until(lambda: all((one, {"kind": "ready", "world": number - 1}) in self.heard for one in workers))
        names = ("worker", "host", "addresses", "port")
        peers = [{name: self.hellos[worker][name] for name in names} for worker in workers]
        for rank, worker in enumerate(workers):
            if worker not in left_out:
                self.say(worker, kind="world", number=number, token="same", rank=rank, peers=peers)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.server.close()


class Joining(threading.Thread):
    """A worker that joins the next world."""

    def __init__(self, session: Session) -> None:
        super().__init__(daemon=True)
        self.session, self.result, self.error = session, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.session.join()
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        """Waits for the end."""
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def test_the_workers_of_a_world_are_connected_in_pairs(supervisor):
    sessions = [supervisor.session(worker) for worker in (4, 7, 9)]
    joining = [Joining(session) for session in sessions]
    supervisor.world(0, [7, 4, 9])
    by_rank = {}
    for one in joining:
        world, sockets = one.ended()
        assert (world.number, len(world.peers), sockets[world.rank]) == (0, 3, -1)
        by_rank[world.rank] = sockets
    for rank, sockets in by_rank.items():
        for peer, descriptor in enumerate(sockets):
            if peer != rank:
                os.write(descriptor, f"{rank}".encode())
    for rank, sockets in by_rank.items():
        for peer, descriptor in enumerate(sockets):
            if peer != rank:
                until(lambda d=descriptor: select_readable(d))
                assert os.read(descriptor, 10) == f"{peer}".encode()
                os.close(descriptor)


def select_readable(descriptor: int) -> bool:
    """Tells whether something has come."""
    import select

    return bool(select.select([descriptor], [], [], 0)[0])


def test_who_does_not_know_the_token_of_the_world_is_not_connected(supervisor):
    sessions = [supervisor.session(worker) for worker in (1, 2)]
    first = Joining(sessions[0])
    Joining(sessions[1])
    supervisor.world(0, [1, 2], left_out=(2,))
    with socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"])) as stranger:
        stranger.sendall(b"wrong 0 1 1\n")
        assert stranger.recv(10) == b""
    with socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"])) as stranger:
        stranger.sendall(b"no line of four words\n")
        assert stranger.recv(10) == b""
    assert first.is_alive()
    supervisor.say(1, kind="lost", worker=2)
    until(lambda: (1, {"kind": "ready", "world": 0}) in supervisor.heard)  # it asks for the next world
    supervisor.say(1, kind="end", why="the test", code=3)
    with pytest.raises(SystemExit, match="3"):
        first.ended()


def test_a_worker_that_is_told_to_end_while_it_waits_ends_with_the_code(supervisor):
    waiting = Joining(supervisor.session(1))
    until(lambda: (1, {"kind": "ready", "world": -1}) in supervisor.heard)
    supervisor.say(1, kind="end", why="nobody needs it", code=0)
    with pytest.raises(SystemExit, match="0"):
        waiting.ended()


def test_a_worker_without_a_supervisor_says_so(supervisor):
    session = supervisor.session(1)
    waiting = Joining(session)
    until(lambda: (1, {"kind": "ready", "world": -1}) in supervisor.heard)
    supervisor.connections[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(CommunicationError, match="the supervisor is gone, and with it the job"):
        waiting.ended()
    environ = supervisor.environ(2)
    supervisor.server.close()
    with pytest.raises(CommunicationError, match="cannot be reached from this host"):
        Session({**environ, membership.SUPERVISOR: "127.0.0.1:9"})


def test_news_of_a_change_ends_with_the_world(supervisor):
    session = supervisor.session(1)
    supervisor.say(1, kind="changed", why="new workers wait")
    until(lambda: session.changed)
    joining = Joining(session)
    supervisor.world(0, [1])
    assert joining.ended()[1] == [-1]
    assert not session.changed


@pytest.mark.parametrize("text", ["0", "-1", "soon"])
def test_the_limit_of_a_silent_link_is_a_number_above_0(supervisor, text):
    with pytest.raises(InvalidError, match=r"HVD_EXT_LINK_LIMIT_S \('.*'\): must be a number of seconds above 0"):
        Session({**supervisor.environ(1), membership.LINK_LIMIT: text})


def test_without_a_supervisor_there_is_no_session(monkeypatch):
    monkeypatch.delenv(membership.SUPERVISOR, raising=False)
    assert membership.session() is None
