"""The plans of the network probe: every message that is sent is received, and all hosts meet."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from hvd_ext.planning import patterns
from hvd_ext.planning.ir import OPCODE, PEER, RECV, RECV_REDUCE, ROUND, SEND
from hvd_ext.planning.lower import rows_of
from hvd_ext.planning.model import LogicalPlan

HOSTS = ((0, 3, 4), (1, 2), (5,))


def messages(plan: LogicalPlan) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Count the messages of each pair of ranks, as they are sent and as they are received."""
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for rank in range(plan.size):
        for row in rows_of(plan, rank).tolist():
            if row[OPCODE] == SEND:
                sent[rank, row[PEER]] += 1
            elif row[OPCODE] in (RECV, RECV_REDUCE):
                received[row[PEER], rank] += 1
    return sent, received


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("many", [1, 3])
def test_rings_stay_in_their_hosts(kind: patterns.Kind, many: int) -> None:
    plan = patterns.rings(HOSTS, 6, kind, rounds=5, messages=many)
    sent, received = messages(plan)
    assert sent == received
    host_of = {rank: host for host, ranks in enumerate(HOSTS) for rank in ranks}
    assert all(host_of[one] == host_of[two] for one, two in sent)
    rounds = {row[ROUND] for row in rows_of(plan, 0).tolist()}
    assert len(rounds) == 6  # three rings of two rounds
    assert sent[0, 3] + sent[0, 4] == 6 * many


def test_a_ring_of_single_ranks_is_empty() -> None:
    assert patterns.rings(((0,), (1,)), 2, rounds=4).levels == ()


@pytest.mark.parametrize("hosts", range(2, 9))
def test_all_hosts_meet_once_and_none_twice_in_a_round(hosts: int) -> None:
    rounds = patterns.pairs_of(hosts, 99)
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert met == Counter(combinations(range(hosts), 2))
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(patterns.pairs_of(hosts, 2)) == min(2, len(rounds))


def test_ranks_of_a_smaller_host_take_turns() -> None:
    sent, received = messages(patterns.exchanges(HOSTS, [(0, 1)], 6, rounds=2, messages=2))
    assert sent == received
    assert {pair for pair in sent if pair[0] in HOSTS[0]} == {(0, 1), (3, 2), (4, 1)}
    assert sent[4, 1] == 4
