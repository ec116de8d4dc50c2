"""Shows the progress of a long step: one moving line on a terminal, or a line every half minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

LOG_EVERY_S = 30
LINE_WIDTH = 100


@contextmanager
def step(title: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show the progress of a step that prints many lines, which matter only if it fails; yield what takes each line."""
    start = shown = time.monotonic()
    if console.is_terminal:
        with console.status(escape(title)) as status:
            yield lambda line: status.update(f"{escape(title)} [dim]{escape(line.strip()[:LINE_WIDTH])}[/dim]")
    else:
        console.print(f"{title} ...", markup=False, highlight=False)

        def log(line: str) -> None:
            nonlocal shown
            if time.monotonic() - shown > LOG_EVERY_S:
                shown = time.monotonic()
                text = f"  {shown - start:4.0f} s: {line.strip()[:LINE_WIDTH]}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield log
    console.print(f"{title}: done in {time.monotonic() - start:.0f} s", markup=False, highlight=False)
