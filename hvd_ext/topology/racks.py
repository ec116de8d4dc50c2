"""Racks from the rates of pairs of hosts: hosts whose messages to other hosts share an uplink.

A measurement is a *round*: disjoint pairs of hosts exchange messages, all pairs of the round at the same time. A pair
is held up by its own two ports, and, where its hosts are in different racks, by the uplinks of both, which it shares
with the other pairs of the round that cross them. With times per byte p of the ports and u of the uplinks, and with k
pairs of the round across an uplink, a pair of the hosts i and j of the racks R and S takes

    max(p_i, p_j, k_R u_R, k_S u_S)

per byte if the links are shared evenly. Each rack's uplink follows from the rounds: the last of k pairs ends when the
bytes of all of them have crossed. So what remains to be found is the partition into racks. Hosts of a rack see all
others alike, which orders the hosts in a dendrogram; of its cuts, the coarsest one counts that explains the times about
as well as any. One group of all hosts means that there are no racks. If no cut explains the times, racks are not the
reason for them, or other work disturbed the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_ext.topology.fit import levelled

# A pair that takes longer than its ports explain by more than this factor may share something else.
EXPLAINED = 1.2
# Of the cuts whose mean error (a logarithm) is this near the least one, the coarsest counts. No pair of it may take
# longer or less long than expected by more than a factor, or other work has disturbed the measurement.
NEAR, TOLERATED = 0.05, 1.3
# Uplinks that differ by less than this have one rate; what one pair of several leaves to the others depends on it much.
ALIKE = 0.1
Pair = tuple[int, int]
Round = Mapping[Pair, float]  # the seconds per byte of each pair
Groups = tuple[tuple[int, ...], ...]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Racks:
    """The racks of a cluster.

    Args:
        groups: the hosts of each rack; a host that shares no uplink is a group of its own. One group if there are no
            racks, or if it cannot be told.
        uplinks: the seconds per byte of each group's uplink; 0 for a group without one.
        doubt: why it cannot be told which hosts share an uplink; empty if it can.
    """

    groups: Groups
    uplinks: tuple[float, ...]
    doubt: str = ""


def suspects(ports: Sequence[float], rounds: Sequence[Round]) -> list[Pair]:
    """Finds the pairs that take longer than their own ports explain, the slowest of all first."""
    excess = {pair: beta / max(ports[host] for host in pair) for round_ in rounds for pair, beta in round_.items()}
    return sorted((pair for pair in excess if excess[pair] > EXPLAINED), key=lambda pair: -excess[pair])


def find(ports: Sequence[float], rounds: Sequence[Round], names: Sequence[str] = ()) -> Racks:
    """Finds the racks of a cluster.

    Args:
        ports: the seconds per byte of each host's own port, above 0.
        rounds: what was measured; over all rounds every pair of hosts has met.
        names: the names of the hosts for `doubt`; their numbers by default.
    """
    cuts = [(groups, _uplinks(groups, rounds)) for groups in _cuts(_distances(ports, rounds))]
    errors = [_errors(groups, uplinks, ports, rounds) for groups, uplinks in cuts]
    missed = [float(np.sqrt(np.mean([error * error for _, error in found]))) for found in errors]
    chosen = next(number for number, size in enumerate(missed) if size <= min(missed) + NEAR)
    pair, error = max(errors[chosen], key=lambda found: abs(found[1]))
    if abs(error) <= np.log(TOLERATED):
        return Racks(*cuts[chosen])
    first, second = (names[host] if names else f"host {host}" for host in pair)
    doubt = f"no racks explain that {first} and {second} took {np.exp(error):.2f} times the expected time"
    return Racks((tuple(range(len(ports))),), (0.0,), doubt)


def _distances(ports: Sequence[float], rounds: Sequence[Round]) -> _Floats:
    """How differently two hosts see each other and all others: the logarithms of what their ports do not explain."""
    size = len(ports)
    excess = np.zeros((size, size))
    for round_ in rounds:
        for (left, right), beta in round_.items():
            above = max(float(np.log(beta / max(ports[left], ports[right]))), 0.0)
            # Of two meetings the one in more company tells more; alone a pair may be as fast as its ports.
            excess[left, right] = excess[right, left] = max(excess[left, right], above)
    apart = np.abs(excess[:, None, :] - excess[None, :, :])
    for host in range(size):
        apart[host, :, host] = apart[:, host, host] = 0.0  # what two hosts see of each other counts once
    distances: _Floats = excess + apart.sum(axis=2) / max(size - 2, 1)
    return distances


def _cuts(distances: _Floats) -> list[Groups]:
    """The cuts of the dendrogram of average linkage, from one group of all hosts to the first pair."""
    groups: list[tuple[int, ...]] = [(host,) for host in range(len(distances))]
    cuts: list[Groups] = []
    while len(groups) > 1:
        places = [(low, high) for high in range(len(groups)) for low in range(high)]
        low, high = min(places, key=lambda two: float(distances[np.ix_(groups[two[0]], groups[two[1]])].mean()))
        groups[low] = tuple(sorted(groups[low] + groups.pop(high)))
        cuts.append(tuple(sorted(groups)))
    return cuts[::-1]


def _crossing(groups: Groups, round_: Round) -> list[list[Pair]]:
    """The pairs of a round that cross the uplink of each group of several hosts."""
    group_of = {host: number for number, group in enumerate(groups) for host in group}
    crossing: list[list[Pair]] = [[] for _ in groups]
    for pair in round_:
        left, right = (group_of[host] for host in pair)
        if left != right:
            for number in (left, right):
                if len(groups[number]) > 1:
                    crossing[number].append(pair)
    return crossing


def _uplinks(groups: Groups, rounds: Sequence[Round]) -> tuple[float, ...]:
    """The seconds per byte of each group's uplink, the middle of those rounds that it held up; 0 without an uplink."""
    most: list[list[float]] = [[] for _ in groups]
    for round_ in rounds:
        for number, pairs in enumerate(_crossing(groups, round_)):
            if pairs:
                most[number].append(max(round_[pair] for pair in pairs) / len(pairs))
    held_up = [[beta for beta in betas if beta <= min(betas) * (1 + ALIKE)] for betas in most]
    return tuple(levelled([float(np.median(betas)) if betas else 0.0 for betas in held_up], ALIKE))


