"""The yardsticks of the allreduce benchmark, without MPI: threads stand for ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from hvd_ext.bench import allreduce_memory, allreduce_tcp
from hvd_ext.bench.allreduce_memory import LINE_ELEMENTS, Passes, shares_of
from hvd_ext.bench.allreduce_tcp import Ring, addresses_of, connect
from hvd_ext.bench.sampling import fault_of, sum_of, values_of
from hvd_ext.errors import HvdExtError

WAIT_S = 60


class Threads:
    """What the yardsticks need of a communicator, for one of several threads."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(WAIT_S)
        found = list(self._board)
        self._barrier.wait(WAIT_S)
        return found

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        self._barrier.wait(WAIT_S)


def on_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Run a function on every rank, each a thread; give the results, or raise the first rank's error."""
    board, barrier = [None] * size, threading.Barrier(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, size, board, barrier))
        except BaseException as error:
            found[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return found


class Counted:
    """A socket that counts the bytes that go through it."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner, self.sent, self.received = inner, 0, 0
        self.family = inner.family

    def send(self, data: memoryview) -> int:
        count = self.inner.send(data)
        self.sent += count
        return count

    def recv_into(self, space: memoryview) -> int:
        count = self.inner.recv_into(space)
        self.received += count
        return count

    def setblocking(self, flag: bool) -> None:
        self.inner.setblocking(flag)

    def fileno(self) -> int:
        return self.inner.fileno()


@contextmanager
def pairs(hosts: int) -> Iterator[list[tuple[Any, Any]]]:
    """Join hosts to a ring with socket pairs; gives each one's connections onwards and behind."""
    with ExitStack() as stack:
        links = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(hosts)]
        yield [(Counted(links[host][0]), Counted(links[host - 1][1])) for host in range(hosts)]


@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("elements", [1, 7, 100_003])
def test_tcp_carries_what_each_link_must_and_brings_the_buffer_of_the_host_before(hosts: int, elements: int) -> None:
    with pairs(hosts) as ends:

        def work(comm: Threads) -> np.ndarray:
            ring = Ring(*ends[comm.rank], hosts)
            result = np.full(elements, np.nan, np.float32)
            for _ in range(3):
                result.fill(np.nan)
                ring.exchange(values_of(comm.rank, elements), result)
            return result

        results = on_ranks(hosts, work)
        for rank, result in enumerate(results):
            assert np.array_equal(result, values_of((rank - 1) % hosts, elements))
        least = -(-2 * (hosts - 1) * 4 * elements // hosts)
        assert [(onwards.sent, behind.received) for onwards, behind in ends] == [(3 * least, 3 * least)] * hosts


def test_tcp_says_that_a_host_has_gone() -> None:
    with pairs(2) as ends:
        ends[1][0].inner.close()
        with pytest.raises(HvdExtError, match="the host before this one in the ring has closed"):
            Ring(*ends[0], 2).exchange(values_of(0, 4), values_of(0, 4))


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a", "b", "b"), ("a", "b", "a", "c")], ids=" ".join)
def test_the_first_ranks_of_the_hosts_are_connected_to_a_ring(hosts: tuple[str, ...]) -> None:
    def work(comm: Threads) -> tuple[int, np.ndarray | None]:
        ring, before = connect(comm, hosts[comm.rank], ["127.0.0.1"])
        if ring is None:
            return before, None
        result = np.zeros(5000, np.float32)
        ring.exchange(values_of(comm.rank, 5000), result)
        ring.close()
        return before, result

    found = on_ranks(len(hosts), work)
    ring = [hosts.index(name) for name in dict.fromkeys(hosts)]
    for rank, (before, result) in enumerate(found):
        if rank in ring:
            assert before == ring[ring.index(rank) - 1]
            assert result is not None and np.array_equal(result, values_of(before, 5000))
        else:
            assert (before, result) == (rank, None)


def test_a_stranger_that_connects_is_sent_away() -> None:
    token = bytes(range(32))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 16)
            found = on_ranks(
                2,
                lambda comm: (
                    allreduce_tcp._accept(server, "b", token)
                    if comm.rank
                    else allreduce_tcp._dial("a", ["127.0.0.1"], port, token)
                ),
            )
            assert stranger.recv(1) == b""
        assert found[0].getpeername() == found[1].getsockname()
        for one in found:
            one.close()


