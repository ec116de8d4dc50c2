"""What rank 0 shows of a training: a display in a terminal, elsewhere a line for each epoch, and tables at the end."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from .rows import Row
from .settings import Settings

# Launchers give ranks a terminal of their own, wherever their own output goes to.
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "orted", "prte", "hydra", "srun", "slurmstepd", "ssh")
# With these, launchers put words in front of lines.
TAGS = ("tag-output", "timestamp-output", "xml", "prepend-rank")
WIDTH = 120  # of what goes to a file
WIDE = 78  # what the whole table of epochs needs
REFRESHES = 2  # in a second
NEWEST = 30  # epochs that a display shows at most


@dataclass(frozen=True)
class Now:
    """Where a training is.

    Args:
        epoch: from 0.
        kind: "topk" or "dense".
        done: steps of the epoch.
        steps: of the epoch.
        images_per_s: in this epoch; None before its second step.
        counted_s: the seconds that count.
        left_s: those that will still count; None if nothing is known of that.
        status: in a few words.
    """

    epoch: int
    kind: str
    done: int
    steps: int
    images_per_s: float | None
    counted_s: float
    left_s: float | None
    status: str


class Lines:
    """A line for each epoch.

    Args:
        settings: of the training.
        console: where they go.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console, self._begun = settings, console, False

    def begin(self, rows: list[Row]) -> None:
        """Show the epochs of earlier jobs; of several calls the first counts."""
        if rows and not self._begun:
            self.say(f"goes on after {len(rows)} epochs:")
            for row in rows:
                self._line(row)
        self._begun = True

    def add(self, row: Row) -> None:
        """Show an epoch that has ended."""
        self._line(row)

    def say(self, words: str) -> None:
        """Show a line."""
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)

    def end(self, summary: Row) -> None:
        """Show what the training has taken."""
        show(self._console, summary)

    def _line(self, row: Row) -> None:
        self.say(line(row, self._settings.epochs))


