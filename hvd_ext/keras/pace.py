"""How often the ranks exchange something in the steps of `fit`: every so many batches, the same number on all ranks."""

from __future__ import annotations

import time

# So many seconds lie between two exchanges, about; an exchange takes a thousandth of them. Open MPI kills a job one
# second after SIGTERM, unless told to wait longer.
ASK_S = 0.25


class Pace:
    """Counts batches until the next exchange; all ranks count the same batches."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Let the first exchange follow the next batch."""
        self._left = self._interval = 1
        self._exchanged_s = time.monotonic()

    def count(self) -> None:
        """Count a batch."""
        self._left -= 1

    @property
    def is_due(self) -> bool:
        """Whether it is time for the exchange."""
        return self._left <= 0

    def seconds(self) -> float:
        """Return how long a batch takes on this rank, of those since the last exchange; it is part of the exchange."""
        now_s = time.monotonic()
        pace_s = (now_s - self._exchanged_s) / max(1, self._interval - self._left)
        self._exchanged_s = now_s
        return pace_s

    def agree(self, pace_s: float) -> None:
        """Set the number of batches until the next exchange, from the `seconds` of one rank that all have received."""
        self._left = self._interval = max(1, int(ASK_S / max(pace_s, 1e-6)))
