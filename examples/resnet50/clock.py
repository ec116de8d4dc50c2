"""The time that DAWNBench counts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from images.manifest import write_whole

from hvd_ext import state

# So many seconds of a killed job are unknown to the one that goes on, at most.
NOTE_S = 5.0


class Clock:
    """Seconds since the program began, as DAWNBench counts them: without validation and checkpoints.

    A job that goes on begins with the seconds that the checkpoint says, or with those that `keep` has noted, if these
    are more: what a killed job had trained since its checkpoint counts too.
    """

    def __init__(self) -> None:
        # the time since the program began, of a monotonic clock
        self._zero_s = time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
        self._before_s = self._wall_before_s = self._left_out_s = 0.0
        self._stopped_s: float | None = None
        self._closed = threading.Event()
        state.register("the clock of the recipe", self._save, load_all=self._load)

    @property
    def wall_s(self) -> float:
        """All seconds, those of earlier jobs included; the time between two jobs is not."""
        return self._wall_before_s + time.monotonic() - self._zero_s

    @property
    def counted_s(self) -> float:
        """The seconds that count."""
        now = time.monotonic() if self._stopped_s is None else self._stopped_s
        return self._before_s + now - self._zero_s - self._left_out_s

    @property
    def counts(self) -> bool:
        """Whether the time that passes now counts."""
        return self._stopped_s is None

    def stop(self) -> None:
        """Leave out what follows."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        """Count what follows."""
        if self._stopped_s is not None:
            self._left_out_s += time.monotonic() - self._stopped_s
            self._stopped_s = None

    def keep(self, path: Path) -> None:
        """Note the seconds in a file from now on, and count on from what an earlier job has noted there.

        Args:
            path: of the file.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no job has noted anything
            noted = json.loads(path.read_text(encoding="utf-8"))
            self._begin(float(noted["counted_s"]), float(noted["wall_s"]))

        def note() -> None:
            with contextlib.suppress(OSError):  # the report, in the same folder, says so
                self.note(path)

        def again() -> None:
            while not self._closed.wait(NOTE_S):
                note()

        note()
        threading.Thread(target=again, name="clock", daemon=True).start()

    def note(self, path: Path) -> None:
        """Note the seconds in a file."""
        write_whole(path, json.dumps({"counted_s": self.counted_s, "wall_s": self.wall_s}).encode())

    def close(self) -> None:
        """Note nothing any more."""
        self._closed.set()

    def _begin(self, counted_s: float, wall_s: float) -> None:
        self._before_s, self._wall_before_s = max(counted_s, self._before_s), max(wall_s, self._wall_before_s)

    def _save(self) -> dict[str, np.ndarray]:
        return {"seconds": np.array([self.counted_s, self.wall_s])}

    def _load(self, own: dict[str, np.ndarray] | None, everyone: Any) -> None:
        self._begin(*(float(one) for one in (own or next(iter(everyone())))["seconds"]))
