"""When the gradients of a step are ready: the model of a training, measured from its trace or read from a file.

The file is CSV: a line `forward_seconds,VALUE`, if it is known a line `update_seconds,VALUE`, the header
`name,elements,backward_seconds`, and a line for each float32 tensor in the order in which back-propagation makes the
gradients. A gradient is ready when the forward pass and the backward passes of all lines up to its own have ended.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hvd_ext.errors import PlanError
from hvd_ext.planning import contention
from hvd_ext.planning.tensors import Tensor

HEADER = ("name", "elements", "backward_seconds")
_ELEMENT_NBYTES = 4  # the file's tensors are float32


@dataclass(frozen=True)
class StepTimes:
    """The computation of a step.

    Args:
        tensors: the tensors in the order of the model's layers.
        ready_s: for each tensor the time at which its gradient is ready, seconds from the begin of the step.
        forward_s: the time of the forward pass, seconds.
        update_s: the time of the update of the weights, seconds; None if it is not known.
        rows: what travels on its own beside the buckets, such as the rows of embeddings: for each the time at which it
            is ready, seconds, and the bytes that all ranks together gather. A file does not have them.
        contention: by how many seconds a second of communication delays the computing beside it
            (`planning/contention.py`). The times of the tensors are those without communication. A file does not have
            it.
        late: by which share steps have taken longer than predicted from such times; 0 if they have not.

    Raises:
        PlanError: the numbers of tensors and times differ, a time is negative or not finite, or the contention is not
            between 0 and `contention.MOST`.
    """

    tensors: tuple[Tensor, ...]
    ready_s: tuple[float, ...]
    forward_s: float = 0.0
    update_s: float | None = None
    rows: tuple[tuple[float, int], ...] = ()
    contention: float = 0.0
    late: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.ready_s):
            raise PlanError(
                f"step times: {len(self.tensors)} tensors have {len(self.ready_s)} times; both must be equal"
            )
        for what, value in [
            ("forward_s", self.forward_s),
            ("update_s", self.update_s or 0.0),
            ("late", self.late),
            *(("rows", value) for row in self.rows for value in row),
            *((f"tensor {tensor.name!r}", ready) for tensor, ready in zip(self.tensors, self.ready_s, strict=True)),
        ]:
            if not 0 <= value < math.inf:
                raise PlanError(f"step times, {what} ({value}): must be a finite number, 0 or more")
        if not 0 <= self.contention <= contention.MOST:
            raise PlanError(f"step times, contention ({self.contention}): must be between 0 and {contention.MOST}")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places of the tensors in ready order."""
        return ready_order(self.ready_s)

    @cached_property
    def computed_s(self) -> float:
        """The end of the backward pass, seconds from the begin of the step."""
        return max([self.forward_s, *self.ready_s])


def ready_order(ready_s: Sequence[float]) -> tuple[int, ...]:
    """Sorts the places of tensors by the time at which they are ready; of equal times the later layer comes first."""
    return tuple(sorted(range(len(ready_s)), key=lambda place: (ready_s[place], -place)))


def read(path: str | Path) -> StepTimes:
    """Reads a model file in the format that the module's docstring describes.

    Returns:
        The step; its tensors have one dimension.

    Raises:
        PlanError: the file is missing, is not text, or a line breaks the format; the message has the line's number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"model file {path}: it cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"model file {path}: it is not UTF-8 text: {error}") from error
    return parse(text, str(path))


def parse(text: str, source: str = "text") -> StepTimes:
    """Reads a model from text in the format that the module's docstring describes.

    Returns:
        The step; its tensors have one dimension.

    Raises:
        PlanError: a line breaks the format.
    """
    seconds: dict[str, float] = {}
    tensors: list[Tensor] = []
    ready_s: list[float] = []
    headed = False
    reader = csv.reader(io.StringIO(text))
    for cells in reader:
        where = f"model file {source}, line {reader.line_num}"
        row = [cell.strip() for cell in cells]
        if not any(row):
            continue
        if headed:
            if len(row) != len(HEADER):
                raise PlanError(f"{where}: must be {','.join(HEADER)}, got {len(row)} values: {','.join(row)!r}")
            name, elements, backward = row
            if any(name == tensor.name for tensor in tensors):
                raise PlanError(f"{where}: tensor {name!r} is there twice; each name must be there once")
            if not elements.isdecimal():
                raise PlanError(f"{where}: elements ({elements!r}): must be a whole number, 0 or more")
            before_s = ready_s[-1] if ready_s else seconds["forward_seconds"]
            tensors.append(Tensor(name, (int(elements),), "float32"))
            ready_s.append(before_s + _seconds(backward, f"{where}: backward_seconds"))
        elif tuple(row) == HEADER:
            if "forward_seconds" not in seconds:
                raise PlanError(f"{where}: a line 'forward_seconds,VALUE' must come before the header")
            headed = True
        elif len(row) == 2 and row[0] in ("forward_seconds", "update_seconds") and row[0] not in seconds:
            seconds[row[0]] = _seconds(row[1], f"{where}: {row[0]}")
        else:
            raise PlanError(
                f"{where}: must be 'forward_seconds,VALUE', 'update_seconds,VALUE' or the header "
                f"{','.join(HEADER)!r}, each once, got {','.join(row)!r}"
            )
    if not headed:
        raise PlanError(f"model file {source}: the header {','.join(HEADER)!r} is missing")
    return StepTimes(
        tuple(reversed(tensors)),
        tuple(reversed(ready_s)),
        seconds["forward_seconds"],
        seconds.get("update_seconds"),
    )


def write(times: StepTimes, path: str | Path) -> None:
    """Writes a model file in the format that the module's docstring describes.

    Args:
        times: the step. The file knows float32 only, so that a tensor of another dtype is written with the number of
            elements that has its bytes, rounded up; a gradient that is ready before the forward pass has ended is
            written as ready at its end.

    Raises:
        OSError: the file cannot be written.
    """
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("forward_seconds", repr(times.forward_s)))
    if times.update_s is not None:
        lines.writerow(("update_seconds", repr(times.update_s)))
    lines.writerow(HEADER)
    before_s = times.forward_s
    for place in times.order:
        ready_s = max(times.ready_s[place], before_s)
        tensor = times.tensors[place]
        lines.writerow((tensor.name, -(-tensor.nbytes // _ELEMENT_NBYTES), repr(ready_s - before_s)))
        before_s = ready_s
    Path(path).write_text(out.getvalue(), encoding="utf-8")


def _seconds(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise PlanError(f"{what} ({text!r}): must be a finite number of seconds, 0 or more")
    return value
