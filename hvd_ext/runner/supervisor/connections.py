"""The connections of an elastic job's workers with its supervisor: JSON lines over TCP.

`hvd_ext/job/membership.py` is the other side.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from hvd_ext.errors import InvalidError
from hvd_ext.job import membership, peers
from hvd_ext.runner import hosts as host_lists
from hvd_ext.runner.supervisor.roster import Roster, Worker

HELLO_S = 10.0
LINK_LIMIT_S = 20.0  # after which the connection of a host that does not answer breaks
LINE_NBYTES = 1 << 20


class Connections:
    """The connections with all workers.

    Args:
        roster: hears what workers say.
        spawn: runs a coroutine in a task whose error ends the job.
    """

    def __init__(self, roster: Roster, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._roster, self._spawn = roster, spawn
        self._token = secrets.token_hex(16)
        self._writers: dict[Worker, asyncio.StreamWriter] = {}
        self._addresses: list[str] = []
        self._interfaces: Sequence[str] = ()
        self._port = 0
        self._server: asyncio.Server | None = None

    async def listen(self, hosts: Collection[str] | None, interfaces: Sequence[str] | None) -> None:
        """Listen for workers.

        Args:
            hosts: where all workers will run; None if that is not known.
            interfaces: on which workers reach this host and each other; None for all.

        Raises:
            InvalidError: other hosts cannot reach this one on these interfaces.
        """
        if hosts is not None and all(host_lists.is_local(name) for name in hosts):
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            self._interfaces, self._addresses = interfaces or (), membership.own_addresses(interfaces)
            if interfaces and not self._addresses:
                raise InvalidError(
                    f"network-interfaces ({','.join(interfaces)}): they have no address here that other hosts reach"
                )
            listener = peers.listening()
        self._port = listener.getsockname()[1]
        self._server = await asyncio.start_server(
            lambda reader, writer: self._spawn(self._serve(reader, writer)), sock=listener, limit=LINE_NBYTES
        )

    def variables(self, worker: Worker) -> dict[str, str]:
        """Return the environment variables by which a worker finds the supervisor."""
        near = ["127.0.0.1"] if host_lists.is_local(worker.host.name) else []
        return {
            membership.SUPERVISOR: f"{','.join([*near, *self._addresses])}:{self._port}",
            membership.TOKEN: self._token,
            membership.WORKER: str(worker.number),
            membership.LATE: str(int(self._roster.begun)),
            membership.INTERFACES: ",".join(self._interfaces),
        }

    def send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Send a message to a worker, if it is connected."""
        if worker in self._writers:
            self._writers[worker].write((json.dumps(message) + "\n").encode())

    def disconnect(self, worker: Worker) -> None:
        """Close the connection with a worker, if there is one."""
        if (writer := self._writers.pop(worker, None)) is not None:
            writer.close()

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a connection until it ends; one that breaks the protocol is closed."""
        worker: Worker | None = None
        try:
            membership.limited(writer.get_extra_info("socket"), LINK_LIMIT_S)
            hello = await _message(reader, HELLO_S)
            worker = None if hello is None else self._known(hello)
            if hello is None or worker is None:
                return
            self._writers[worker] = writer
            # The name is the host's own, by which the workers find out who is on the same host.
            peer = {"host": str(hello.get("host")), "addresses": hello["addresses"], "port": hello["port"]}
            self._roster.connected(worker, {"worker": worker.number, **peer})
            while (message := await _message(reader)) is not None:
                self._roster.heard(worker, message)
        finally:
            writer.close()
            if worker is not None:
                self._writers.pop(worker, None)
                self._roster.disconnected(worker)

    def _known(self, hello: Mapping[str, Any]) -> Worker | None:
        """Return the worker whose hello this is; None if it is not one of this job."""
        token, number = str(hello.get("token")), str(hello.get("worker"))
        if hello.get("kind") != "hello" or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        worker = self._roster.workers.get(int(number)) if number.isdecimal() else None
        if worker is None or worker.peer or worker.ending:
            return None
        if not isinstance(hello.get("addresses"), list) or not isinstance(hello.get("port"), int):
            return None
        return worker


async def _message(reader: asyncio.StreamReader, limit_s: float | None = None) -> dict[str, Any] | None:
    """Read a message; None if the connection has ended, or what arrives is no message."""
    try:
        message = json.loads(await asyncio.wait_for(reader.readline(), limit_s))
    except (OSError, ValueError, asyncio.TimeoutError):
        return None
    return message if isinstance(message, dict) else None
