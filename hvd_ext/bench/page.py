"""The results in benchmarks/README.md; `python -m hvd_ext.bench.page RESULT.json benchmarks/README.md` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hvd_ext.bench.table import losses, seconds

BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def markdown(result: dict[str, Any]) -> str:
    """Write the result of a benchmark as Markdown.

    Args:
        result: what `allreduce.measure` returned.

    Returns:
        Machine, versions, a table with one row per number of ranks and size, and where we are slower.
    """
    machine, versions = result["machine"], result["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    lines = [
        f"{result['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; load before the start {machine['load_before']}. {named}. "
        f"Medians of {result['request']['repetitions']} samples; hvd_ext with the algorithm that `auto` chose.",
        "",
        "| ranks | bytes | no-op | MPI_Allreduce | Horovod graph | hvd_ext graph | algorithm | x MPI | x Horovod |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_place: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["algorithm"] in ("", "auto"):
            by_place.setdefault((row["ranks"], row["nbytes"]), {})[row["what"]] = row
    for (ranks, nbytes), rows in sorted(by_place.items()):
        times = [_time(rows.get(what)) for what in ("noop", "mpi", "horovod graph", "channel")]
        ours = rows.get("channel", {})
        ratios = [_ratio(ours.get("to_mpi")), _ratio(ours.get("to_horovod"))]
        cells = [str(ranks), f"{nbytes:,}", *times, ours.get("chosen", ""), *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in losses(result["rows"]))]) + "\n"


def _time(row: dict[str, Any] | None) -> str:
    return seconds(row["median_s"]) if row else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def rewritten(page: str, text: str) -> str:
    """Put a text between the marks of a page.

    Args:
        page: Markdown with the two marks.
        text: what comes between them.

    Returns:
        The new page.

    Raises:
        ValueError: when the marks are missing.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"page: it must have the marks {BEGIN.strip()} and {END.strip()}")
    return page[: page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END) :]


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(rewritten(target.read_text(), markdown(json.loads(source.read_text()))))
