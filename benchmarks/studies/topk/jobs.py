"""The benchmark of top-k: what is asked for, the processes that measure it, and how their samples are compared."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.topk.inputs import INPUTS, ORDINARY
from benchmarks.studies.topk.worker import EVENTS, EVICT_BYTES, Task
from hvd_ext.bench.jobs import events_of
from hvd_ext.bench.sampling import Follower
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, job_environment

NAMES = {
    "noop": "no-op",
    "noop-graph": "no-op in a tf.function",
    "exact": "hvd_ext.mstopk",
    "graph": "hvd_ext.mstopk in a tf.function",
    "segments": "hvd_ext.mstopk, 161 segments",
    "feedback": "hvd_ext.topk_error_feedback",
    "separate": "add, hvd_ext.mstopk, zeros",
    "mstopk": "mode mstopk (Algorithm 1, guarded)",
    "dgc": "mode dgc",
    "threshold": "mode threshold",
    "random": "mode random",
    "algorithm1": "Algorithm 1 as printed, C++",
    "algorithm1-tf": "Algorithm 1 as printed, TensorFlow",
    "dgc-tf": "DGC, TensorFlow",
    "tf": "tf.math.top_k",
    "torch": "torch.topk",
    "numpy": "np.argpartition",
}
# The no-op beside which ours is dispatched as well.
NOOPS = {"exact": "noop", "graph": "noop-graph"}
# Measured on the hard inputs: ours, and the algorithm whose thresholds fail there.
FOR_HARD = ("noop", "exact", "segments", "algorithm1")
# More threads change nothing in these.
ONE_THREAD = ("feedback", "separate", "algorithm1", "numpy")
WORKER = (sys.executable, "-m", "benchmarks.studies.topk.worker")
NO_TORCH = "torch.topk is left out: PyTorch is not installed (python -m pip install torch)"
NO_GPU = "no row of a GPU: this machine has none"
GPU_UNUSED = (
    "no row of a GPU: everything here was measured on the processor; the kernels of {gpus} are measured by "
    "python tests/native/gpu/compare_torch.py"
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        elements: lengths of the inputs, float32.
        densities: of the selections, above 0, at most 1.
        inputs: names, see `inputs.make`.
        contestants: keys of `NAMES`; of the hard inputs only those of `FOR_HARD`.
        threads: numbers of threads, measured one after the other; `ONE_THREAD` are measured with one alone.
        repetitions: samples of a row at most.
        seconds_per_row: slow contestants have fewer samples, at least 3.
        timeout_s: longest time without a new row.
        evict_bytes: how much is read before a call, so that its input is in no cache.
    """

    elements: tuple[int, ...] = (25_000_000,)
    densities: tuple[float, ...] = (0.001, 0.01)
    inputs: tuple[str, ...] = INPUTS
    contestants: tuple[str, ...] = tuple(NAMES)
    threads: tuple[int, ...] = (1,)
    repetitions: int = 25
    seconds_per_row: float = 3.0
    timeout_s: float = 900.0
    evict_bytes: int = EVICT_BYTES

    def __post_init__(self) -> None:
        for what, values in dataclasses.asdict(self).items():
            if isinstance(values, tuple) and not values:
                raise InvalidError(f"{what}: name at least one")
            if isinstance(values, tuple) and len(set(values)) < len(values):
                raise InvalidError(f"{what} ({', '.join(map(str, values))}): each must be named only once")
        for what, values, valid in (
            ("input", self.inputs, INPUTS),
            ("contestant", self.contestants, tuple(NAMES)),
        ):
            for value in values:
                if value not in valid:
                    raise InvalidError(f"{what} ({value!r}): must be one of {', '.join(valid)}")
        for elements in self.elements:
            if not 1 <= elements < 2**31:
                raise InvalidError(f"elements ({elements}): must be from 1 to 2^31 - 1")
        for density in self.densities:
            if not 0 < density <= 1:
                raise InvalidError(f"density ({density:g}): must be above 0 and at most 1")
        for what, value in (("threads", min(self.threads)), ("repetitions", self.repetitions)):
            if value < 1:
                raise InvalidError(f"{what} ({value}): must be at least 1")
        for what, limit in (("seconds per row", self.seconds_per_row), ("timeout", self.timeout_s)):
            if limit <= 0:
                raise InvalidError(f"{what} ({limit:g}): must be above 0")

    def task(self, folder: Path, threads: int) -> Task:
        """Give the task of the process with this number of threads; it writes its events into the folder."""
        named = [name for name in self.contestants if threads == 1 or name not in ONE_THREAD]
        hard = [name for name in named if name in FOR_HARD]
        return Task(
            folder=str(folder),
            elements=self.elements,
            densities=self.densities,
            inputs=self.inputs,
            contestants={name: tuple(named if name in ORDINARY else hard) for name in self.inputs},
            threads=threads,
            repetitions=self.repetitions,
            seconds_per_row=self.seconds_per_row,
            evict_bytes=self.evict_bytes,
        )

    def groups(self) -> int:
        """Give the number of selections: inputs times densities times numbers of threads."""
        return len(self.threads) * len(self.elements) * len(self.inputs) * len(self.densities)