def test_a_host_that_cannot_be_reached_is_named_with_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HvdExtError, match=r"host h7 cannot be reached \(127\.0\.0\.1: .*btl_tcp_if_include"):
        allreduce_tcp._dial("h7", ["127.0.0.1"], port, bytes(32))
    with pytest.raises(HvdExtError, match="it has no address"):
        allreduce_tcp._dial("h7", [], port, bytes(32))


def test_the_address_is_that_of_the_network_of_mpi_or_of_the_fastest_link(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, address: str, family: int = socket.AF_INET) -> None:
            self.address, self.family = address, family

    class State:
        def __init__(self, speed: int, isup: bool = True) -> None:
            self.speed, self.isup = speed, isup

    links = {
        "lo": [Entry("127.0.0.1")],
        "slow": [Entry("10.0.0.1"), Entry("fe80::1", socket.AF_INET6)],
        "fast": [Entry("fd77::1", socket.AF_INET6), Entry("10.77.0.1"), Entry("fe80::2%fast", socket.AF_INET6)],
        "down": [Entry("10.99.0.1")],
    }
    states = {"lo": State(0), "slow": State(1000), "fast": State(10000), "down": State(10**6, False)}
    monkeypatch.setattr(allreduce_tcp.psutil, "net_if_addrs", lambda: links)
    monkeypatch.setattr(allreduce_tcp.psutil, "net_if_stats", lambda: states)
    assert addresses_of() == ["10.77.0.1", "fd77::1", "10.0.0.1"]
    assert addresses_of("fd77::/64") == ["fd77::1"]
    assert addresses_of("10.0.0.0/16") == addresses_of("slow") == ["10.0.0.1"]
    assert addresses_of("10.0.0.0/16,fast") == ["10.77.0.1", "fd77::1", "10.0.0.1"]
    assert addresses_of("none,no/network") == addresses_of()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 5, LINE_ELEMENTS * 3, 300_007])
def test_memory_sums_up_what_all_ranks_have(ranks: int, elements: int) -> None:
    def work(comm: Threads) -> list[str]:
        passes = Passes(comm, values_of(comm.rank, elements))
        words = []
        for _ in range(3):
            passes.spoil()
            comm.Barrier()
            words.append(fault_of(passes.call(), elements, lambda count: sum_of(ranks, count)))
            comm.Barrier()
        return words

    assert on_ranks(ranks, work) == [["", "", ""]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_memory_makes_the_passes_that_it_says(ranks: int) -> None:
    elements = 48 * LINE_ELEMENTS

    def work(comm: Threads) -> tuple[int, int, int, int]:
        passes = Passes(comm, values_of(comm.rank, elements))
        added = sum(len(inputs) * target.size for inputs, _, target in passes._sums)
        copied = sum(source.size for source, _ in passes._copies)
        written = sum(target.size for *_, target in [*passes._sums, *passes._copies])
        spoilt = passes.spoil() or int(np.isnan(passes.result).sum())
        return added, copied, written, spoilt

    others = (ranks - 1) * elements // ranks
    assert on_ranks(ranks, work) == [(elements, others, elements, others)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("elements", [1, 15, 16, 17, 1000, 4096])
def test_shares_cover_the_buffer_once_and_begin_at_lines(ranks: int, elements: int) -> None:
    shares = shares_of(elements, ranks)
    assert len(shares) == ranks
    assert [place for share in shares for place in range(share.start, share.stop)] == list(range(elements))
    assert all(share.start % LINE_ELEMENTS == 0 or share.start == elements for share in shares)
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) < 2 * LINE_ELEMENTS


def test_memory_that_may_not_be_opened_is_an_error_in_words() -> None:
    with pytest.raises(HvdExtError, match=f"memory: the memory of process {os.getpid()} cannot be opened"):
        allreduce_memory._mapped(os.getpid(), 10**6, 4096)
