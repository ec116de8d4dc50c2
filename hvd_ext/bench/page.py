"""The results on a page: `python -m hvd_ext.bench.page RESULTS PAGE...` writes the tables between a page's marks.

A mark names a file of the folder RESULTS: `<!-- results: allreduce_one_host.json -->`, up to `<!-- end of results -->`.
Behind the name there may be what is selected of the file's tables, as `excerpt.excerpt` takes it:
`<!-- results: topk.json | columns: target; measured -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.bench import convergence_results, hitopk_results, topk_results, training_results
from hvd_ext.bench.excerpt import excerpt
from hvd_ext.bench.results import BENCHMARK, cluster_name, load, places, ratios
from hvd_ext.bench.table import faults, losses, ratio, seconds, words_of

MARKED = re.compile(r"(<!-- results: (\S+)(?: \| ([^\n]*?))? -->\n)(.*?)(<!-- end of results -->\n)", re.DOTALL)
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
TRAINING = ("model", "ranks", "what", "samples/s", "step", "communication", "x Horovod", "x Horovod, 2 links")
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
    rows = result["rows"]
    one_host = all(row["hosts"] == 1 for row in rows)
    headings, lines = (ONE_HOST, _one_host(rows)) if one_host else (SEVERAL_HOSTS, _several_hosts(rows))
    table = [_line(headings), "|" + "---|" * len(headings), *(_line(cells) for cells in lines)]
    return "\n".join([_facts(result), "", *table, "", *(f"- {line}" for line in [*faults(rows), *losses(rows)]), ""])


def training_markdown(result: Mapping[str, Any]) -> str:
    """Write the result of the training benchmark as Markdown.

    Args:
        result: as `training_results.load` returns it.

    Returns:
        Machine, versions, and a table with every row.
    """
    lines = []
    for row in result["rows"]:
        exposed = row["exposed_communication_seconds"]
        times = [seconds(row["step_seconds_median"]), "" if exposed is None else seconds(max(exposed, 0.0))]
        beside = [ratio(row["against_horovod"]), ratio(row["against_horovod_links2"])]
        place = [f"{row['model']}, {row['bytes'] / 1e6:.1f} MB", cluster_name(row)]
        lines.append([*place, training_results.words_of(row), f"{row['samples_per_second']:.4g}", *times, *beside])
    table = [_line(TRAINING), "|" + "---|" * len(TRAINING), *(_line(cells) for cells in lines)]
    wrong = [f"- {line}" for line in training_results.faults(result["rows"])]
    return "\n".join([_facts(result), "", *table, *([""] if wrong else []), *wrong, ""])


def _facts(result: Mapping[str, Any]) -> str:
    counts = sorted({len(row["samples"]) for row in result["rows"]})
    samples = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{_where(result['runs'][0])} Medians of {samples} samples."


def _where(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return (
        f"{run['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}; load before the start {machine['load_before']}. {named}."
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


def rewritten(page: str, folder: Path) -> str:
    """Put the results between the marks of a page.

    Args:
        page: Markdown.
        folder: where the files are that the marks name.

    Returns:
        The new page.

    Raises:
        ValueError: the page has no marks, or one selects what is not there.
        OSError: a file that a mark names is not there.
    """
    if not MARKED.search(page):
        raise ValueError("page: it must have marks such as <!-- results: allreduce_one_host.json -->")

    def filled(found: re.Match[str]) -> str:
        whole = _markdown_of(folder / found[2])
        return found[1] + (excerpt(whole, found[3]) if found[3] else whole) + found[5]

    return MARKED.sub(filled, page)


def _markdown_of(path: Path) -> str:
    kind = json.loads(path.read_text(encoding="utf-8"))["benchmark"]
    if kind == topk_results.BENCHMARK:
        found = topk_results.load(path)
        return topk_results.markdown(found, _facts(found))
    if kind == hitopk_results.BENCHMARK:
        found = hitopk_results.load(path)
        measured = [row for row in found["rows"] if not row["simulated"]]
        told = f"{_facts({**found, 'rows': measured})}\n\n" if measured else ""
        return told + hitopk_results.markdown(found)
    if kind == convergence_results.BENCHMARK:
        found = convergence_results.load(path)
        return f"{_where(found)}\n\n{convergence_results.markdown(found)}"
    return markdown(load(path)) if kind == BENCHMARK else training_markdown(training_results.load(path))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        Path(name).write_text(rewritten(Path(name).read_text(), Path(sys.argv[1])))