def measure(
    request: Request, tell: Callable[[str, int], None] = lambda title, ready: None
) -> tuple[list[Any], list[str]]:
    """Measure, with one process for each number of threads.

    Args:
        request: what to measure.
        tell: takes what runs now, and how many of the request's groups have just become ready.

    Returns:
        Rows, with what `summary` and `with_ratios` add to them, and notes on what could not be measured.

    Raises:
        JobError: a process failed, or told nothing for too long.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hvd_ext_topk_") as place:
        folder = Path(place)
        for threads in request.threads:
            (folder / EVENTS).unlink(missing_ok=True)
            command = [*WORKER, request.task(folder, threads).write()]
            numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
            follower, last = Follower(folder / EVENTS), None
            with Job(command, folder / "log", job_environment(**numbers)) as job:
                for event in events_of(job, follower, request.timeout_s, "topk"):
                    if event["kind"] == "hello":
                        notes += [note for note in _notes(event, request) if note not in notes]
                        continue
                    row = {**event["row"], **summary(event["row"])}
                    where = (row["elements"], row["input"], row["density"])
                    tell(f"{row['elements']:,} {row['input']}, {threads} threads", int(where != last))
                    last = where
                    rows.append(row)
    return with_ratios(rows), notes


def _notes(hello: Mapping[str, Any], request: Request) -> list[str]:
    torch = [NO_TORCH] if "torch" in request.contestants and not hello["torch"] else []
    gpus = ", ".join(hello["gpus"])
    return [*torch, GPU_UNUSED.format(gpus=gpus) if gpus else NO_GPU]


def summary(row: Mapping[str, Any]) -> dict[str, float]:
    """Sum up the samples of a row.

    Args:
        row: has samples and yardstick_samples, seconds, in pairs, the same with "cpu_" before, and elements.

    Returns:
        Medians and minima; x_yardstick: the median of the paired ratios; x_yardstick_cpu: the same of the processor's
        time; x_yardstick_min: the least time over the yardstick's least time; ns_per_element of the median.
    """
    median = statistics.median(row["samples"])
    return {
        "seconds_median": median,
        "seconds_min": min(row["samples"]),
        "yardstick_seconds_median": statistics.median(row["yardstick_samples"]),
        "yardstick_seconds_min": min(row["yardstick_samples"]),
        "x_yardstick": _paired(row["samples"], row["yardstick_samples"]),
        "x_yardstick_cpu": _paired(row["cpu_samples"], row["cpu_yardstick_samples"]),
        "x_yardstick_min": min(row["samples"]) / min(row["yardstick_samples"]),
        "ns_per_element": median / row["elements"] * 1e9,
    }


def _paired(samples: Sequence[float], yardsticks: Sequence[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(samples, yardsticks, strict=True))


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare every row with other rows of the same input, over the rounds that both were called in.

    Returns:
        The rows with x_ours: the median of the row's time over that of `hvd_ext.mstopk`; and, for ours, x_less_noop:
        the median of the row's time less that of a no-op, over the yardstick's. None without such rounds.
    """

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["threads"], row["elements"], row["input"], row["density"]

    times = {(place(row), row["contestant"]): dict(zip(row["rounds"], row["samples"], strict=True)) for row in rows}

    def medians(row: Mapping[str, Any], other: str, compare: Callable[[float, float, float], float]) -> float | None:
        theirs = times.get((place(row), other), {})
        samples = zip(row["rounds"], row["samples"], row["yardstick_samples"], strict=True)
        both = [compare(mine, theirs[turn], least) for turn, mine, least in samples if turn in theirs]
        return statistics.median(both) if both else None

    return [
        {
            **row,
            "x_ours": medians(row, "exact", lambda mine, ours, _: mine / ours),
            "x_less_noop": medians(row, NOOPS.get(row["contestant"], ""), lambda mine, no, least: (mine - no) / least),
        }
        for row in rows
    ]
