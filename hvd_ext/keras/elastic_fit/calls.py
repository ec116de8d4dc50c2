"""The calls of elastic `fit` in this process: a worker that comes late passes over those that the others have done."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_ext.job import runtime
from hvd_ext.keras.elastic_fit.progress import Logs, Meeting

_PASSES_OVER = (
    "this worker came late, and the others wait for it in a later call of fit; a collective between two calls of fit "
    "cannot run on it, because the other ranks have already completed it: move it before the first call, or into a "
    "callback"
)


class Calls:
    """The calls, counted in the process, and their histories.

    Attributes:
        logs: of each call, in all worlds.
        meeting: where the others are, if that is a later call than this rank's; they wait for this rank there.
    """

    def __init__(self) -> None:
        self._count = 0
        self.logs: list[Logs] = []
        self.meeting: Meeting | None = None

    def begin(self) -> int:
        """Give the number of a call that begins."""
        self._count += 1
        if self.meeting is not None and not self.is_over(self._count - 1):
            runtime.current().engine.passes_over = ""
        if len(self.logs) < self._count:
            self.logs.append(Logs([], {}))
        return self._count - 1

    def met(self, meeting: Meeting, number: int) -> bool:
        """Take over the histories of the others; returns whether they are in a later call than this rank.

        Until that call this rank takes part in nothing.
        """
        self.logs = [*meeting.logs, *self.logs[len(meeting.logs) :]]
        self.meeting = meeting if meeting.fit > number else None
        if self.meeting is not None:
            runtime.current().engine.passes_over = _PASSES_OVER
        return self.meeting is not None

    def here(self, number: int) -> Meeting | None:
        """Give where the others are, if they wait for this rank in this call."""
        return self.meeting if self.meeting is not None and self.meeting.fit == number else None

    def is_over(self, number: int) -> bool:
        """Tell whether the others are in a later call."""
        return self.meeting is not None and self.meeting.fit > number

    def add(self, number: int, history: Any) -> None:
        """Add the epochs that a world has ended to the history of a call."""
        logs = self.logs[number]
        logs.epochs.extend(getattr(history, "epoch", []))
        for name, values in history.history.items():
            logs.values.setdefault(name, []).extend(np.asarray(value).tolist() for value in values)

    def history(self, number: int, of_world: keras.callbacks.History | None = None) -> keras.callbacks.History:
        """Give the history of a call in all worlds.

        Args:
            number: of the call.
            of_world: that of its last world; it becomes the whole one.
        """
        history = keras.callbacks.History() if of_world is None else of_world
        history.epoch, history.history = self.logs[number]
        return history


calls = Calls()
