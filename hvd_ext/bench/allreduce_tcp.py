"""The yardstick `tcp`: the bytes that an allreduce must carry between hosts, over plain sockets, and nothing else.

With n bytes on H hosts each host's link carries at least 2 (H - 1) / H * n bytes in each direction
(hvd_ext/planning/cost/bounds.py). The hosts stand in a ring. The first rank of each host sends these bytes to the
next host and receives as many from the host before it, both at once, over two connections and in one thread. Nothing is
added up, and the kernel's copies into and out of the sockets are the only ones. The other ranks do nothing.
"""

from __future__ import annotations

import ipaddress
import secrets
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil
from numpy.typing import NDArray

from hvd_ext.errors import HvdExtError

CONNECT_S, ACCEPT_S = 5.0, 60.0
# A peer shows the first half of the token that it was told through MPI, and gets the other half as an answer.
HALF_TOKEN_NBYTES = 16


class Ring:
    """The connections of a host's first rank: one to the next host, and one from the host before it."""

    def __init__(self, onwards: socket.socket, behind: socket.socket, hosts: int) -> None:
        """Take two connected sockets.

        Args:
            onwards: to the next host; this end only sends.
            behind: from the host before; this end only receives.
            hosts: the number of hosts in the ring, 2 or more.
        """
        self._onwards, self._behind, self._hosts = onwards, behind, hosts
        for connection in (onwards, behind):
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        """Send and receive what an allreduce of the buffer must, 2 (H - 1) / H times its bytes each way.

        Args:
            outgoing: the buffer; its bytes are sent, from the start again where there are more than two hosts.
            incoming: as long; what arrives is written into it in the same way, so that it ends as a copy of the buffer
                of the host before.

        Raises:
            HvdExtError: the host before has closed its connection.
        """
        source, target = memoryview(outgoing).cast("B"), memoryview(incoming).cast("B")
        nbytes = len(source)
        total = -(-2 * (self._hosts - 1) * nbytes // self._hosts)
        sent = received = 0
        ready = select.poll()
        ready.register(self._onwards, select.POLLOUT)
        ready.register(self._behind, select.POLLIN)
        while sent < total or received < total:
            before = sent + received
            if sent < total:
                place = sent % nbytes
                sent += _send(self._onwards, source[place : place + total - sent])
                if sent == total:
                    ready.unregister(self._onwards)
            if received < total:
                place = received % nbytes
                received += _receive(self._behind, target[place : place + total - received])
            if sent + received == before:
                ready.poll()

    def close(self) -> None:
        """Close both connections."""
        self._onwards.close()
        self._behind.close()


def _send(connection: socket.socket, data: memoryview) -> int:
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0


def _receive(connection: socket.socket, space: memoryview) -> int:
    try:
        count = connection.recv_into(space)
    except BlockingIOError:
        return 0
    if not count:
        raise HvdExtError("tcp: the host before this one in the ring has closed its connection")
    return count


def connect(comm: Any, host: str, addresses: Sequence[str]) -> tuple[Ring | None, int]:
    """Connect the first ranks of all hosts to a ring, each one to that of the next host; all ranks call this.

    Args:
        addresses: under which other hosts may reach this one, the best first; see `addresses_of`.

    Returns:
        The ring, None on a rank that is not its host's first; and the rank whose buffer `Ring.exchange` brings.

    Raises:
        HvdExtError: a host cannot be reached from the host before it.
    """
    hosts = comm.allgather(host)
    ring = [hosts.index(name) for name in dict.fromkeys(hosts)]
    token = secrets.token_bytes(2 * HALF_TOKEN_NBYTES)
    with ExitStack() as stack:
        server = stack.enter_context(_listening()) if comm.rank in ring else None
        peers = comm.allgather((list(addresses), server.getsockname()[1] if server else 0, token))
        onwards = behind = None
        for place, rank in enumerate(ring):
            following = ring[(place + 1) % len(ring)]
            if comm.rank == rank:
                onwards = _dial(hosts[following], *peers[following])
            if comm.rank == following:
                assert server is not None
                behind = _accept(server, hosts[rank], token)
            comm.Barrier()
    if onwards is None or behind is None:
        return None, comm.rank
    return Ring(onwards, behind, len(ring)), ring[ring.index(comm.rank) - 1]


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _dial(host: str, addresses: Sequence[str], port: int, token: bytes) -> socket.socket:
    faults = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), CONNECT_S)
            connection.sendall(token[:HALF_TOKEN_NBYTES])
            if _read(connection) == token[HALF_TOKEN_NBYTES:]:
                return connection
            connection.close()
            faults.append(f"{address} is another host's")
        except OSError as error:
            faults.append(f"{address}: {error.strerror or error}")
    raise HvdExtError(
        f"tcp: host {host} cannot be reached ({'; '.join(faults) or 'it has no address'}); btl_tcp_if_include of "
        "Open MPI names the network that joins the hosts"
    )


def _accept(server: socket.socket, host: str, token: bytes) -> socket.socket:
    server.settimeout(ACCEPT_S)
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise HvdExtError(f"tcp: host {host} has not connected within {ACCEPT_S:g} s") from error
        connection.settimeout(CONNECT_S)
        if _read(connection) == token[:HALF_TOKEN_NBYTES]:
            connection.sendall(token[HALF_TOKEN_NBYTES:])
            return connection
        connection.close()  # it is a stranger's


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(HALF_TOKEN_NBYTES, socket.MSG_WAITALL)
    except OSError:
        return b""


def addresses_of(include: str = "") -> list[str]:
    """Give the addresses under which other hosts may reach this one.

    Args:
        include: the interfaces and networks that MPI may use, as Open MPI's btl_tcp_if_include has them ("eth0",
            "10.77.0.0/16"), with commas; empty for all.

    Returns:
        Those on interfaces that are up and named by `include`, or all if none is; those of the fastest link first, on
        each link those of IPv4 first.
    """
    states = psutil.net_if_stats()
    candidates = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and _leads_out(entry.address)
    ]
    words = [word.strip() for word in include.split(",") if word.strip()]
    named = [pair for pair in candidates if any(_names(word, *pair) for word in words)]
    return [
        address for _, address in sorted(named or candidates, key=lambda pair: (-states[pair[0]].speed, ":" in pair[1]))
    ]


def _leads_out(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not address.is_loopback and not (address.version == 6 and address.is_link_local)


def _names(word: str, interface: str, address: str) -> bool:
    if "/" not in word:
        return word == interface
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False)
    except ValueError:
        return False
