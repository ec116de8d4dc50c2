"""Racks from the rates of pairs of hosts: uplinks are found under noise; times that no racks explain are reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hvd_ext.planning.patterns import pairs_of
from hvd_ext.topology import racks
from tests.unit.topology.links import measured

GROUPS = [
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),  # ranks of a launcher go around
    ((0, 1, 2), (3, 4, 5)),
    ((0, 1, 2, 3), (4, 5)),
    ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    ((0, 1, 2), (3, 4), (5,)),
]
PORT = 86e-9


def rounds_of(
    groups: racks.Groups, uplinks: Sequence[float], noise: float, seed: int, alone: bool = True
) -> tuple[list[float], list[dict[racks.Pair, float]]]:
    """Measure all rounds of a tournament and some pairs alone, with noise; return the ports too, the fastest times."""
    size = sum(map(len, groups))
    random = np.random.default_rng(seed)
    ports = [PORT] * size
    meetings = pairs_of(size, size)
    meetings += [[pair] for pair in meetings[0][:2]] if alone else []
    rounds = [
        {pair: beta * random.uniform(1, 1 + noise) for pair, beta in measured(groups, uplinks, ports, pairs).items()}
        for pairs in meetings
    ]
    return [min(r[pair] for r in rounds for pair in r if host in pair) for host in range(size)], rounds


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("factor", [0.5, 0.75, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_racks_that_are_found_price_other_pairs_as_the_true_ones_do(
    groups: racks.Groups, factor: float, noise: float
) -> None:
    for seed in range(10 if noise else 1):
        uplinks = [factor * PORT] * len(groups)
        ports, rounds = rounds_of(groups, uplinks, noise, seed)
        found = racks.find(ports, rounds)
        assert not found.doubt, (seed, found.doubt)
        limits = [beta or 1e-30 for beta in found.uplinks]
        order = np.random.default_rng(seed)
        for _ in range(20):
            hosts = order.permutation(len(ports)).tolist()
            pairs = [(low, high) for low, high in zip(hosts[::2], hosts[1::2], strict=False)]
            true = measured(groups, uplinks, [PORT] * len(ports), pairs)
            priced = measured(found.groups, limits, [PORT] * len(ports), pairs)
            # What takes longer than its ports by less than the least that counts is left out.
            slowest = max(true.values()) / max(priced.values())
            assert 0.9 < slowest < (1.1 if len(found.groups) > 1 else racks.EXPLAINED * 1.05), (seed, pairs)


@pytest.mark.parametrize("groups", GROUPS[:-1])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_racks_of_several_hosts_are_found_with_their_uplinks(groups: racks.Groups, factor: float) -> None:
    for seed in range(20):
        found = racks.find(*rounds_of(groups, [factor * PORT] * len(groups), 0.08, seed))
        assert found.groups == tuple(sorted(groups))
        assert found.uplinks == pytest.approx([factor * PORT] * len(groups), rel=0.1)


@pytest.mark.parametrize("size", [3, 4, 6, 9])
def test_without_racks_none_are_found(size: int) -> None:
    alone = tuple((host,) for host in range(size))
    for seed in range(20):
        ports, rounds = rounds_of(alone, [1e-30] * size, 0.15, seed)
        assert not racks.suspects(ports, rounds)
        assert racks.find(ports, rounds) == racks.Racks((tuple(range(size)),), (0.0,))


def test_a_slow_host_is_no_rack() -> None:
    ports = [PORT, PORT, 4 * PORT, PORT]
    rounds = [measured(((0,), (1,), (2,), (3,)), [1e-30] * 4, ports, pairs) for pairs in pairs_of(4, 4)]
    assert not racks.suspects(ports, rounds)


def test_a_slow_uplink_beside_faster_ones_has_its_own_rate() -> None:
    groups = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    found = racks.find(*rounds_of(groups, [4 * PORT, 2 * PORT, 2 * PORT], 0.05, 1))
    assert found.groups == groups
    assert found.uplinks == pytest.approx([4 * PORT, 2 * PORT, 2 * PORT], rel=0.15)


def test_pairs_that_are_as_slow_alone_share_nothing_and_that_is_told() -> None:
    groups = ((0, 1), (2, 3))
    ports, rounds = rounds_of(groups, [2 * PORT, 2 * PORT], 0.05, 1, alone=False)
    assert not racks.find(ports, rounds).doubt
    ((pair, seconds),) = [entry for entry in rounds[0].items() if entry[0][0] == 0]
    found = racks.find(ports, [*rounds, {pair: seconds}], ("a", "b", "c", "d"))
    assert len(found.groups) == 1
    assert found.doubt.startswith("no racks explain that ") and " times the expected time" in found.doubt


def test_times_without_a_pattern_are_no_racks() -> None:
    random = np.random.default_rng(3)
    told = 0
    for _ in range(20):
        rounds = [{pair: PORT * random.choice([1.0, 3.0]) for pair in pairs} for pairs in pairs_of(6, 6)]
        found = racks.find([PORT] * 6, rounds)
        told += bool(found.doubt)
    assert told >= 18
