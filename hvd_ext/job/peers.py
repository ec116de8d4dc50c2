"""The connections of a world: one TCP connection for each pair of its workers.

The worker of the higher rank calls the worker of the lower rank. The caller sends a line "token world rank worker" with
its own rank and the called worker's number, the called worker answers "ok", and the caller confirms with "ok". A
connection that the caller has given up is never confirmed, so both sides always hold the same connection. A worker
calls all lower ranks at the same time, and meanwhile accepts the calls of the higher ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

CONNECT_S = 3.0  # for one address; the answer of a worker that is busy may take longer
HELLO_S = 5.0  # for the words of a caller, all of them together
JOIN_S = 30.0  # for all connections of a world
_LOOK_S = 0.1
_LINE_NBYTES = 256
_OK = b"ok\n"
_NEAR = ("127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class Peer:
    """A worker as the others see it.

    Args:
        worker: its number, which no other worker of the job gets.
        host: the name of its host.
        addresses: of its host, in which it listens.
        port: where it listens.
    """

    worker: int
    host: str
    addresses: tuple[str, ...]
    port: int


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of a job until the next change.

    Args:
        number: 0, 1, ...
        rank: this worker's.
        token: proves to the others that a connection comes from this world.
        peers: by rank.
        last: why the job ends after this world, in which the workers only save what they have; None in others.
    """

    number: int
    rank: int
    token: str
    peers: tuple[Peer, ...]
    last: str | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """A peer with which no connection was made.

    Args:
        worker: its number.
        tried: each address with its error, in words.
    """

    worker: int
    tried: str


class LostError(OSError):
    """A worker of the world is gone."""


class UnreachableError(OSError):
    """Connections with some peers were not made.

    Args:
        failures: these peers.
    """

    def __init__(self, failures: Collection[Failure]) -> None:
        super().__init__("; ".join(f"worker {failure.worker}: {failure.tried}" for failure in failures))
        self.failures = tuple(failures)


