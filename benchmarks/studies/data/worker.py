"""A process that measures a part of the data benchmark: `python -m benchmarks.studies.data.worker TASK`.

Each part is a module with a function `measure(task, tell)`; it tells samples to the parent as events of a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.bench.sampling import EVENTS, Argument, emit
from hvd_ext.errors import HvdExtError

# Tells samples: what they are of, and their values.
Tell = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Task(Argument):
    """What a process is told.

    Attributes:
        part: a key of `jobs.PARTS`, and the module that measures it.
        folder: for events and for everything that is written.
        scale: the share of the full number of samples, above 0.
        repetitions: samples of a figure.
        contestants: the names that are measured here.
        facts: what a part needs besides.
    """

    part: str
    folder: str
    scale: float = 1.0
    repetitions: int = 5
    contestants: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def count(self, whole: int, multiple: int) -> int:
        """Scale a number of samples; it stays a multiple of `multiple`, and at least two of it."""
        return max(round(whole * self.scale / multiple), 2) * multiple

    def path(self, *names: str) -> Path:
        """Give a path in the folder of the task."""
        return Path(self.folder).joinpath(*names)


def teller(task: Task) -> Tell:
    """Make the function by which a part tells samples.

    It takes place, contestant, quantity and samples, which name the row, and as keywords what else the row shall have.
    """

    def tell(place: str, contestant: str, quantity: str, samples: Sequence[float], **facts: Any) -> None:
        named = {"place": place, "contestant": contestant, "quantity": quantity}
        emit(task.path(EVENTS), "samples", **named, samples=[float(one) for one in samples], facts=facts)

    return tell


def main(arguments: Sequence[str]) -> int:
    """Measure the task that is the only argument; give the exit status."""
    task = Task.read(arguments[0])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        importlib.import_module(f"benchmarks.studies.data.{task.part}").measure(task, teller(task))
    except HvdExtError as error:
        print(f"data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
