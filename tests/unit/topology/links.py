"""Pairs of hosts that share the links of a cluster, for tests of what a probe makes of their times."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ext.topology import racks


def measured(
    groups: racks.Groups, uplinks: Sequence[float], ports: Sequence[float], pairs: Sequence[racks.Pair]
) -> dict[racks.Pair, float]:
    """Share links as TCP does: all pairs speed up until a link is full, and its pairs stay at what they have."""
    group_of = {host: number for number, group in enumerate(groups) for host in group}
    free: dict[tuple[str, int], float] = {}
    users: dict[tuple[str, int], set[racks.Pair]] = {}
    for pair in pairs:
        links = [(("port", host), 1 / ports[host]) for host in pair]
        if group_of[pair[0]] != group_of[pair[1]]:
            links += [(("uplink", group_of[host]), 1 / uplinks[group_of[host]]) for host in pair]
        for link, rate in links:
            free[link] = rate
            users.setdefault(link, set()).add(pair)
    seconds: dict[racks.Pair, float] = {}
    while users:
        tightest = min(users, key=lambda link: free[link] / len(users[link]))
        rate = free[tightest] / len(users[tightest])
        for pair in sorted(users[tightest]):
            seconds[pair] = 1 / rate
            for link in [link for link, members in users.items() if pair in members]:
                free[link] -= rate
                users[link] -= {pair}
                if not users[link]:
                    del users[link]
    return seconds
