"""The file of a benchmark: runs and rows, and what rows of one place say about each other."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_ext.bench.machine import machine, versions
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import job_environment

BENCHMARK = "allreduce, float32, sum"
# Variables that change what is measured; they are kept with a run.
_KEPT = ("HVD_EXT_", "HOROVOD_", "OMPI_MCA_", "TF_NUM_")
_NOT_KEPT = ("HVD_EXT_LAUNCHER", "HVD_EXT_TOPOLOGY", "HVD_EXT_JOB")


def begin_run(launcher: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe a run before it begins.

    Args:
        launcher: how the jobs are started, in words.
        environ: the environment of the jobs; None for that of every job.

    Returns:
        Date, command, launcher, machine with its load, versions and the variables that change what is measured.
    """
    environ = job_environment() if environ is None else environ
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "hvd_ext", *sys.argv[1:]]),
        "launcher": launcher,
        "machine": machine(),
        "versions": versions(),
        "environment": {
            name: value for name, value in sorted(environ.items()) if name.startswith(_KEPT) and name not in _NOT_KEPT
        },
    }


def result_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the content of a file.

    Args:
        run: from `begin_run`, with what became known since.
        rows: of `allreduce.measure`.

    Returns:
        One run and its rows, each with the number of its run.
    """
    return {"benchmark": BENCHMARK, "runs": [dict(run)], "rows": [{"run": 0, **row} for row in rows]}


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Put one result behind another.

    Args:
        before: of earlier runs.
        after: of later ones.

    Returns:
        All runs and all rows; the later rows have new numbers of runs.
    """
    count = len(before["runs"])
    later = [{**row, "run": row["run"] + count} for row in after["rows"]]
    return {**before, "runs": [*before["runs"], *after["runs"]], "rows": [*before["rows"], *later]}


def load(path: Path, benchmark: str = BENCHMARK, command: str = "bench allreduce") -> dict[str, Any]:
    """Read a file.

    Args:
        path: of the file.
        benchmark: what the file must be of.
        command: that writes such files, for messages.

    Returns:
        Its content.

    Raises:
        InvalidError: it cannot be read, or is no result of this benchmark.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidError(f"file ({path}): it must be a result of {command}; it cannot be read: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != benchmark:
        raise InvalidError(f"file ({path}): it must be a result of {command}, and is something else")
    return result


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; see `text_of`.

    Args:
        path: of the file.
        result: its content.
    """
    half = path.with_name(path.name + ".part")
    half.write_text(text_of(result), encoding="utf-8")
    half.replace(path)


def text_of(result: Mapping[str, Any]) -> str:
    """Write a result as JSON whose lists have an item a line, so that a change of one row is a change of one line.

    Args:
        result: the content of a file.

    Returns:
        The text.
    """
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
    """Sort rows by place: only rows of one run, cluster and size are compared.

    Args:
        rows: of a result.

    Returns:
        By (run, ranks on each host, bytes), in that order, the rows as they came.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["run"], tuple(row["ranks_per_host"]), row["bytes"]), []).append(dict(row))
    return dict(sorted(found.items()))


def ratios(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Set a row beside what was expected and beside the others of its place; None where there is nothing beside it.

    Args:
        row: one of them.
        rows: all of the place.

    Returns:
        bound: median over the bound. predicted: the planner's price over the median. mpi, horovod: our median over
        theirs, below 1 where we are faster; Horovod's of the same kind of call. saving: the share of our ring's time
        that is saved, of the same kind of call.
    """
    median = row["seconds_median"]
    times = {(other["algorithm"], other["how"]): other["seconds_median"] for other in rows}
    ours = row["algorithm"] not in ("noop", "mpi", "horovod")

    def over(time_s: float | None) -> float | None:
        return median / time_s if time_s else None

    ring = times.get(("ring", row["how"])) if ours and row["algorithm"] != "ring" else None
    return {
        "bound": over(row["bound_seconds"]),
        "predicted": row["predicted_seconds"] / median if row["predicted_seconds"] is not None else None,
        "mpi": over(times.get(("mpi", "engine"))) if row["algorithm"] not in ("noop", "mpi") else None,
        "horovod": over(times.get(("horovod", row["how"]))) if ours else None,
        "saving": 1 - median / ring if ring else None,
    }
