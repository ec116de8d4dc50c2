"""The events of links and ranks: messages cut into parts, ports that serve one part after the other, rounds.

A rank has a window of segments in flight. A round of a segment starts when the round before it has ended on this rank.
The round then hands over all its messages at once; it ends when they have left the rank and all messages for it have
arrived and been reduced. A message is sent in parts. A part crosses each port on its way; each port serves parts in the
order of their arrival, for part * beta, and passes a part on as soon as it has begun to serve it (cut-through). So
messages that share a port share its time, part by part. A message arrives alpha after its last part has crossed the
last port.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

# The largest number of parts of a message; more parts would only make the simulation slower.
MOST_PARTS = 16


@dataclass(frozen=True, slots=True)
class Message:
    """A message of each segment: its share of the segment, its directed ports, and its round on the receiver."""

    share: float
    way: tuple[int, ...]
    alpha_s: float
    receiver: int
    round: int
    reduces: bool


@dataclass(frozen=True, slots=True)
class Program:
    """The rows of all ranks.

    rounds[r][k] has the messages that rank r sends in its k-th round, the number of messages that this round waits for,
    and the time of its local rows for each byte of the buffer.
    """

    messages: tuple[Message, ...]
    rounds: tuple[tuple[tuple[tuple[int, ...], int, float], ...], ...]
    beta_s_per_byte: tuple[float, ...]  # for each directed port
    gamma_s_per_byte: float
    part_nbytes: int  # the largest part of a message, unless it has MOST_PARTS parts


# Events: a part reaches a port; a message arrives; a round ends.
_PART, _COME, _ENDED = 0, 1, 2


class Play:
    """One run of a program: a heap of events, ordered by time, and by their creation if times are equal."""

    def __init__(self, program: Program, segment_nbytes: float, segments: int, window: int) -> None:
        self._program = program
        self._nbytes = segment_nbytes
        self._segments = segments
        self._window = window
        ranks = range(len(program.rounds))
        self._port_free_s = [0.0] * len(program.beta_s_per_byte)
        self._rank_free_s = [0.0 for _ in ranks]  # when a rank's reductions and local rows have ended
        self._started = [0 for _ in ranks]
        self._ended = [[False] * segments for _ in ranks]
        # For each rank and segment: the current round, the number of messages that are missing, and its earliest end.
        self._round = [[-1] * segments for _ in ranks]
        self._missing = [[0] * segments for _ in ranks]
        self._ready_s = [[0.0] * segments for _ in ranks]
        self._early: dict[tuple[int, int, int], list[int]] = {}  # messages that arrived before their round
        self._events: list[tuple[float, int, int, int, int, int, float, float]] = []
        self._made = 0
        self._last_s = 0.0

    def seconds(self) -> float:
        """Runs the program and returns the time at which the last rank ends."""
        for rank in range(len(self._started)):
            self._start_segments(rank, 0.0)
        program, events, free_s = self._program, self._events, self._port_free_s
        while events:
            now_s, _, kind, which, segment, hop, nbytes, end_s = heappop(events)
            if kind == _PART:
                message = program.messages[which]
                port = message.way[hop]
                begin_s = max(now_s, free_s[port])
                free_s[port] = begin_s + abs(nbytes) * program.beta_s_per_byte[port]
                end_s = max(end_s, free_s[port])
                if hop + 1 < len(message.way):
                    self._push(begin_s, _PART, which, segment, hop + 1, nbytes, end_s)
                elif nbytes < 0:
                    self._push(end_s + message.alpha_s, _COME, which, segment)
            elif kind == _COME:
                self._come(which, segment, now_s)
            else:
                self._next_round(which, segment, now_s)
        return self._last_s

    def _push(
        self, at_s: float, kind: int, which: int, segment: int, hop: int = 0, nbytes: float = 0.0, end_s: float = 0.0
    ) -> None:
        heappush(self._events, (at_s, self._made, kind, which, segment, hop, nbytes, end_s))
        self._made += 1

    def _start_segments(self, rank: int, now_s: float) -> None:
        ended, window = self._ended[rank], self._window
        while (segment := self._started[rank]) < self._segments and (segment < window or ended[segment - window]):
            self._started[rank] += 1
            self._next_round(rank, segment, now_s)

    def _next_round(self, rank: int, segment: int, now_s: float) -> None:
        self._round[rank][segment] += 1
        place, rounds = self._round[rank][segment], self._program.rounds[rank]
        if place == len(rounds):
            self._ended[rank][segment] = True
            self._last_s = max(self._last_s, now_s)
            self._start_segments(rank, now_s)
            return
        sends, self._missing[rank][segment], work = rounds[place]
        self._ready_s[rank][segment] = max([now_s, *(self._send(which, segment, now_s) for which in sends)])
        if work:
            busy_s = max(now_s, self._rank_free_s[rank]) + work * self._nbytes
            self._rank_free_s[rank] = self._ready_s[rank][segment] = busy_s
        if not self._missing[rank][segment]:
            self._push(self._ready_s[rank][segment], _ENDED, rank, segment)
        for which in self._early.pop((rank, segment, place), ()):
            self._take(which, segment, now_s)

    def _send(self, which: int, segment: int, now_s: float) -> float:
        """Sends a message to its first port, in parts, and returns the time at which it has left the rank."""
        message, program = self._program.messages[which], self._program
        nbytes, port = message.share * self._nbytes, message.way[0]
        parts = min(max(-int(-nbytes // program.part_nbytes), 1), MOST_PARTS)
        part = nbytes / parts
        for number in range(parts):
            begin_s = max(now_s, self._port_free_s[port])
            end_s = self._port_free_s[port] = begin_s + part * program.beta_s_per_byte[port]
            # The last part is marked by a negative size.
            self._push(begin_s, _PART, which, segment, 1, -part if number + 1 == parts else part, end_s)
        return end_s

    def _come(self, which: int, segment: int, now_s: float) -> None:
        message = self._program.messages[which]
        rank, place = message.receiver, message.round
        if self._round[rank][segment] == place:
            self._take(which, segment, now_s)
        else:
            self._early.setdefault((rank, segment, place), []).append(which)

    def _take(self, which: int, segment: int, now_s: float) -> None:
        """Takes a message that has arrived, and reduces it; a rank reduces one message after another."""
        message = self._program.messages[which]
        rank = message.receiver
        if message.reduces and self._program.gamma_s_per_byte:
            begin_s = max(now_s, self._rank_free_s[rank])
            now_s = begin_s + message.share * self._nbytes * self._program.gamma_s_per_byte
            self._rank_free_s[rank] = now_s
        self._ready_s[rank][segment] = max(self._ready_s[rank][segment], now_s)
        self._missing[rank][segment] -= 1
        if not self._missing[rank][segment]:
            self._push(self._ready_s[rank][segment], _ENDED, rank, segment)
