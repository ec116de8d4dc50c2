"""What a person sees while a benchmark runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar on stderr where that is a terminal, and nothing elsewhere.

    Args:
        total: of all that becomes ready.

    Returns:
        A function that takes what runs now and how much has just become ready.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # twice a second: drawing takes time from what is measured
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=2
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda title, ready: bar.update(task, description=title, advance=ready)
