"""The links between hosts: they meet in the order of a round-robin tournament, and again where there may be racks.

A pair that takes longer than the ports of both its hosts explain may share an uplink with other pairs. Then all hosts
meet again, pair by pair from a common begin, and two of these pairs alone (topology/racks.py). The number of meetings
grows with the number of hosts, and their sizes shrink, such that an attempt takes at most `RACKS_S`. Where that is too
short, and above `MOST_HOSTS` hosts, racks are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from hvd_ext.job.probe.exchanges import exchange, ranks_of, share
from hvd_ext.job.probe.stand import ATTEMPTS, MANY, ROUNDS, SMALL, TINY_NBYTES, Stand, Times, of
from hvd_ext.planning import patterns
from hvd_ext.planning.grain import message_nbytes
from hvd_ext.topology import racks
from hvd_ext.topology.fit import typical
from hvd_ext.topology.racks import Pair
from hvd_ext.topology.tree import Link

# The first look, and the time that the meetings of all rounds may take together.
LOOK_NBYTES = 64 << 10
MEETINGS_S = 0.4  # of each attempt
MOST_MEETINGS = 8
MEETING_S = 0.03  # of the larger size; a shorter one would be disturbed too easily
PARTS = (4, 1)  # smaller sizes are for the curve
LEAST_SAMPLES, MOST_SAMPLES, STEPS = 3, 8, 2
MEETING_NBYTES = 128 << 10, 8 << 20
# Racks: all pairs of so many hosts meet in about this time, with at least so many bytes.
RACKS_S = 2.0  # of each attempt; the second one is made where the first one leaves a doubt
MOST_HOSTS, LEAST_NBYTES = 16, 16 << 10
ALONE = 2


def look(stand: Stand, hosts: Sequence[tuple[int, ...]], pairs: Sequence[Pair]) -> list[str]:
    """Time small messages between hosts, and look how fast larger ones are; gives the names of the series."""
    size, names = stand.engine.size, []
    for messages in (1, MANY):
        plan = patterns.exchanges(hosts, pairs, size, rounds=ROUNDS, messages=messages)
        names.append(f"between, {messages} {SMALL}")
        stand.time(names[-1], plan, TINY_NBYTES * plan.units)
    stand.time("look", *exchange(hosts, pairs, size, LOOK_NBYTES, 8000), samples=2)
    return [*names, "look"]


class Size(NamedTuple):
    """The size of a meeting: the bytes each way, the number of samples, and the bytes of a message."""

    nbytes: int
    samples: int
    message_nbytes: float


def size_of(look_s: float, meetings: int) -> Size:
    """Choose the size of meetings by the time of the look, such that all take no longer than they may."""
    beta = look_s / LOOK_NBYTES
    wanted_s = min(MEETING_S, MEETINGS_S / meetings / (STEPS * LEAST_SAMPLES))
    samples = min(int(MEETINGS_S / meetings / (STEPS * wanted_s)), MOST_SAMPLES)
    nbytes = int(min(max(wanted_s / beta, MEETING_NBYTES[0]), MEETING_NBYTES[1])) // 4096 * 4096
    return Size(nbytes, samples, message_nbytes(beta))


def time_meetings(
    stand: Stand, hosts: Sequence[tuple[int, ...]], meetings: Sequence[Sequence[Pair]], size: Size
) -> None:
    """Time all meetings, and smaller sizes of the first."""
    for number, pairs in enumerate(meetings):
        for part in PARTS if number == 0 else PARTS[-1:]:
            what = exchange(hosts, pairs, stand.engine.size, size.nbytes // part, size.message_nbytes)
            samples, steps = (size.samples, STEPS) if part == 1 else (LEAST_SAMPLES, 1)
            stand.time(f"meeting {number} of 1/{part}", *what, samples=samples, steps=steps)


def pair_betas(
    seen: Sequence[Times],
    hosts: Sequence[tuple[int, ...]],
    pairs: Sequence[Pair],
    name: str,
    nbytes: float,
    kind: Callable[[list[float]], float] = typical,
) -> dict[Pair, float]:
    """The seconds per byte of the pairs of a meeting."""
    return {pair: of(ranks_of(seen, hosts, pair), name, kind) / (share(hosts, pairs, pair) * nbytes) for pair in pairs}


def fastest(rounds: Sequence[racks.Round], hosts: int) -> list[float]:
    """The seconds per byte of each host's port: those of its fastest meeting."""
    return [min(beta for met in rounds for pair, beta in met.items() if host in pair) for host in range(hosts)]


