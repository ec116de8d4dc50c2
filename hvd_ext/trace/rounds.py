"""Summaries of partial rounds: which ranks were on time, which waited, and how stale gradients were.

The source is what an engine knows of its rounds (`hvd_ext.engine.partial.Rounds`), or the events of a merged trace.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hvd_ext.simulation.rounds import active, staleness
from hvd_ext.trace.events import Book, Event

if TYPE_CHECKING:
    from rich.table import Table

    from hvd_ext.engine.partial import Rounds

Numbers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

_NAMED = 3  # ranks in a line


@dataclasses.dataclass(frozen=True)
class Summary:
    """Rounds in a row, summed up.

    Args:
        on_time: in how many rounds each rank's gradient of the very step was [ranks]. A step without a gradient is
            late.
        waited_s: how long each rank waited for results in all [ranks]; NaN where it is not known.
        active: the mean number of ranks on time.
        staleness: how many gradients were in a round later than their own by 0, 1, ... rounds.
    """

    rounds: int
    ranks: tuple[int, ...]
    on_time: tuple[int, ...]
    waited_s: tuple[float, ...]
    active: float
    staleness: tuple[int, ...]

    @property
    def late(self) -> tuple[int, ...]:
        """In how many rounds each rank's gradient of the very step was not [ranks]."""
        return tuple(self.rounds - count for count in self.on_time)

    @property
    def histogram(self) -> str:
        """The staleness as text, such as "0: 90%, 1: 8%, 3: 2%"."""
        total = sum(self.staleness)
        return ", ".join(f"{late}: {count / total:.0%}" for late, count in enumerate(self.staleness) if count)

    def line(self) -> str:
        """Return the summary as one line."""
        often = sorted(zip(self.late, self.ranks, strict=True), key=lambda pair: (-pair[0], pair[1]))
        late = ", ".join(f"rank {rank} in {count}" for count, rank in often[:_NAMED] if count)
        return (
            f"{self.rounds} round{'s' * (self.rounds != 1)} with {self.active:.3g} of {len(self.ranks)} ranks on time "
            f"in the mean; late most often: {late or 'none'}; staleness of gradients {self.histogram or 'unknown'}"
        )

    def table(self, name: str) -> Table:
        """Return the summary as a table."""
        from rich.table import Table

        many = f"{self.rounds} partial round{'s' * (self.rounds != 1)}"
        caption = (
            f"ranks on time in the mean: {self.active:.3g} of {len(self.ranks)}; "
            f"staleness of gradients: {self.histogram or 'unknown'}"
        )
        table = Table(title=f"{name}: {many}", title_justify="left", caption=caption, caption_justify="left")
        for head in ("rank", "on time", "late", "waited s"):
            table.add_column(head, justify="right", no_wrap=True)
        for rank, on_time, late, waited_s in zip(self.ranks, self.on_time, self.late, self.waited_s, strict=True):
            waited = "-" if np.isnan(waited_s) else f"{waited_s:.3f}"
            table.add_row(str(rank), f"{on_time} ({on_time / self.rounds:.0%})", str(late), waited)
        return table


def summed(numbers: Numbers, arrived: Numbers, waited_s: Seconds, ranks: Iterable[int]) -> Summary:
    """Sum up rounds.

    Args:
        numbers: of the rounds, which follow each other; at least one.
        arrived: for each rank the newest step whose gradient is in the round or was in one before it [rounds, ranks].
        waited_s: how long each rank waited for results in all [ranks]; NaN where it is not known.
    """
    counted = arrived - (numbers[0] - 1)  # steps count from the first of these rounds
    on_time = np.count_nonzero(arrived >= numbers[:, None], 0)
    return Summary(
        len(numbers),
        tuple(ranks),
        tuple(on_time.tolist()),
        tuple(waited_s.tolist()),
        float(active(counted).mean()),
        tuple(staleness(counted).tolist()),
    )