def _errors(
    groups: Groups, uplinks: Sequence[float], ports: Sequence[float], rounds: Sequence[Round]
) -> list[tuple[Pair, float]]:
    """The logarithm of the measured time of each pair over that which the groups explain."""
    errors = []
    for round_ in rounds:
        expected = _shared(groups, uplinks, ports, round_)
        errors += [(pair, float(np.log(beta / expected[pair]))) for pair, beta in round_.items()]
    return errors


def _shared(groups: Groups, uplinks: Sequence[float], ports: Sequence[float], round_: Round) -> dict[Pair, float]:
    """The seconds per byte of pairs that share uplinks as TCP's connections do.

    All speed up until one of the uplinks is full. Its pairs keep their rates, and the others share what is left.
    """
    left = {number: (1 / uplinks[number], pairs) for number, pairs in enumerate(_crossing(groups, round_)) if pairs}
    own = {pair: 1 / max(ports[host] for host in pair) for pair in round_}
    rates: dict[Pair, float] = {}
    while len(rates) < len(own):
        open_pairs = [pair for pair in own if pair not in rates]
        even = {number: rate / len(pairs) for number, (rate, pairs) in left.items()}
        lowest = min([*(own[pair] for pair in open_pairs), *even.values()])
        settled = {pair for pair in open_pairs if own[pair] == lowest}
        settled |= {pair for number, rate in even.items() if rate == lowest for pair in left[number][1]}
        rates.update(dict.fromkeys(settled, lowest))
        left = {
            number: (rate - lowest * len(settled.intersection(pairs)), [pair for pair in pairs if pair not in settled])
            for number, (rate, pairs) in left.items()
            if not settled.issuperset(pairs)
        }
    return {pair: 1 / rate for pair, rate in rates.items()}
