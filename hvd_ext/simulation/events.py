"""The events of links and ranks: messages cut into parts, ports that serve one part after the other, rounds.

A lane is played: runs, each of which has segments and a program, in the order in which they start. A rank has a window
of segments of the lane in flight, so that a run starts while the run before it is still under way. A round of a
segment starts when the round before it has ended on this rank. The round then hands over all its messages at once; it
ends when they have left the rank and all messages for it have arrived and been reduced. A message is sent in parts. A
part crosses each port on its way; each port serves parts in the order of their arrival, for part * beta, and passes a
part on as soon as it has begun to serve it (cut-through). So messages that share a port share its time, part by part. A
message arrives alpha after its last part has crossed the last port. Where messages take processor time, a rank hands
them over and takes them one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    added_s_per_byte: float  # the time in which the receiver adds it
    message_s: float = 0.0  # the time of the sender's processor for it, and of the receiver's


@dataclass(frozen=True, slots=True)
class Program:
    """The rows of all ranks.

    rounds[r][k] has the messages that rank r sends in its k-th round, the number of messages that this round waits for,
    and the time of its local rows for each byte of the buffer.
    """

    messages: tuple[Message, ...]
    rounds: tuple[tuple[tuple[tuple[int, ...], int, float], ...], ...]
    beta_s_per_byte: tuple[float, ...]  # for each directed port
    part_nbytes: int  # the largest part of a message, unless it has MOST_PARTS parts


@dataclass(frozen=True, slots=True)
class Run:
    """A buffer in a lane: its program, its equal segments, and the time from which each rank may start it."""

    program: Program
    segment_nbytes: float
    segments: int
    ready_s: float | Sequence[float] = 0.0  # of all ranks, or of each rank


# Events: a part reaches a port; a message arrives; a round ends; a run is ready on a rank.
_PART, _COME, _ENDED, _READY = 0, 1, 2, 3


class Play:
    """One play of a lane: a heap of events, ordered by time, and by their creation if times are equal.

    Args:
        runs: the buffers of the lane in the order in which they start; their programs have the same ranks and ports.
    """

    def __init__(self, runs: Sequence[Run], window: int) -> None:
        first = runs[0].program
        self._runs = runs
        self._window = window
        ranks = range(len(first.rounds))
        self._beta_s_per_byte = first.beta_s_per_byte
        self._ready = [run.ready_s if isinstance(run.ready_s, Sequence) else [run.ready_s] * len(ranks) for run in runs]
        # Segments are numbered through all runs.
        self._run_of = [number for number, run in enumerate(runs) for _ in range(run.segments)]
        segments = len(self._run_of)
        self._port_free_s = [0.0] * len(first.beta_s_per_byte)
        self._rank_free_s = [0.0 for _ in ranks]  # when a rank's messages, reductions and local rows have ended
        self._started = [0 for _ in ranks]
        self._ended = [[False] * segments for _ in ranks]
        # For each rank and segment: the current round, the number of messages that are missing, and its earliest end.
        self._round = [[-1] * segments for _ in ranks]
        self._missing = [[0] * segments for _ in ranks]
        self._ready_s = [[0.0] * segments for _ in ranks]
        self._early: dict[tuple[int, int, int], list[int]] = {}  # messages that arrived before their round
        self._events: list[tuple[float, int, int, int, int, int, float, float]] = []
        self._made = 0
        self._begins_s = [float("inf")] * len(runs)
        self._ends_s = [0.0] * len(runs)

    def seconds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Plays the lane.

        Returns:
            For each run the time at which its first segment starts on the first rank, and the time at which its last
            segment ends on the last rank; both seconds from the begin.
        """
        for rank in range(len(self._started)):
            for at_s in sorted({ready_s[rank] for ready_s in self._ready}):
                self._push(at_s, _READY, rank, 0)
        runs, run_of, betas = self._runs, self._run_of, self._beta_s_per_byte
        events, free_s = self._events, self._port_free_s
        # Comparisons in place of max() and pushes in place halve the time of a play.
        while events:
            now_s, _, kind, which, segment, hop, nbytes, end_s = heappop(events)
            if kind == _PART:
                message = runs[run_of[segment]].program.messages[which]
                port = message.way[hop]
                begin_s = free_s[port]
                if begin_s < now_s:
                    begin_s = now_s
                free_s[port] = left_s = begin_s + (nbytes if nbytes >= 0 else -nbytes) * betas[port]
                if left_s > end_s:
                    end_s = left_s
                if hop + 1 < len(message.way):
                    heappush(events, (begin_s, self._made, _PART, which, segment, hop + 1, nbytes, end_s))
                    self._made += 1
                elif nbytes < 0:
                    heappush(events, (end_s + message.alpha_s, self._made, _COME, which, segment, 0, 0.0, 0.0))
                    self._made += 1
            elif kind == _COME:
                self._come(which, segment, now_s)
            elif kind == _ENDED:
                self._next_round(which, segment, now_s)
            else:
                self._start_segments(which, now_s)
        return tuple(self._begins_s), tuple(self._ends_s)

    def _push(self, at_s: float, kind: int, which: int, segment: int) -> None:
        heappush(self._events, (at_s, self._made, kind, which, segment, 0, 0.0, 0.0))
        self._made += 1

    def _start_segments(self, rank: int, now_s: float) -> None:
        ended, window, run_of = self._ended[rank], self._window, self._run_of
        while (segment := self._started[rank]) < len(run_of) and (segment < window or ended[segment - window]):
            number = run_of[segment]
            if self._ready[number][rank] > now_s:
                return
            self._begins_s[number] = min(self._begins_s[number], now_s)
            self._started[rank] += 1
            self._next_round(rank, segment, now_s)

    def _next_round(self, rank: int, segment: int, now_s: float) -> None:
        self._round[rank][segment] += 1
        number = self._run_of[segment]
        run, place = self._runs[number], self._round[rank][segment]
        rounds = run.program.rounds[rank]
        if place == len(rounds):
            self._ended[rank][segment] = True
            self._ends_s[number] = max(self._ends_s[number], now_s)
            self._start_segments(rank, now_s)
            return
        sends, self._missing[rank][segment], work = rounds[place]
        ready_s = now_s
        for which in sends:
            left_s = self._send(rank, which, segment, now_s)
            if left_s > ready_s:
                ready_s = left_s
        self._ready_s[rank][segment] = ready_s
        if work:
            busy_s = max(now_s, self._rank_free_s[rank]) + work * run.segment_nbytes
            self._rank_free_s[rank] = self._ready_s[rank][segment] = busy_s
        if not self._missing[rank][segment]:
            self._push(self._ready_s[rank][segment], _ENDED, rank, segment)
        for which in self._early.pop((rank, segment, place), ()):
            self._take(which, segment, now_s)

    def _send(self, rank: int, which: int, segment: int, now_s: float) -> float:
        """Sends a message to its first port, in parts, and returns the time at which it has left the rank."""
        run = self._runs[self._run_of[segment]]
        program = run.program
        message = program.messages[which]
        if message.message_s:
            now_s = self._rank_free_s[rank] = max(now_s, self._rank_free_s[rank]) + message.message_s
        nbytes, port = message.share * run.segment_nbytes, message.way[0]
        parts = 1
        if nbytes > program.part_nbytes:
            parts = min(-int(-nbytes // program.part_nbytes), MOST_PARTS)
        part = nbytes / parts
        taken_s = part * self._beta_s_per_byte[port]
        end_s = self._port_free_s[port]
        for number in range(parts):
            begin_s = now_s if end_s < now_s else end_s
            end_s = begin_s + taken_s
            # The last part is marked by a negative size.
            nbytes = -part if number + 1 == parts else part
            heappush(self._events, (begin_s, self._made, _PART, which, segment, 1, nbytes, end_s))
            self._made += 1
        self._port_free_s[port] = end_s
        return end_s

    def _come(self, which: int, segment: int, now_s: float) -> None:
        message = self._runs[self._run_of[segment]].program.messages[which]
        rank, place = message.receiver, message.round
        if self._round[rank][segment] == place:
            self._take(which, segment, now_s)
        else:
            self._early.setdefault((rank, segment, place), []).append(which)

    def _take(self, which: int, segment: int, now_s: float) -> None:
        """Takes a message that has arrived, and reduces it; a rank takes one message after another."""
        run = self._runs[self._run_of[segment]]
        message = run.program.messages[which]
        rank = message.receiver
        work_s = message.message_s + message.share * run.segment_nbytes * message.added_s_per_byte
        if work_s:
            now_s = self._rank_free_s[rank] = max(now_s, self._rank_free_s[rank]) + work_s
        ready_s = self._ready_s[rank]
        if now_s > ready_s[segment]:
            ready_s[segment] = now_s
        self._missing[rank][segment] -= 1
        if not self._missing[rank][segment]:
            self._push(ready_s[segment], _ENDED, rank, segment)
