"""The place of this process in a job whose ranks may change: `python -m hvd_ext run` supervises such jobs.

The job is a sequence of worlds. A world has some processes, the workers, as its ranks 0, 1, ...; the supervisor
(`hvd_ext.runner.supervisor`) alone decides who they are. A worker that leaves a world, because another one is gone or
because others wait to join, asks for the next one. It speaks with the supervisor over one connection, in lines of JSON.
The engine runs without MPI, on the connections of the world (`hvd_ext/job/peers.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import psutil

from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job import log, peers
from hvd_ext.job.peers import Peer, World

SUPERVISOR, TOKEN, WORKER = "HVD_EXT_SUPERVISOR", "HVD_EXT_SUPERVISOR_TOKEN", "HVD_EXT_WORKER"
LATE = "HVD_EXT_WORKER_LATE"  # "1" for a worker that is started when others train already
INTERFACES = "HVD_EXT_WORKER_INTERFACES"  # names with commas; empty for all of the worker's host
LINK_LIMIT = "HVD_EXT_LINK_LIMIT_S"
LINK_LIMIT_S = 10.0


class Session:
    """This worker's connection with the supervisor, from its first `init` to its end.

    Attributes:
        worker: the number of this worker.
        world: that of the last `join`; -1 before.
        last: why the world of the last `join` is the last one of the job, in which a worker saves what it has and ends
            with status 1; None in other worlds.
        waits: whether this worker was started when others trained already, and has not joined them yet: it is the only
            rank of a job of its own, in which it may prepare itself.

    Args:
        environ: has what the supervisor has set.

    Raises:
        CommunicationError: the supervisor cannot be reached.
        InvalidError: a limit is no number, or this host has none of the network interfaces.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.worker, self.world = int(environ[WORKER]), -1
        self.last: str | None = None
        self.waits = environ.get(LATE, "") == "1"
        self._limit_s = _limit_s(environ)
        interfaces = environ.get(INTERFACES)
        own = own_addresses(interfaces.split(",") if interfaces else None)
        self._listening = peers.listening()
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._lost: set[int] = set()  # workers that are gone, as the supervisor says
        self._waits = threading.Event()  # the main thread waits for a world, and hears of the end there
        self._is_done = False
        self._lock = threading.Lock()
        addresses, _, port = environ[SUPERVISOR].rpartition(":")
        self._supervisor = _connected(addresses.split(","), int(port), self._limit_s)
        if self._supervisor is None:
            raise CommunicationError(
                f"init: the supervisor ({environ[SUPERVISOR]}) cannot be reached from this host: it must be allowed to "
                "connect to that port"
            )
        self._say(
            "hello",
            token=environ[TOKEN],
            worker=self.worker,
            host=platform.node(),
            pid=os.getpid(),
            addresses=own,
            port=self._listening.getsockname()[1],
        )
        threading.Thread(target=self._hear, name="hvd_ext membership", daemon=True).start()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    @property
    def changed(self) -> bool:
        """Whether the ranks are to leave their world at the next commit; ranks hear of it at different times."""
        return self._changed.is_set()

    def join(self) -> tuple[World, list[int]]:
        """Wait for the next world, and connect with all its ranks.

        Returns:
            The world, and the descriptor of a connection with each rank, -1 for this one; the caller closes them.

        Raises:
            SystemExit: the supervisor has told this worker to end.
            CommunicationError: the supervisor is gone.
        """
        while True:
            self._waits.set()
            self._say("ready", world=self.world)
            message = self._messages.get()
            if message["kind"] == "end":
                end(str(message["why"]), int(message.get("code", 1)))
            if message["kind"] == "gone":
                raise CommunicationError(message["why"])
            self._waits.clear()
            world = _world(message)
            self.world, self.last = world.number, world.last
            try:
                connections = peers.connected(world, self._listening, self._lost)
            except OSError as error:
                log.logger.warning("world %d does not come about: %s", world.number, error)
                for failure in error.failures if isinstance(error, peers.UnreachableError) else ():
                    self._say("unreachable", world=world.number, peer=failure.worker, tried=failure.tried)
                continue
            self._say("joined", world=world.number)
            descriptors = [-1] * len(world.peers)
            for rank, connection in connections.items():
                limited(connection, self._limit_s)
                connection.setblocking(False)
                descriptors[rank] = connection.detach()
            return world, descriptors

    def done(self) -> None:
        """Tell the supervisor that the program has ended in order."""
        self._is_done = True
        with contextlib.suppress(OSError):
            self._say("done")

    def _say(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        assert self._supervisor is not None
        with self._lock, contextlib.suppress(OSError):  # if it is gone, `_hear` finds out
            self._supervisor.sendall(line)

    def _hear(self) -> None:
        """Read what the supervisor says, until one of both ends; a thread of its own runs this."""
        assert self._supervisor is not None
        with contextlib.suppress(OSError, ValueError), self._supervisor.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                kind = message.get("kind")
                if kind == "changed":
                    self._changed.set()
                elif kind == "lost":
                    self._lost.add(int(message["worker"]))
                elif kind == "end" and not self._waits.is_set():
                    self._end(str(message["why"]))
                else:
                    if kind == "world":
                        self._lost.clear()
                        self._changed.clear()
                    self._messages.put(message)
        why = "the supervisor is gone, and with it the job"
        if self._waits.is_set():
            self._messages.put({"kind": "gone", "why": why})
        elif not self._is_done:
            self._end(why)

    @staticmethod
    def _end(why: str) -> None:
        """End this worker from another thread than the main one."""
        _say_end(why)
        sys.stdout.flush()
        os._exit(1)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second signal ends this process
        threading.Thread(target=self._say, args=("leaving",), kwargs={"why": "SIGTERM"}, daemon=True).start()


def own_addresses(interfaces: Sequence[str] | None = None) -> list[str]:
    """Return the addresses of this host that others may reach, of all its interfaces or of some.

    Raises:
        InvalidError: this host has none of the interfaces.
    """
    here = psutil.net_if_addrs()
    if interfaces is not None and not set(interfaces) & set(here):
        raise InvalidError(
            f"network-interfaces ({','.join(interfaces)}): the host {platform.node()} has none of them; it has "
            f"{', '.join(sorted(here))}"
        )
    found = []
    for name, entries in here.items():
        if interfaces is not None and name not in interfaces:
            continue
        for entry in entries:
            loopback = entry.address.startswith("127.") or entry.address == "::1"
            internet = entry.family in (socket.AF_INET, socket.AF_INET6)
            if internet and not loopback and not entry.address.startswith("fe80"):
                found.append(entry.address)
    return found


def limited(connection: Any, limit_s: float) -> None:
    """Make a connection, a socket or asyncio's, fail when the other side has been silent for so many seconds."""
    probe_s = max(1, int(limit_s / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": 3}
    options |= {"TCP_USER_TIMEOUT": int(limit_s * 1000), "TCP_NODELAY": 1}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def session() -> Session | None:
    """Return this process's session, which begins with the first call; None unless a supervisor has started it."""
    global _session
    if _session is None and SUPERVISOR in os.environ:
        _session = Session(os.environ)
    return _session


_session: Session | None = None


def last() -> str | None:
    """Return why the world of this worker is the last one of its job (`Session.last`); None if it is not."""
    running = session()
    return None if running is None else running.last


def end(why: str, code: int = 1) -> NoReturn:
    """End this worker with an exit status, and say why.

    Raises:
        SystemExit: always.
    """
    _say_end(why)
    sys.exit(code)


def _say_end(why: str) -> None:
    log.write(log.line(f"this worker ends: {why}"))


def _limit_s(environ: Mapping[str, str]) -> float:
    text = environ.get(LINK_LIMIT, "")
    try:
        limit_s = float(text or LINK_LIMIT_S)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise InvalidError(f"{LINK_LIMIT} ({text!r}): must be a number of seconds above 0")
    return limit_s


def _connected(addresses: Sequence[str], port: int, limit_s: float) -> socket.socket | None:
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), peers.CONNECT_S)
            connection.settimeout(None)
            limited(connection, limit_s)
            return connection
    return None


def _world(message: Mapping[str, Any]) -> World:
    ranked = [
        Peer(int(one["worker"]), one["host"], tuple(one["addresses"]), int(one["port"])) for one in message["peers"]
    ]
    last = None if message.get("last") is None else str(message["last"])
    return World(int(message["number"]), int(message["rank"]), message["token"], tuple(ranked), last)
