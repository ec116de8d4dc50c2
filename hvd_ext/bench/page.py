"""The results in benchmarks/README.md; `python -m hvd_ext.bench.page RESULT.json benchmarks/README.md` writes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.bench.results import cluster_name, load, places, ratios
from hvd_ext.bench.table import faults, losses, ratio, seconds, words_of

BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
ONE_HOST = (
    "ranks",
    "bytes",
    "no-op",
    "MPI_Allreduce",
    "hvd_ext engine",
    "Horovod graph",
    "hvd_ext graph",
    "algorithm",
    "engine x MPI",
    "graph x Horovod",
)
SEVERAL_HOSTS = (
    "ranks",
    "bytes",
    "what",
    "median",
    "bound",
    "x bound",
    "price / median",
    "x MPI",
    "x Horovod",
    "saving over ring",
)


def markdown(result: Mapping[str, Any]) -> str:
    """Write the result of a benchmark as Markdown.

    Args:
        result: as `results.load` returns it.

    Returns:
        Machine, versions, a table, and where we are slower. On one host the table has a row per number of ranks and
        size, with the algorithm that "auto" chose; on several hosts every row is shown.
    """
    run, rows = result["runs"][0], result["rows"]
    machine, versions = run["machine"], run["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    counts = sorted({len(row["samples"]) for row in rows})
    samples = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    one_host = all(row["hosts"] == 1 for row in rows)
    headings, lines = (ONE_HOST, _one_host(rows)) if one_host else (SEVERAL_HOSTS, _several_hosts(rows))
    return "\n".join(
        [
            f"{run['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"{machine['system']}; load before the start {machine['load_before']}. {named}. Medians of {samples} "
            "samples.",
            "",
            _line(headings),
            "|" + "---|" * len(headings),
            *(_line(cells) for cells in lines),
            "",
            *(f"- {line}" for line in [*faults(rows), *losses(rows)]),
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def _one_host(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    lines = []
    for group in places(rows).values():
        by_name = {(row["algorithm"], row["how"]): row for row in group}

        def time_of(algorithm: str, how: str, by_name: dict[Any, Any] = by_name) -> str:
            row = by_name.get((algorithm, how))
            return seconds(row["seconds_median"]) if row else ""

        engine, graph = by_name.get(("auto", "engine")), by_name.get(("auto", "graph"))
        times = [
            time_of(*key)
            for key in (
                ("noop", "graph"),
                ("mpi", "engine"),
                ("auto", "engine"),
                ("horovod", "graph"),
                ("auto", "graph"),
            )
        ]
        beside = [ratio(ratios(row, group)[key]) if row else "" for row, key in ((engine, "mpi"), (graph, "horovod"))]
        chosen = (graph or engine or {"chosen": ""})["chosen"]
        lines.append([str(group[0]["ranks"]), f"{group[0]['bytes']:,}", *times, chosen, *beside])
    return lines


def _several_hosts(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    lines = []
    for group in places(rows).values():
        for row in group:
            beside = ratios(row, group)
            lines.append(
                [
                    cluster_name(row),
                    f"{row['bytes']:,}",
                    words_of(row),
                    seconds(row["seconds_median"]),
                    "" if row["bound_seconds"] is None else seconds(row["bound_seconds"]),
                    *(ratio(beside[key]) for key in ("bound", "predicted", "mpi", "horovod")),
                    "" if beside["saving"] is None else f"{beside['saving']:.1%}",
                ]
            )
    return lines


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
    target.write_text(rewritten(target.read_text(), markdown(load(source))))