def find_racks(
    stand: Stand,
    names: Sequence[str],
    hosts: Sequence[tuple[int, ...]],
    ports: Sequence[float],
    size: Size,
) -> tuple[racks.Racks, list[dict[Pair, float]]]:
    """Find racks if some pairs are slower than their ports: all hosts meet again, and two of these pairs alone.

    Returns:
        The racks, and the seconds per byte of the pairs of each round; no rounds if nothing more was measured.
    """
    seen = stand.gathered()
    meetings = enumerate(patterns.pairs_of(len(hosts), MOST_MEETINGS))
    # The mean, because a pair that ends first leaves the link to the others, which are slow for a part of the time.
    met = [pair_betas(seen, hosts, pairs, f"meeting {number} of 1/1", size.nbytes, fmean) for number, pairs in meetings]
    slow = racks.suspects(ports, met) if len(hosts) > 2 else []
    paired = patterns.pairs_of(len(hosts), len(hosts))
    step_s = RACKS_S / (len(paired) + ALONE) / (1 + LEAST_SAMPLES * STEPS)
    betas = [max(pairs.values()) for pairs in met]
    betas += [max(betas)] * (len(paired) - len(betas))  # of the rounds that were left out
    wanted = [(step_s / beta, pairs) for beta, pairs in zip(betas, paired, strict=True)]
    # A pair that was slow beside others may be as many times as fast alone.
    wanted += [(step_s / max(betas) * len(paired[0]), [pair]) for pair in slow[:ALONE]]
    rounds = [(min(int(nbytes), MEETING_NBYTES[1]) // 4096 * 4096, pairs) for nbytes, pairs in wanted]
    slow, rounds = stand.agreed((slow, rounds))
    none = racks.Racks((tuple(range(len(hosts))),), (0.0,))
    if not slow:
        return none, []
    if len(hosts) > MOST_HOSTS or min(nbytes for nbytes, _ in rounds) < LEAST_NBYTES:
        first, second = (names[host] for host in slow[0])
        doubt = f"{first} and {second} are slower than their ports, and {len(hosts)} hosts have too many pairs to time"
        return replace(none, doubt=doubt), []
    fewest = min(map(len, hosts))
    alike = [ranks[:fewest] for ranks in hosts]  # so that all pairs send as much
    rounds = [(nbytes, [(low, high) for low, high in pairs]) for nbytes, pairs in rounds]
    for _ in range(ATTEMPTS):
        for number, (nbytes, pairs) in enumerate(rounds):
            what = exchange(alike, pairs, stand.engine.size, nbytes, size.message_nbytes)
            stand.time(f"round {number}", *what, samples=LEAST_SAMPLES, steps=STEPS, together=True)
        seen = stand.gathered()
        met = [
            pair_betas(seen, alike, pairs, f"round {number}", nbytes) for number, (nbytes, pairs) in enumerate(rounds)
        ]
        found = racks.find(fastest(met, len(hosts)), met, names)
        if not stand.agreed(found.doubt):
            break
    return found, met


def latency(
    seen: Sequence[Times],
    hosts: Sequence[tuple[int, ...]],
    pairs: Sequence[Pair],
    handover: Link,
    nbytes: float,
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """The latency between hosts, the time of a message, and a curve, from the first meeting."""
    rounds: dict[int, list[float]] = {1: [], MANY: []}
    for pair in pairs:
        for messages in rounds:
            whole_s = of(ranks_of(seen, hosts, pair), f"between, {messages} {SMALL}")
            rounds[messages].append((whole_s - handover.alpha_s) / ROUNDS)
    one_s, many_s = (float(np.median(rounds[messages])) for messages in (1, MANY))
    message_s = max(many_s - one_s, 0.0) / (2 * (MANY - 1))
    sizes = [(part, share(hosts, pairs, pairs[0]) * nbytes / part) for part in PARTS]
    points = [(sent, of(ranks_of(seen, hosts, pairs[0]), f"meeting 0 of 1/{part}")) for part, sent in sizes]
    return max(one_s - 2 * message_s, 0.0), message_s, ((float(TINY_NBYTES), one_s), *points)
