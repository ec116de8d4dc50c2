"""The results on a page: `python -m benchmarks.studies page RESULTS PAGE...` writes the tables between a page's marks.

A mark names a file of the folder RESULTS: `<!-- results: allreduce_one_host.json -->`, up to `<!-- end of results -->`.
After the name there may be what is selected of the file's tables, as `markdown.excerpt` takes it:
`<!-- results: topk.json | columns: target; measured -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.studies import elastic, prices, replan, sent, skew
from benchmarks.studies.convergence import results as convergence, times
from benchmarks.studies.data import cached_pictures, results as data
from benchmarks.studies.hitopk import results as hitopk
from benchmarks.studies.lars import results as lars
from benchmarks.studies.markdown import excerpt, facts, table, where
from benchmarks.studies.recipe import results as recipe
from benchmarks.studies.schedule import results as schedule
from benchmarks.studies.stragglers import accuracy, lstm, results as stragglers
from benchmarks.studies.topk import results as topk
from hvd_ext.bench.breakdown import HEADINGS as BREAKDOWN_HEADINGS, cells as breakdown_cells, doubts as breakdown_doubts
from hvd_ext.bench.breakdown_worker import WHOLE
from hvd_ext.bench.results import ALLREDUCE, BREAKDOWN, TRAINING, YARDSTICKS, cluster_name, places, ratios
from hvd_ext.bench.table import (
    NAMES,
    faults,
    losses,
    processor,
    ratio,
    seconds,
    training_faults,
    training_words,
    words_of,
)

MARKED = re.compile(r"(<!-- results: (\S+)(?: \| ([^\n]*?))? -->\n)(.*?)(<!-- end of results -->\n)", re.DOTALL)
ONE_HOST = (
    *("ranks", "bytes", "no-op", "MPI_Allreduce", "hvd_ext engine", "Horovod graph", "hvd_ext graph", "algorithm"),
    *("engine x MPI", "graph x Horovod"),
)
TRAINED = ("model", "ranks", "what", "samples/s", "step", "communication", "x Horovod", "x Horovod, 2 links")
SEVERAL_HOSTS = (
    *("ranks", "bytes", "what", "median", "bound", "x bound", "price / median", "x MPI"),
    *("x Horovod", "saving over ring"),
)
MEASURED = ("x yardstick", "processor")
SIDE_BY_SIDE = "Median, and in brackets the processor time of all ranks, per GB of the buffer or per call"


def allreduce_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench allreduce as Markdown: machine, versions, a table, and where we are slower.

    On one host the table has a row for each number of ranks and size, with the algorithm that "auto" chose; on several
    hosts it has every row. Where a yardstick was measured, a second table has what is beside it.
    """
    rows = result["rows"]
    one_host = all(row["hosts"] == 1 for row in rows)
    written = table(ONE_HOST, _one_host(rows)) if one_host else _several_hosts(rows)
    beside = _beside_yardsticks(rows)
    return "\n".join(
        [facts(result), "", written, *beside, *(f"- {line}" for line in [*faults(rows), *losses(rows)]), ""]
    )


def training_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench training as Markdown: machine, versions, and a table with every row."""
    lines = []
    for row in result["rows"]:
        exposed = row["exposed_communication_seconds"]
        times = [seconds(row["step_seconds_median"]), "" if exposed is None else seconds(max(exposed, 0.0))]
        beside = [ratio(row["against_horovod"]), ratio(row["against_horovod_links2"])]
        place = [f"{row['model']}, {row['bytes'] / 1e6:.1f} MB", cluster_name(row)]
        lines.append([*place, training_words(row), f"{row['samples_per_second']:.4g}", *times, *beside])
    wrong = "".join(f"- {line}\n" for line in training_faults(result["rows"]))
    return f"{facts(result)}\n\n{table(TRAINED, lines)}" + (f"\n{wrong}" if wrong else "")


def breakdown_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench breakdown as Markdown: machine, versions, a table of all rows, what does not add up."""
    rows = result["rows"]
    said = "".join(f"- {line}\n" for line in breakdown_doubts(rows))
    told = f"{where(result['runs'][0])} Milliseconds, medians of {len(rows[0]['samples'][WHOLE])} samples, in turns."
    return f"{told}\n\n{table(BREAKDOWN_HEADINGS, map(breakdown_cells, rows))}\n{said}"