def of_engine(recorded: Rounds, rank: int, ranks: Iterable[int]) -> Summary | None:
    """Sum up what the engine of a rank knows.

    Rank 0 knows when the gradients of all ranks came, and so how long they waited. Another rank knows this of itself.

    Args:
        ranks: the numbers in the job of the engine's ranks.

    Returns:
        The summary; None if no round is known.
    """
    if not len(recorded.numbers):
        return None
    waited_s = np.full(recorded.arrived.shape[1], np.nan)
    if rank == 0:
        waits_s = np.maximum(recorded.finished_s[:, None] - recorded.announced_s, 0.0)
        waited_s = np.where(recorded.announced_s > 0, waits_s, 0.0).sum(0)
    waited_s[rank] = recorded.waited_s.sum()
    return summed(recorded.numbers, recorded.arrived, waited_s, ranks)


def events_of(recorded: Rounds, book: Book, lane: int, since_ns: int = 0) -> list[Event]:
    """Make the events of one rank's partial rounds, on a track of their own.

    Args:
        since_ns: rounds that began before this time of this host's steady clock are left out.

    Returns:
        A span for each round, from its begin on this rank to its end; the name of the track comes first.
    """
    name, tid = book.channels[lane].name, lane * 1_000_000 + 1  # beside the track of the steps
    arrived = recorded.arrived[:, book.rank]
    before = np.concatenate((recorded.numbers[:1] - 1, arrived[:-1]))
    spans: list[Event] = []
    for row, number in enumerate(recorded.numbers.tolist()):
        if recorded.begins_s[row] * 1e9 < since_ns:
            continue
        begin_us, over_us = (
            (times[row] * 1e9 - book.zero_ns) / 1e3 for times in (recorded.begins_s, recorded.finished_s)
        )
        on_time = bool(arrived[row] >= number)
        about = {
            "channel": name,
            "lane": lane,
            "round": number,
            "arrived": int(arrived[row]),
            "on_time": on_time,
            "staleness": number - int(before[row]) - 1 if arrived[row] > before[row] else None,
            "waited_us": round(float(recorded.waited_s[row]) * 1e6, 3),
        }
        shape = {"name": f"round {number}" + (", late" if not on_time else ""), "cat": "round", "ph": "X"}
        span = {**shape, "ts": round(begin_us, 3), "dur": round(over_us - begin_us, 3)}
        spans.append({**span, "pid": book.rank, "tid": tid, "args": about})
    if not spans:
        return []
    track = {"ph": "M", "ts": 0, "pid": book.rank, "tid": tid}
    names = {"thread_name": {"name": f"{name}: partial rounds"}, "thread_sort_index": {"sort_index": tid}}
    return [*({"name": kind, **track, "args": about} for kind, about in names.items()), *spans]


def of_trace(events: Iterable[Event]) -> dict[str, Summary]:
    """Sum up the rounds of each channel of a merged trace.

    Returns:
        Summaries of the rounds that all of a channel's ranks in the trace have recorded, by the channel's name.
    """
    of_channels: dict[tuple[int, str], dict[int, dict[int, Event]]] = defaultdict(lambda: defaultdict(dict))
    for event in events:
        if event.get("cat") == "round":
            about = event["args"]
            of_channels[about["lane"], about["channel"]][event["pid"]][about["round"]] = about
    summaries = {}
    for (_, name), of_ranks in sorted(of_channels.items()):
        ranks = sorted(of_ranks)
        numbers = sorted(set.intersection(*(set(of_ranks[rank]) for rank in ranks)))
        if numbers:
            arrived = np.array([[of_ranks[rank][number]["arrived"] for rank in ranks] for number in numbers], np.int64)
            waited_us = [sum(of_ranks[rank][number]["waited_us"] for number in numbers) for rank in ranks]
            summaries[name] = summed(np.array(numbers, np.int64), arrived, np.array(waited_us) / 1e6, ranks)
    return summaries
