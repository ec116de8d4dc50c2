"""The results on a page: `python -m benchmarks.studies page RESULTS PAGE...` writes the tables between a page's marks.

A mark names a file of the folder RESULTS: `<!-- results: allreduce_one_host.json -->`, up to `<!-- end of results -->`.
After the name there may be what is selected of the file's tables, as `markdown.excerpt` takes it:
`<!-- results: topk.json | columns: target; measured -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import cached_pictures, prices, replan, skew, stragglers_accuracy, stragglers_lstm
from benchmarks.studies.convergence import results as convergence
from benchmarks.studies.hitopk import results as hitopk
from benchmarks.studies.markdown import excerpt, table
from benchmarks.studies.recipe import results as recipe
from benchmarks.studies.topk_targets import HEADINGS as TARGETS, cells_of, verdicts_of
from hvd_ext.bench.breakdown import HEADINGS as BREAKDOWN_HEADINGS, cells as breakdown_cells, doubts as breakdown_doubts
from hvd_ext.bench.breakdown_worker import WHOLE
from hvd_ext.bench.data_table import HEADINGS as DATA_HEADINGS, cells_of as data_cells, data_faults, place_of, runs_of
from hvd_ext.bench.lars import HEADINGS as LARS_HEADINGS, cells as lars_cells, goals as lars_goals
from hvd_ext.bench.results import (
    ALLREDUCE,
    BREAKDOWN,
    DATA,
    LARS,
    SCHEDULE,
    STRAGGLERS,
    TOPK,
    TRAINING,
    YARDSTICKS,
    cluster_name,
    load,
    places,
    ratios,
)
from hvd_ext.bench.table import (
    NAMES,
    STRAGGLERS_HEADINGS,
    TOPK_NAMES,
    faults,
    losses,
    processor,
    ratio,
    schedule_faults,
    schedule_words,
    seconds,
    stragglers_cells,
    stragglers_faults,
    topk_faults,
    topk_places,
    topk_share,
    training_faults,
    training_words,
    words_of,
)
from hvd_ext.bench.topk_inputs import ORDINARY

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
TRAINED = ("model", "ranks", "what", "samples/s", "step", "communication", "x Horovod", "x Horovod, 2 links")
REPLAYED = (
    "model",
    "ranks",
    "ratio",
    "bucketer",
    "buckets",
    "predicted",
    "step",
    "x predicted",
    "exposed",
    "x best",
    "x single",
    "late",
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
        [_facts(result), "", written, *beside, *(f"- {line}" for line in [*faults(rows), *losses(rows)]), ""]
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
    return f"{_facts(result)}\n\n{table(TRAINED, lines)}" + (f"\n{wrong}" if wrong else "")


def schedule_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench schedule as Markdown: machine, versions, and a table with every row."""
    lines = [
        [
            f"{row['model']}, {row['bytes'] / 1e6:.1f} MB",
            cluster_name(row),
            f"{row['ratio']:.3g}",
            schedule_words(row),
            str(len(row["buckets"])),
            seconds(row["predicted_seconds"]),
            seconds(row["seconds_median"]),
            ratio(row["x_predicted"]),
            seconds(max(row["exposed_seconds"], 0.0)),
            ratio(row["x_best"]),
            ratio(row["x_single"]),
            seconds(row["late_seconds_p99"]),
        ]
        for row in result["rows"]
    ]
    wrong = "".join(f"- {line}\n" for line in schedule_faults(result["rows"]))
    return f"{_facts(result)}\n\n{table(REPLAYED, lines)}" + (f"\n{wrong}" if wrong else "")


def stragglers_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench stragglers as Markdown: machine, versions, and a table with every row."""
    lines = [[cluster_name(row), row["workload"], *stragglers_cells(row)] for row in result["rows"]]
    wrong = "".join(f"- {line}\n" for line in stragglers_faults(result["rows"]))
    told = f"{_where(result['runs'][0])} Means of {result['rows'][0]['steps']} steps."
    return f"{told}\n\n{table(STRAGGLERS_HEADINGS, lines)}" + (f"\n{wrong}" if wrong else "")


def data_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench data as Markdown: machine, versions, a table with every row, what was wrong, notes."""
    lines = [[*place_of(row), *data_cells(row, rows)] for row, rows in runs_of(result["rows"])]
    said = [*data_faults(result["rows"]), *(note for run in result["runs"] for note in run.get("notes", []))]
    written = "".join(f"- {line}\n" for line in said)
    return f"{_facts(result)}\n\n{table(DATA_HEADINGS, lines)}" + (f"\n{written}" if written else "")