class Screen(Lines):
    """A display of the present epoch and of the newest ones, drawn twice a second; one drawing takes about 4 ms.

    What Python's standard error gets from this process stands above it.

    Args:
        settings: of the training.
        console: a terminal.
        now: tells where the training is.
        path: of the terminal, which tells its size.
        errors: whether standard error is that terminal too.
    """

    def __init__(self, settings: Settings, console: Console, now: Callable[[], Now], path: str, errors: bool) -> None:
        super().__init__(settings, console)
        self._now, self._path, self._errors = now, path, errors
        self._rows: list[Row] = []
        self._live: Live | None = None  # it draws at once
        self._before: Any = None
        self._ended = False
        # the table of the newest epochs, and for which number of epochs and size it was drawn
        self._table, self._known = SegmentLines([]), (-1, self._console.size)

    def begin(self, rows: list[Row]) -> None:
        """Begin to show."""
        self._rows = list(rows)
        if not self._begun:
            self._begun = True
            if self._errors:
                self._before, sys.stderr = sys.stderr, _Above(self.say)
            atexit.register(self._stop)
            self._live = Live(
                console=self._console,
                get_renderable=self._drawn,
                refresh_per_second=REFRESHES,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def add(self, row: Row) -> None:
        """Add an epoch that has ended."""
        self._rows.append(row)

    def end(self, summary: Row) -> None:
        """Leave the epochs on the screen, and show what the training has taken."""
        self._stop()
        super().end(summary)

    def _stop(self) -> None:
        """Give the terminal back, at the latest when the program ends."""
        self._ended = True
        if self._live is not None and self._live.is_started:
            self._live.stop()
            atexit.unregister(self._stop)
            if self._before is not None:
                sys.stderr.flush()
                sys.stderr = self._before

    def _drawn(self) -> RenderableType:
        if self._ended:
            return epochs(self._rows, self._console.width)
        self._console.size = size(self._path) or self._console.size
        # the display must fit into the terminal, or the terminal would scroll at each drawing
        newest = self._rows[-max(1, min(NEWEST, self._console.height - 7)) :]
        known = (len(self._rows), self._console.size)
        if known != self._known:  # a table takes ten times as long as the rest
            self._known = known
            self._table = SegmentLines(self._console.render_lines(epochs(newest, self._console.width)), new_lines=True)
        return Group(*present(self._settings, self._now(), self._console.width), *([self._table] if newest else []))


class _Above(io.TextIOBase):
    """A standard error whose lines stand above the display; it has no descriptor, which would go past it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._part = say, ""

    def write(self, text: str) -> int:
        *lines, self._part = (self._part + text).split("\n")
        for one in lines:
            self._say(one)
        return len(text)

    def flush(self) -> None:
        if self._part:
            self._say(self._part)
            self._part = ""


def begin(settings: Settings, now: Callable[[], Now]) -> Lines:
    """Make the view that fits where the output of this process goes.

    Args:
        settings: of the training.
        now: tells where the training is.
    """
    path = end_of(1)
    if path is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return Lines(settings, Console(width=WIDTH, no_color=True, force_terminal=False))
    return Screen(settings, Console(force_terminal=True), now, path, end_of(2) is not None)


def end_of(number: int) -> str | None:
    """Find the terminal to which a descriptor of this process leads, through a launcher.

    Args:
        number: 1 for standard output, 2 for standard error.

    Returns:
        A path, or None if it leads elsewhere, or where that cannot be seen.
    """
    path = f"/proc/self/fd/{number}"
    try:
        for parent in psutil.Process().parents():
            if parent.name().startswith(LAUNCHERS):
                if any(tag in word for word in parent.cmdline() for tag in TAGS):
                    return None
                path = f"/proc/{parent.pid}/fd/{number}"
                break
    except psutil.Error:
        return None
    return path if size(path) else None


def size(path: str) -> ConsoleDimensions | None:
    """Give the columns and lines of a terminal; None if the file is none, or cannot be opened."""
    try:
        # nothing else is opened: that could wait, or empty a file
        if not os.path.realpath(path).startswith("/dev/"):
            return None
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except OSError:  # it is no terminal
        return None
    finally:
        os.close(descriptor)
    return ConsoleDimensions(columns or 80, lines or 24)


def present(settings: Settings, now: Now, width: int) -> list[RenderableType]:
    """Draw the present epoch: its phase, a bar over its steps, and the time.

    Args:
        settings: of the training.
        now: where it is.
        width: in columns.
    """
    number = settings.phase_of(now.epoch)
    phase, epoch = settings.phases[number], min(now.epoch + 1, settings.epochs)
    head = Text.assemble(
        (f"epoch {epoch} of {settings.epochs}", "bold"),
        f", phase {number + 1} of {len(settings.phases)}: {phase.pixels} pixels, batch {phase.batch:,}, ",
        f"{kind_of(now.kind)}; {now.status}",
    )
    rate = f"{now.images_per_s:,.0f} images/s" if now.images_per_s else ""
    bar = Table.grid(padding=(0, 1))
    for _ in range(3):
        bar.add_column(no_wrap=True)
    bar.add_row(
        ProgressBar(now.steps, now.done, width=max(8, min(40, width - 40))),
        f"{now.done:,} of {now.steps:,} steps",
        rate,
    )
    rest = f", about {clock(now.left_s)} left" if now.left_s is not None else ""
    return [head, bar, Text(f"{clock(now.counted_s)} counted{rest}")]


def epochs(rows: Sequence[Row], width: int) -> Table:
    """Make the table of epochs.

    Args:
        rows: of the epochs.
        width: in columns; where there are few, what the head of a display says too is left out.
    """
    columns: dict[str, Callable[[Row], str]] = {
        "epoch": lambda row: str(row["epoch"] + 1),
        "pixels": lambda row: str(row["pixels"]),
        "batch": lambda row: f"{row['batch']:,}",
        "gradients": lambda row: kind_of(row["compression"]),
        "loss": lambda row: f"{row['loss']:.3f}" if "loss" in row else "",
        "top-1": lambda row: share(row.get("top1")),
        "top-5": lambda row: share(row.get("top5")),
        "images/s": lambda row: f"{row['images_per_s']:,.0f}",
        "counted": lambda row: clock(3600 * row["hours"]),
        "all": lambda row: clock(3600 * row["wall_hours"]),
    }
    if width < WIDE:
        columns = {head: cell for head, cell in columns.items() if head not in ("pixels", "batch", "gradients", "all")}
    table = _table(columns)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _table(heads: Iterable[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, justify="left" if head == "gradients" else "right", no_wrap=True)
    return table


def line(row: Row, count: int) -> str:
    """Put an epoch into a line.

    Args:
        row: of the epoch.
        count: of all epochs.
    """
    loss = [f"loss {row['loss']:.3f}"] if "loss" in row else []
    right = [f"top-1 {share(row['top1'])}, top-5 {share(row['top5'])}"] if "top5" in row else []
    figures = [*loss, *right, f"{row['images_per_s']:,.0f} images/s", f"{clock(3600 * row['hours'])} counted"]
    kind = kind_of(row["compression"])
    return f"epoch {row['epoch'] + 1} of {count}: {row['pixels']} pixels, batch {row['batch']:,}, {kind}: " + ", ".join(
        figures
    )


def show(console: Console, summary: Row) -> None:
    """Show what a training has taken: a table of its phases, and the hours.

    Args:
        console: where it goes.
        summary: from `Report.summary`.
    """
    table = _table(
        ("phase", "pixels", "batch", "gradients", "epochs", "seconds", "images/s", "input wait", "cache hits")
    )
    for row in summary["phases"]:
        table.add_row(
            str(row["phase"] + 1),
            str(row["pixels"]),
            f"{row['batch']:,}",
            kind_of(row["compression"]),
            str(row["epochs"]),
            f"{row['seconds']:,.1f}",
            f"{row['images_per_s']:,.0f}",
            f"{row['cache_wait_s']:,.1f} s" if "cache_wait_s" in row else "",
            share(row.get("cache_hits")),
        )
    if summary["phases"]:
        console.print(table)
    hours = {name: f"{summary[name]:.4f} h" for name in ("hours", "start_hours", "wall_hours")}
    words = [
        f"counted: {hours['hours']}, of them {hours['start_hours']} for starts of jobs and phases; "
        f"with validation and checkpoints: {hours['wall_hours']}"
    ]
    if summary["target"] is not None:
        when = summary["target_hours"]
        reached = "not reached" if when is None else f"reached after {when:.4f} h"
        words.append(f"top-5 of {summary['target']:.1%}: {reached}")
    if summary["entry_lacks"]:
        words.append(f"an entry to DAWNBench lacks: {'; '.join(summary['entry_lacks'])}")
    else:
        words.append(f"an entry to DAWNBench is whole: dawnbench.json and .tsv as ImageNet/train/{summary['entry']}")
    for one in words:
        console.print(one, markup=False, highlight=False, soft_wrap=True)


def kind_of(kind: str) -> str:
    """Name the gradients of a phase."""
    return {"topk": "top-k"}.get(kind, kind)


def share(value: float | None) -> str:
    """Give a share in percent; nothing for None."""
    return "" if value is None else f"{value:.1%}"


def clock(seconds: float) -> str:
    """Give a time as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
