"""The plans of the network probe: messages between neighbours, in the forms in which collectives send them.

They compute no collective and are never proven. What they move, and how, is what the engine does for a bucket: rows of
SEND, RECV and RECV_REDUCE, in segments, over the transports of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_ext.planning.model import Call, Kind, Level, LogicalPlan, Span

Hosts = Sequence[Sequence[int]]


def nothing(size: int) -> LogicalPlan:
    """A plan without messages: a step takes what the engine needs to take a buffer and to give it back."""
    return LogicalPlan("probe", "allreduce", size, 1, ())


def selection(size: int, dense: bool) -> LogicalPlan:
    """A plan in which every rank selects from its whole buffer, or folds it if `dense`, and sends nothing."""
    calls = tuple(Call("fold" if dense else "select", (rank,), (Span(0, 1),)) for rank in range(size))
    return LogicalPlan("probe", "allreduce", size, 1, (Level(calls),))


def rings(groups: Hosts, size: int, kind: Kind = "all_gather", *, rounds: int = 1, messages: int = 1) -> LogicalPlan:
    """Ranks of each group send to the next rank of the group, all groups at the same time.

    Args:
        groups: the groups; one of a single rank sends nothing.
        kind: "all_gather", whose messages replace what was there, or "reduce_scatter", whose messages are added to it.
        rounds: the least number of rounds. In the largest group each rank sends `messages` messages a round.
        messages: the number of messages that a rank sends in a round.

    Returns:
        A plan of messages * d units, d the size of the largest group. In a group of d ranks a ring has d - 1 rounds and
        each rank sends a unit per message in each; rings follow each other until there are enough rounds.
    """
    groups = [group for group in groups if len(group) > 1]
    most = max((len(group) for group in groups), default=1)
    calls = tuple(
        Call(kind, tuple(group), tuple(Span(most * message + place, 1) for place in range(len(group))))
        for group in groups
        for message in range(messages)
    )
    levels = (Level(calls),) * -(-rounds // max(most - 1, 1)) if calls else ()
    return LogicalPlan("probe", "all_gather", size, most * messages, levels)


def both(groups: Hosts, size: int) -> LogicalPlan:
    """An allreduce in each group: a ring that adds, then a ring that sends the sums around."""
    first, second = rings(groups, size, "reduce_scatter"), rings(groups, size, "all_gather")
    return LogicalPlan("probe", "allreduce", size, first.units, first.levels + second.levels)


def pairs_of(hosts: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Pairs hosts: in each round every host meets another one, and over hosts - 1 rounds it meets all.

    Args:
        rounds: the largest number of rounds.

    Returns:
        For each round the pairs of hosts; with an odd number of hosts one host rests in each round. This is the circle
        method of round-robin tournaments.
    """
    circle = [*range(hosts)] + [-1] * (hosts % 2)
    rounds_of_pairs = []
    for _ in range(min(len(circle) - 1, rounds)):
        half = len(circle) // 2
        met = [(circle[place], circle[-1 - place]) for place in range(half)]
        rounds_of_pairs.append([(min(pair), max(pair)) for pair in met if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds_of_pairs


def exchanges(
    hosts: Hosts, pairs: Sequence[tuple[int, int]], size: int, *, rounds: int = 1, messages: int = 1
) -> LogicalPlan:
    """The ranks of one host exchange messages with those of another, all pairs of hosts at the same time.

    Args:
        pairs: pairs of hosts; a host is in at most one.
        messages: the number of messages that a rank of the larger host sends and receives in a round.

    Returns:
        A plan in which half of the units go each way between two hosts of the most ranks. The ranks of the smaller host
        of a pair take turns as partners.
    """
    most = max((len(hosts[host]) for pair in pairs for host in pair), default=1)
    calls = []
    for left, right in pairs:
        first, second = hosts[left], hosts[right]
        for place in range(max(len(first), len(second))):
            ranks = (first[place % len(first)], second[place % len(second)])
            for message in range(messages):
                unit = 2 * (place * messages + message)
                calls.append(Call("all_gather", ranks, (Span(unit, 1), Span(unit + 1, 1))))
    return LogicalPlan("probe", "all_gather", size, 2 * most * messages, (Level(tuple(calls)),) * rounds)
