"""The times of steps at several rates, models and clusters, of runs of `convergence --seeds time`, as one table.

    python -m benchmarks.studies.convergence.times FILE.json FOLDER...

Each folder has the runs of one plan; a run of an earlier folder is replaced by the same run of a later one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.convergence.plan import BENCHMARK as RUN
from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.bench.table import seconds
from hvd_ext.cluster.spec import rate_bits
from hvd_ext.errors import InvalidError

BENCHMARK = "times of steps"


def collected(folders: Iterable[Path]) -> dict[str, Any]:
    """Make the content of one file, with a row for each run.

    Raises:
        InvalidError: a folder has no such run.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    about: list[dict[str, Any]] = []
    for folder in folders:
        files = sorted(folder.glob("*_time.json"), key=lambda path: path.stat().st_mtime)  # the plan's order
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        if not runs or any(run.get("benchmark") != RUN for run in runs):
            raise InvalidError(f"folder ({folder}): it must have runs of convergence --seeds time")
        for run in runs:
            facts = run["facts"]
            row = {name: facts[name] for name in ("hosts", "model", "setting", "rate", "how")}
            row |= {name: run[name] for name in ("parameters", "date", "step_seconds")}
            row["predicted_step_seconds"] = run.get("predicted_step_seconds")
            found[tuple(facts["hosts"]), facts["model"], facts["setting"], facts["rate"]] = row
            about.append({name: run[name] for name in ("date", "machine", "versions")})
    return {"benchmark": BENCHMARK, **min(about, key=lambda one: one["date"]), "rows": list(found.values())}


def markdown(result: Mapping[str, Any]) -> str:
    """Write a line for each cluster, model and setting: the median step at each rate, and the predicted one over it."""
    rates = sorted({row["rate"] for row in result["rows"]}, key=rate_bits)
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        place = " + ".join(map(str, row["hosts"])), row["model"], row["setting"]
        median, rate = statistics.median(row["step_seconds"]), row["rate"]
        cells = lines.setdefault(place, {})
        cells[rate] = seconds(median)
        if row.get("predicted_step_seconds"):  # not in local steps, with PyTorch, and before buckets are planned again
            cells[f"{rate} predicted"] = f"{row['predicted_step_seconds'] / median:.2f}"
    predicted = [f"{rate} predicted" for rate in rates]
    columns = [*rates, *(column for column in predicted if any(column in cells for cells in lines.values()))]
    return table(
        ("ranks", "model", "setting", *(column.replace("bit", "bit/s") for column in columns)),
        [[*place, *(cells.get(column, "") for column in columns)] for place, cells in lines.items()],
    )


def main(arguments: Sequence[str]) -> None:
    """Write the file and print its table."""
    if len(arguments) < 2:
        raise SystemExit(__doc__)
    found = collected(map(Path, arguments[1:]))
    results.save(Path(arguments[0]), found)
    print(markdown(found))


if __name__ == "__main__":
    main(sys.argv[1:])