def lars_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench lars as Markdown: machine, versions, a table with every row, the goals."""
    said = "".join(f"- {line}\n" for line in lars_goals(result["rows"]))
    told = f"{_where(result['runs'][0])} Medians of {len(result['rows'][0]['seconds_samples'])} samples, in turns."
    return f"{told}\n\n{table(LARS_HEADINGS, map(lars_cells, result['rows']))}\n{said}"


def breakdown_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench breakdown as Markdown: machine, versions, a table of all rows, what does not add up."""
    rows = result["rows"]
    said = "".join(f"- {line}\n" for line in breakdown_doubts(rows))
    told = f"{_where(result['runs'][0])} Milliseconds, medians of {len(rows[0]['samples'][WHOLE])} samples, in turns."
    return f"{told}\n\n{table(BREAKDOWN_HEADINGS, map(breakdown_cells, rows))}\n{said}"


def topk_markdown(result: Mapping[str, Any]) -> str:
    """Write a result of bench topk as Markdown.

    The goals come first; then each place has a table of contestants and inputs, with the hard inputs apart. If there is
    one input and several lengths, there is one table of contestants and lengths instead.
    """
    rows = result["rows"]
    if len({row["input"] for row in rows}) == 1 < len({row["elements"] for row in rows}):
        return "\n".join([_facts(result), "", *_lengths(rows)])
    parts = [_facts(result), ""]
    if verdicts := verdicts_of(rows):
        parts.append(table(TARGETS, map(cells_of, verdicts)))
    for (_, place), group in topk_places(rows).items():
        present = list(dict.fromkeys(row["input"] for row in group))
        for title, inputs in (
            (f"{place}:", [name for name in present if name in ORDINARY]),
            (f"{place}, hard inputs:", [name for name in present if name not in ORDINARY]),
        ):
            if inputs:
                parts += [title, "", _contestants(("what", *inputs), group, "input", inputs)]
    parts += [f"- {line}" for line in [*topk_faults(rows), *result["runs"][0].get("notes", [])]]
    return "\n".join([*parts, ""])


def _lengths(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for share in dict.fromkeys(topk_share(row) for row in rows):
        here = [row for row in rows if topk_share(row) == share]
        lengths = sorted({row["elements"] for row in here})
        headings = ("elements", *(f"{length:,}" for length in lengths))
        parts += [f"{share}, {rows[0]['input']}:", "", _contestants(headings, here, "elements", lengths)]
    return parts


def _contestants(headings: Sequence[str], rows: Sequence[Mapping[str, Any]], field: str, values: Sequence[Any]) -> str:
    """Write a table with a row for each contestant and a column for each value of a field."""
    here = {(row["contestant"], row[field]): row for row in rows}
    names = [name for name in TOPK_NAMES if any((name, value) in here for value in values)]
    return table(headings, [[TOPK_NAMES[name], *(_cell(here.get((name, one))) for one in values)] for name in names])


def _cell(row: Mapping[str, Any] | None) -> str:
    """Write the ratio to the yardstick, the median, and how many were picked if that was not k."""
    if row is None:
        return ""
    beside = "x" if row["beside"] == "pass" else "add x"
    more = "" if row["returned"] in (None, row["k"]) else f", {row['returned'] / row['k']:.3g} k"
    return f"{beside}{row['x_yardstick']:.3g} ({seconds(row['seconds_median'])}{more})"


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


def rewritten(page: str, folder: Path) -> str:
    """Put the results, files of the folder, between the marks of a page.

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
    if kind == hitopk.BENCHMARK:
        found = hitopk.load(path)
        measured = [row for row in found["rows"] if not row["simulated"]]
        told = f"{_facts({**found, 'rows': measured})}\n\n" if measured else ""
        return told + hitopk.markdown(found)
    if kind == recipe.BENCHMARK:
        found = load(path, kind, "benchmarks.studies recipe")
        return f"{_where(found)}\n\n{recipe.markdown(found)}"
    if kind == convergence.BENCHMARK:
        found = convergence.load(path)
        return f"{_where(found)}\n\n{convergence.markdown(found)}"
    for trained in (stragglers_accuracy, cached_pictures):
        if kind == trained.BENCHMARK:
            found = load(path, kind, trained.__name__)
            return f"{_where(found['runs'][0])}\n\n{trained.markdown(found)}"
    for study in (prices, replan, skew, stragglers_lstm):
        if kind == study.BENCHMARK:
            found = load(path, kind, study.__name__)
            return f"{_facts(found)}\n\n{study.markdown(found)}"
    written = {
        ALLREDUCE: allreduce_markdown,
        TRAINING: training_markdown,
        TOPK: topk_markdown,
        SCHEDULE: schedule_markdown,
        STRAGGLERS: stragglers_markdown,
        DATA: data_markdown,
        LARS: lars_markdown,
        BREAKDOWN: breakdown_markdown,
    }
    return written[kind](load(path, kind))
