"""Signals that ask a job to end: a handler notes them, so that training can save after the step and stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hvd_ext.errors import InvalidError


def check(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of signals such as "SIGTERM", and give them back; `InvalidError` if no program can take one."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidError(f"signals ({names!r}): must be a sequence of names, such as ('SIGTERM', 'SIGUSR1')")
    for name in names:
        if not name.startswith("SIG") or not isinstance(getattr(signal, name, None), signal.Signals):
            raise InvalidError(f"signals ({name!r}): must be a name of a signal, such as 'SIGTERM'")
        if name in ("SIGKILL", "SIGSTOP"):
            raise InvalidError(f"signals ({name!r}): no program can handle this signal; use another")
    return tuple(names)


class Watch:
    """Notes signals between `start` and `stop`."""

    def __init__(self, names: Sequence[str], running: Callable[[FrameType | None], bool]) -> None:
        """Take the names of the signals.

        Args:
            running: tells, from the frame in which a signal came, whether the code that looks at `seen` still runs.
                Training that has ended by an exception has not called `stop`, and a signal must then end the process.
        """
        self.names = tuple(names)
        self.seen: str | None = None
        self._running = running
        self._before: dict[int, Any] = {}

    def start(self) -> bool:
        """Begin to note the signals; return False outside of the main thread, where Python takes no signals."""
        self.seen = None
        if threading.current_thread() is not threading.main_thread():
            return not self.names
        for name in self.names:
            number = getattr(signal, name)
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)
        return True

    def stop(self) -> None:
        """Give the signals their former handlers back."""
        for number in list(self._before):
            before = self._before.pop(number)
            # None stands for a handler that was not made in Python, and that Python cannot restore
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._running(frame):
            # a launcher and a scheduler may both send it; the first one counts
            self.seen = self.seen or signal.Signals(number).name
        else:
            self.stop()
            os.kill(os.getpid(), number)
