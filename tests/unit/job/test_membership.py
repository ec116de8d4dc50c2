"""A worker's connection with its supervisor, which the test plays, and with the other workers of a world."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job import membership, peers
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

    def session(self, worker: int, **environ: str) -> Session:
        """Starts a worker, which has said hello then."""
        session = Session({**self.environ(worker), **environ})
        until(lambda: worker in self.hellos)
        return session

    def say(self, to: int, /, **message: Any) -> None:
        """Sends a message."""
        self.connections[to].sendall(json.dumps(message).encode() + b"\n")

    def world(self, number: int, workers: list[int], left_out: tuple[int, ...] = (), **others: Any) -> None:
        """Tells workers of a world, when all of them are ready; others: of a peer, or of the message."""
        until(lambda: all((one, {"kind": "ready", "world": number - 1}) in self.heard for one in workers))
        names = ("worker", "host", "addresses", "port")
        of_peer = {name: others.pop(name) for name in names if name in others}
        peers = [{**{name: self.hellos[worker][name] for name in names}, **of_peer} for worker in workers]
        for rank, worker in enumerate(workers):
            if worker not in left_out:
                self.say(worker, kind="world", number=number, token="same", rank=rank, peers=peers, **others)


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
    for words in (b"no line of four words\n", "é 0 1 1\n".encode(), b"x" * 300):
        with socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"])) as stranger:
            stranger.sendall(words)
            with suppress(ConnectionResetError):
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


def heard(supervisor: Supervisor, kind: str) -> list[dict[str, Any]]:
    """Gives what workers have said of a kind."""
    return [message for _, message in supervisor.heard if message["kind"] == kind]


def test_a_worker_says_which_peers_it_cannot_reach_and_asks_for_the_next_world(supervisor):
    session = supervisor.session(3)
    for worker, addresses in ((1, ["127.0.0.1"]), (2, [])):
        supervisor.hellos[worker] = {"worker": worker, "host": "far", "addresses": addresses, "port": 9}
        supervisor.heard.append((worker, {"kind": "ready", "world": -1}))
    joining = Joining(session)
    supervisor.world(0, [1, 2, 3], left_out=(1, 2))
    until(lambda: (3, {"kind": "ready", "world": 0}) in supervisor.heard)
    reports = sorted(heard(supervisor, "unreachable"), key=lambda report: report["peer"])
    assert [(report["world"], report["peer"]) for report in reports] == [(0, 1), (0, 2)]
    assert reports[0]["tried"] == "127.0.0.1 port 9 (Connection refused)"
    assert reports[1]["tried"] == "it has published no address"
    assert heard(supervisor, "joined") == []
    supervisor.say(3, kind="end", why="the test", code=1)
    with pytest.raises(SystemExit):
        joining.ended()


def test_a_worker_says_which_peers_have_not_called(supervisor, monkeypatch):
    monkeypatch.setattr(peers, "JOIN_S", 0.3)
    sessions = [supervisor.session(worker) for worker in (1, 2)]
    Joining(sessions[0]), Joining(sessions[1])
    supervisor.world(0, [1, 2], left_out=(2,))
    until(lambda: heard(supervisor, "unreachable"))
    assert heard(supervisor, "unreachable") == [
        {"kind": "unreachable", "world": 0, "peer": 2, "tried": "it has not called for 0.3 s"}
    ]


def test_a_peer_that_is_busy_may_answer_later_than_it_is_reached(supervisor, monkeypatch):
    monkeypatch.setattr(peers, "CONNECT_S", 0.1)
    session = supervisor.session(2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        supervisor.hellos[1] = {"worker": 1, "host": "far", "addresses": ["127.0.0.1"], "port": port}
        supervisor.heard.append((1, {"kind": "ready", "world": -1}))
        joining = Joining(session)
        supervisor.world(0, [1, 2], left_out=(1,))
        connection, _ = busy.accept()
        with connection:
            assert connection.recv(100) == b"same 0 1 1\n"
            time.sleep(0.5)
            connection.sendall(b"ok\n")
            assert connection.recv(100) == b"ok\n"
            world, sockets = joining.ended()
    assert (world.rank, sockets[1]) == (1, -1)
    os.close(sockets[0])
    until(lambda: heard(supervisor, "joined") == [{"kind": "joined", "world": 0}])


def test_workers_meet_where_addresses_are_of_ipv6(supervisor):
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    joining = [Joining(supervisor.session(worker)) for worker in (1, 2)]
    supervisor.world(0, [1, 2], host="far", addresses=["::1"])
    for one in joining:
        world, sockets = one.ended()
        os.close(sockets[1 - world.rank])


def called(supervisor: Supervisor) -> socket.socket:
    """Calls worker 1 as rank 1 of world 0, and confirms."""
    call = socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"]))
    call.sendall(b"same 0 1 1\n")
    assert call.recv(10) == b"ok\n"
    call.sendall(b"ok\n")
    return call


def test_a_slow_caller_and_one_that_has_given_up_hold_up_no_join(supervisor, monkeypatch):
    monkeypatch.setattr(peers, "HELLO_S", 0.5)
    monkeypatch.setattr(peers, "JOIN_S", 10.0)
    first, _ = Joining(supervisor.session(1)), Joining(supervisor.session(2))
    supervisor.world(0, [1, 2], left_out=(2,))
    ended = threading.Event()
    slow = socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"]))

    def slowly() -> None:
        with slow, suppress(OSError):
            while not ended.wait(0.05):
                slow.sendall(b"x")

    thread = threading.Thread(target=slowly, daemon=True)
    thread.start()
    with socket.create_connection(("127.0.0.1", supervisor.hellos[1]["port"])) as given_up:
        given_up.sendall(b"same 0 1 1\n")
    with called(supervisor) as call:
        _, sockets = first.ended()
        os.write(sockets[1], b"the one that counts")
        assert call.recv(100) == b"the one that counts"
    os.close(sockets[1])
    ended.set()
    thread.join()


def test_a_connection_that_another_one_replaces_is_closed(supervisor):
    joining = [Joining(supervisor.session(worker)) for worker in (1, 2, 3)]
    supervisor.world(0, [1, 2, 3], left_out=(2, 3))
    with called(supervisor) as older, called(supervisor):
        older.settimeout(10)
        assert older.recv(10) == b""
    supervisor.say(1, kind="lost", worker=3)
    until(lambda: (1, {"kind": "ready", "world": 0}) in supervisor.heard)
    assert heard(supervisor, "unreachable") == []  # a worker that is gone is no peer that cannot be reached
    supervisor.say(1, kind="end", why="the test", code=1)
    with pytest.raises(SystemExit):
        joining[0].ended()


def test_a_worker_knows_that_its_world_is_the_last(supervisor):
    session = supervisor.session(1)
    assert session.last is None
    joining = Joining(session)
    supervisor.world(0, [1], last="too few workers")
    assert joining.ended()[0].last == session.last == "too few workers"
    joining = Joining(session)
    supervisor.world(1, [1])
    assert joining.ended()[0].last is session.last is None


def test_a_worker_publishes_the_addresses_of_the_named_interfaces(supervisor):
    supervisor.session(1, HVD_EXT_WORKER_INTERFACES="lo")
    assert supervisor.hellos[1]["addresses"] == []
    assert membership.INTERFACES == "HVD_EXT_WORKER_INTERFACES"
    with pytest.raises(InvalidError, match=r"network-interfaces \(no0,no1\): the host .* has none of them; it .*lo"):
        supervisor.session(2, HVD_EXT_WORKER_INTERFACES="no0,no1")