def listening(port: int = 0) -> socket.socket:
    """Listen on all addresses of this host, IPv6 and IPv4."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6 here
        return socket.create_server(("", port), backlog=128)


def connected(world: World, listener: socket.socket, lost: Collection[int]) -> dict[int, socket.socket]:
    """Make the connections of a world.

    Args:
        listener: where this worker listens.
        lost: the numbers of workers that are gone; another thread may add to them.

    Returns:
        The connections by rank, without this rank.

    Raises:
        LostError: a worker of the world is gone.
        UnreachableError: a peer cannot be reached, or has not called within `JOIN_S`.
    """
    limit_s = time.monotonic() + JOIN_S
    made: dict[int, socket.socket] = {}
    failures: list[Failure] = []
    with _Calls(world, limit_s) as calls:
        try:
            while len(made) < len(world.peers) - 1:
                for rank, peer in enumerate(world.peers):
                    if peer.worker in lost:
                        raise LostError(f"rank {rank} is gone")
                missing = [rank for rank in range(world.rank + 1, len(world.peers)) if rank not in made]
                for rank, outcome in calls.ended(wait_s=0.0 if missing else _LOOK_S):
                    if isinstance(outcome, Failure):
                        failures.append(outcome)
                    else:
                        made[rank] = outcome
                if failures and not calls.under_way:
                    raise UnreachableError(failures)
                if missing and time.monotonic() >= limit_s:
                    raise UnreachableError(
                        [Failure(world.peers[rank].worker, f"it has not called for {JOIN_S:g} s") for rank in missing]
                    )
                if missing and (call := _accepted(world, listener)) is not None:
                    rank, connection = call
                    if rank in made:
                        made[rank].close()
                    made[rank] = connection
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
    return made


class _Calls:
    """The calls of a worker to all lower ranks, each in a thread; what is not fetched is closed at the end."""

    def __init__(self, world: World, limit_s: float) -> None:
        self._ended: queue.SimpleQueue[tuple[int, socket.socket | Failure]] = queue.SimpleQueue()
        self._lock, self._stopped = threading.Lock(), False
        self.under_way = world.rank
        for rank in range(world.rank):
            threading.Thread(target=self._call, args=(world, rank, limit_s), name="hvd_ext call", daemon=True).start()

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._stopped = True
            while not self._ended.empty():
                _, outcome = self._ended.get()
                if isinstance(outcome, socket.socket):
                    outcome.close()

    def ended(self, wait_s: float) -> Iterator[tuple[int, socket.socket | Failure]]:
        """Yield the rank and the result of each call that has ended; wait for the first one."""
        with contextlib.suppress(queue.Empty):
            outcome = self._ended.get(timeout=wait_s) if wait_s else self._ended.get_nowait()
            while True:
                self.under_way -= 1
                yield outcome
                outcome = self._ended.get_nowait()

    def _call(self, world: World, rank: int, limit_s: float) -> None:
        outcome = _called(world, rank, limit_s, lambda: self._stopped)
        with self._lock:
            if not self._stopped:
                self._ended.put((rank, outcome))
            elif isinstance(outcome, socket.socket):
                outcome.close()


def _called(world: World, rank: int, limit_s: float, stopped: Callable[[], bool]) -> socket.socket | Failure:
    """Call a rank on one of its addresses; each gets an equal share of the time that is left."""
    peer = world.peers[rank]
    hello = f"{world.token} {world.number} {world.rank} {peer.worker}\n".encode()
    addresses = [*(_NEAR if peer.host == platform.node() else ()), *peer.addresses]
    tried = []
    for index, address in enumerate(addresses):
        now_s = time.monotonic()
        share_s = max(0.0, limit_s - now_s) / (len(addresses) - index)
        with contextlib.ExitStack() as failed:
            try:
                connection = socket.create_connection((address, peer.port), min(CONNECT_S, share_s) or _LOOK_S)
                failed.enter_context(connection)
                connection.sendall(hello)
                if _line(connection, now_s + share_s, stopped) != _OK:
                    raise OSError("another program answers there")
                connection.sendall(_OK)
                failed.pop_all()
                return connection
            except OSError as error:
                tried.append(f"{address} port {peer.port} ({error.strerror or error})")
        if stopped():
            break
    return Failure(peer.worker, ", ".join(tried) or "it has published no address")


def _accepted(world: World, listener: socket.socket) -> tuple[int, socket.socket] | None:
    """Accept the call of a higher rank; None if no rank of this world calls for a moment."""
    listener.settimeout(_LOOK_S)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return None
    except OSError:  # the caller has given up, or this process has no descriptors left
        time.sleep(_LOOK_S)
        return None
    limit_s = time.monotonic() + HELLO_S
    with contextlib.ExitStack() as failed, contextlib.suppress(OSError, ValueError):
        failed.enter_context(connection)
        token, number, rank, worker = _line(connection, limit_s).decode().split()
        known = hmac.compare_digest(token.encode(), world.token.encode()) and int(number) == world.number
        if known and int(worker) == world.peers[world.rank].worker and world.rank < int(rank) < len(world.peers):
            connection.sendall(_OK)
            if _line(connection, limit_s) == _OK:
                failed.pop_all()
                return int(rank), connection
    return None


def _line(connection: socket.socket, limit_s: float, stopped: Callable[[], bool] = lambda: False) -> bytes:
    """Read a line until a time of the monotonic clock, and not a byte of what follows it."""
    line = b""
    while not line.endswith(b"\n"):
        left_s = limit_s - time.monotonic()
        if left_s <= 0 or stopped():
            raise TimeoutError("it has connected and not answered")
        connection.settimeout(min(left_s, _LOOK_S))
        with contextlib.suppress(TimeoutError):
            byte = connection.recv(1)
            if not byte or len(line) >= _LINE_NBYTES:
                raise OSError("it has closed the connection")
            line += byte
    return line