def _one_host(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    lines = []
    for group in places(rows).values():
        by_name = {(row["algorithm"], row["how"]): row for row in group}

        def time_of(algorithm: str, how: str, by_name: dict[Any, Any] = by_name) -> str:
            row = by_name.get((algorithm, how))
            return seconds(row["seconds_median"]) if row else ""

        engine, graph = by_name.get(("auto", "engine")), by_name.get(("auto", "graph"))
        kinds = (("noop", "graph"), ("mpi", "engine"), ("auto", "engine"), ("horovod", "graph"), ("auto", "graph"))
        times = [time_of(*key) for key in kinds]
        beside = [ratio(ratios(row, group)[key]) if row else "" for row, key in ((engine, "mpi"), (graph, "horovod"))]
        chosen = (graph or engine or {"chosen": ""})["chosen"]
        lines.append([str(group[0]["ranks"]), f"{group[0]['bytes']:,}", *times, chosen, *beside])
    return lines


def _beside_yardsticks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a table for each yardstick, with a row for each cluster and size; the first algorithm of ours counts."""
    parts = []
    for yardstick in YARDSTICKS:
        columns = {
            yardstick: (yardstick, "engine"),
            "MPI_Allreduce": ("mpi", "engine"),
            "hvd_ext engine": ("", "engine"),
            "Horovod graph": ("horovod", "graph"),
            "hvd_ext graph": ("", "graph"),
        }
        lines = []
        for group in places(rows).values():
            found = {
                (row["algorithm"] if row["algorithm"] in NAMES else "", row["how"]): row for row in reversed(group)
            }
            if (yardstick, "engine") not in found:
                continue
            cells = [
                f"{seconds(row['seconds_median'])} ({processor(row)})" if (row := found.get(key)) else ""
                for key in columns.values()
            ]
            engine, graph = (ratios(row, group) if (row := found.get(("", how))) else {} for how in ("engine", "graph"))
            beside = (engine.get("yardstick"), graph.get("yardstick"), graph.get("horovod"))
            lines.append([cluster_name(group[0]), f"{group[0]['bytes']:,}", *cells, *map(ratio, beside)])
        if lines:
            headings = ("ranks", "bytes", *columns, f"engine x {yardstick}", f"graph x {yardstick}", "graph x Horovod")
            parts += [f"{SIDE_BY_SIDE}:", "", table(headings, lines)]
    return parts


def _several_hosts(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    # files of older versions have neither a yardstick nor processor times
    measured = any("processor_seconds_per_gb" in row for row in rows)
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
                    *([ratio(beside["yardstick"]), processor(row)] if measured else []),
                ]
            )
    return table((*SEVERAL_HOSTS, *(MEASURED if measured else ())), lines)


def _behind(facts_of: Callable[[Any], str], markdown: Callable[[Any], str], result: Mapping[str, Any]) -> str:
    """Write a result behind what it was measured on."""
    return "\n\n".join([*filter(None, [facts_of(result)]), markdown(result)])


def _machine(result: Mapping[str, Any]) -> str:
    return where(result.get("runs", [result])[0])


def _samples(result: Mapping[str, Any]) -> str:
    measured = [row for row in result["rows"] if not row.get("simulated")]
    return facts({**result, "rows": measured}) if measured else ""


# By benchmark: what writes a result as Markdown.
MARKDOWN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    ALLREDUCE: allreduce_markdown,
    TRAINING: training_markdown,
    BREAKDOWN: breakdown_markdown,
    **{study.BENCHMARK: study.markdown for study in (data, lars, schedule, stragglers, topk)},
    **{study.BENCHMARK: partial(_behind, _samples, study.markdown) for study in (hitopk, lstm, prices, replan, skew)},
    **{
        study.BENCHMARK: partial(_behind, _machine, study.markdown)
        for study in (accuracy, cached_pictures, convergence, elastic, recipe, sent, times)
    },
}


def rewritten(page: str, folder: Path) -> str:
    """Put the results, files of the folder, between the marks of a page.

    Raises:
        ValueError: the page has no marks, or one selects what is not there.
        OSError: a file that a mark names is not there.
    """
    if not MARKED.search(page):
        raise ValueError("page: it must have marks such as <!-- results: allreduce_one_host.json -->")

    def filled(found: re.Match[str]) -> str:
        result = json.loads((folder / found[2]).read_text(encoding="utf-8"))
        text = MARKDOWN[result["benchmark"]](result)
        return found[1] + (excerpt(text, found[3]) if found[3] else text) + found[5]

    return MARKED.sub(filled, page)


def whole(folder: Path) -> str:
    """Write a page with the whole tables of all results, files of the folder."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    known = {name: result for name, result in found.items() if result.get("benchmark") in MARKDOWN}
    return "\n".join(f"# {name}\n\n{MARKDOWN[result['benchmark']](result)}" for name, result in known.items())
