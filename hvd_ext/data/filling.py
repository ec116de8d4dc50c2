"""Shows how the first fill of a cache goes on: one bar on rank 0, or a line now and then."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hvd_ext.job import log

_LOOK_S = 0.2  # between two looks at the store
_LINE_S = 10.0  # between two lines


class Filling:
    """What is shown of a fill, from the first sample that is loaded until all are there, or no place takes more."""

    def __init__(self, name: str, expected: int, seen: Callable[[], tuple[int, int, bool]]) -> None:
        """Prepare it; nothing is shown before `tick`.

        Args:
            name: of the cache.
            expected: the number of samples that this host will have.
            seen: gives how many there are, their bytes, and whether a place takes more.
        """
        self._name, self._expected, self._seen = name, expected, seen
        self._lock = threading.Lock()
        self._begun = self._next = self._line = 0.0
        self._done = False
        self._timer: threading.Timer | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def tick(self, now: bool = False) -> None:
        """Look whether there is something to show; called after samples were loaded, by any thread.

        Args:
            now: look even if the last look was a moment ago; if nothing was loaded, nothing is shown.
        """
        if self._done or (now and not self._begun):
            return
        if (now or time.monotonic() >= self._next) and self._lock.acquire(blocking=now):
            try:
                if not self._done:
                    self._show()
            finally:
                self._lock.release()
        elif self._timer is None:  # or the last samples would not be shown
            self._timer = threading.Timer(_LOOK_S, self._late)
            self._timer.daemon = True
            self._timer.start()

    def _late(self) -> None:
        self._timer = None
        self.tick(now=True)

    def _show(self) -> None:
        now = time.monotonic()
        records, nbytes, takes = self._seen()
        if not self._begun:
            self._begun = self._line = now
            if _terminal() and not _keras_has_a_bar():
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[size]}"),
                )
                self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
                self._task = self._bar.add_task(f"cache {self._name}", total=self._expected, size="")
                self._bar.start()
                # the process may end, or never come back to the data: the terminal shall have its cursor again
                weakref.finalize(self, self._bar.stop)
        ended = records >= self._expected or not takes
        if self._bar is not None:
            self._bar.update(self._task, completed=records, size=_size(nbytes))
        elif not ended and now > self._line + _LINE_S:
            self._line = now
            rate = f"{records / (now - self._begun):,.0f} samples/s"
            self._write(f"{records:,} of {self._expected:,} samples, {_size(nbytes)}, {rate}")
        self._next = now + _LOOK_S
        if ended:
            self._stop()
            full = "" if takes or records >= self._expected else f" of {self._expected:,}, and no room for more"
            self._write(f"{records:,} samples{full}, {_size(nbytes)} in {time.monotonic() - self._begun:.1f} s")

    def _stop(self) -> None:
        self._done = True
        if self._bar is not None:
            self._bar.stop()

    def _write(self, words: str) -> None:
        # what stands in this line of a terminal is Keras' bar, which comes again with the next step
        log.write(("\r\x1b[K" if _terminal() else "") + log.line(f"cache {self._name}: {words}"))

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._stop()


def _size(nbytes: int) -> str:
    if nbytes >= 1e6:
        return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
    return f"{nbytes / 1e3:,.1f} kB"


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _keras_has_a_bar() -> bool:
    """Tell whether Keras runs with a bar of its own: two bars would overwrite each other."""
    return any(_verbose(frame) in (1, "auto") for frame in sys._current_frames().values())


def _verbose(frame: FrameType) -> Any:
    """Give the `verbose` of the outermost call of Keras in a stack, which makes the bar; None where there is none."""
    verbose, at = None, cast("FrameType | None", frame)
    while at is not None:
        # hvd_ext.keras has a `fit` too, around that of Keras
        module = str(at.f_globals.get("__name__", ""))
        if at.f_code.co_name in ("fit", "evaluate", "predict") and module.startswith(("keras.", "tf_keras.")):
            verbose = at.f_locals.get("verbose")
        at = at.f_back
    return verbose
