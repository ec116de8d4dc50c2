"""`python -m hvd_ext simulate`: the iteration time of a model on a cluster of any size, before there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from hvd_ext.commands.app import (
    App,
    Hosts,
    TopologyFile,
    ended_in_words,
    figures_table,
    say,
    table_console,
    writing,
)
from hvd_ext.commands.plan import cluster_of, links_line, size_of
from hvd_ext.errors import InvalidError
from hvd_ext.planning import explain as explaining, models, scaling, step_times, what_if
from hvd_ext.planning.cost import lane
from hvd_ext.planning.scaling import Row
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.simulation.skew import KINDS, Gain, Skew, gains
from hvd_ext.topology.presets import PRESETS
from hvd_ext.topology.scale import MOST_RANKS
from hvd_ext.topology.tree import Tree

app = App()
Of = TypeVar("Of", Row, Gain)
WORTH_NAMING = 1.005  # a change that brings less is not called the best
TIE = 1.001  # steps within this factor are called equal


@app.command(
    help=f"""Predict the iteration time of a model on a cluster of any size, for several ways to divide it into buckets.

    The cluster is a topology file, assumed hosts, or a paper's (--preset {", ".join(PRESETS)}). The model is a file
    with layer times (docs/simulator.md), or a paper's with times that are made of operations
    (--model {", ".join(models.MODELS)})."""
)
def simulate(
    topology: TopologyFile = None,
    hosts: Hosts = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="with --hosts: of each host's link to the others, such as 10gbit")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="the cluster of a paper")] = None,
    allreduce_cost: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="instead of a cluster: an allreduce takes A + B x bytes seconds, one after the other, on all --ranks",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the model: tensors with their backward times")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="the model of a paper, instead of --trace")] = None,
    compute: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="with --model: of a forward and a backward pass; the paper's by default"),
    ] = None,
    write_model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the model to a file that --trace reads")
    ] = None,
    bucketers: Annotated[
        str, typer.Option(metavar="NAME,...", help="ways to divide the tensors into buckets, or auto")
    ] = ",".join(scaling.BUCKETERS),
    algorithms: Annotated[
        str, typer.Option(metavar="NAME,...", help="algorithms of the allreduce; auto chooses for each bucket")
    ] = "auto",
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help=f"numbers of ranks, up to {MOST_RANKS}: the cluster's hosts, whole and in their order, and again from "
            "the first one when they are used up; a rack is filled before the next one begins; fewer ranks than the "
            "first host has are a part of it; the cluster's own number by default",
        ),
    ] = None,
    bucket_bytes: Annotated[str, typer.Option(metavar="SIZE", help="of the buckets of by_size")] = "8MiB",
    changes: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="price changes: faster links, one host more, TopK, half precision, ...; with the first algorithm",
        ),
    ] = False,
    density: Annotated[float, typer.Option(metavar="SHARE", help="with --what-if: of TopK")] = 0.01,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="MODE,...", help="steps that do not wait for all ranks: full, delay, solo, majority, quorum:Q"
        ),
    ] = None,
    skew: Annotated[
        str | None,
        typer.Option(metavar="KIND:TIMES", help=f"with --sync: what steps take longer. {'; '.join(KINDS.values())}"),
    ] = None,
    staleness: Annotated[int, typer.Option(metavar="N", min=0, help="with --sync: the bound")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all rows to a file, one a line")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="draw where the time of a step goes, the speed-up, and one step"),
    ] = None,
) -> None:
    """Predict the iteration time of a model on a cluster of any size, for several ways to divide it into buckets."""
    console = table_console()
    with ended_in_words("hvd_ext simulate"):
        times = _times(trace, model, compute)
        if write_model is not None:
            with writing(f"--write-model {write_model}"):
                step_times.write(times, write_model)
        names = _names(bucketers, "--bucketers")
        modes = [] if sync is None else _names(sync, "--sync")
        if (sync is None) != (skew is None):
            raise InvalidError("--sync and --skew go together: the modes, and what steps take longer")
        if modes and "single" not in names:
            names = [*names, "single"]  # rounds that do not wait have one bucket
        nbytes = size_of(bucket_bytes)
        sources = [] if model is None else [_model_line(model, compute)]
        counts = [] if ranks is None else _counts(ranks)
        if allreduce_cost is None:
            tree = cluster_of(topology, hosts, rate, preset)
            schedules = _names(algorithms, "--algorithms")
            rows = scaling.rows(tree, times, names, schedules, counts, nbytes)
            title = f"a step of {trace or model} by the cost model, {_cluster_words(tree, counts)}"
            sources.append(links_line(explaining.links(tree), topology, rate, preset))
            priced = what_if.on_a_cluster(tree, times, names, schedules[0], density) if changes else []
        else:
            if topology is not None or hosts is not None or preset is not None:
                raise InvalidError(f"--allreduce-cost {allreduce_cost}: it replaces the cluster; leave one of them out")
            if rate is not None or algorithms != "auto":
                raise InvalidError(
                    f"--allreduce-cost {allreduce_cost}: it is the price of every allreduce; leave out --rate and "
                    "--algorithms"
                )
            price = _line(allreduce_cost)
            rows = [scaling.on_line(price, times, name, count, nbytes) for count in counts or [1] for name in names]
            title = f"a step of {trace or model} with an allreduce of {allreduce_cost} x bytes seconds"
            priced = what_if.on_a_line(price, times, names, max(counts or [1])) if changes else []
        played = [] if skew is None else gains_of(rows, modes, skew, staleness)
        written = [*(row.as_json() for row in rows), *(change.as_json() for change in priced)]
        if json_file is not None:
            with writing(f"--json {json_file}"):
                lines = [json.dumps(row) + "\n" for row in (*written, *map(gain_as_json, played))]
                json_file.write_text("".join(lines), encoding="utf-8")
        console.print(table_of(rows, title))
        say(console, [*remarks(rows), *sources])
        if skew is not None:
            console.print(rounds_table(played, skew))
        if priced:
            console.print(what_if_table(priced))
            say(console, verdict(priced))
        if plots is not None:
            from hvd_ext.commands import simulate_plots

            say(console, [f"drawn: {path}" for path in simulate_plots.draw(rows, plots)])


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Make the table of the rows; the shortest step of each number of ranks is bold."""
    headings = ("ranks", "bucketer", "algorithm", "buckets", "step, ms", "exposed, ms", "speed-up", "efficiency")
    table = figures_table(title, headings, ("bucketer", "algorithm"))
    for mine in _by_ranks(rows).values():
        winner = scaling.best(mine)
        for row in mine:
            cells = [f"{row.iteration_s * 1e3:.4g}", f"{row.exposed_s * 1e3:.4g}", f"{row.speedup:.4g}"]
            words = [str(row.ranks), row.bucketer, _algorithm_words(row), str(row.buckets)]
            table.add_row(*words, *cells, f"{row.efficiency:.1%}", style="bold" if row is winner else None)
        table.add_section()
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """Say how long a step computes, and which bucketer is best where."""
    row = rows[0]
    update = "" if row.times.update_s is None else f", and {row.times.update_s * 1e3:.4g} ms for the update"
    lines = [
        f"computation: forward pass {row.times.forward_s * 1e3:.4g} ms, backward pass "
        f"{(row.times.computed_s - row.times.forward_s) * 1e3:.4g} ms{update}; "
        f"{len(row.times.tensors)} tensors, {sum(tensor.nbytes for tensor in row.times.tensors):,} bytes"
    ]
    for at, mine in _by_ranks(rows).items():
        fast, last = scaling.best(mine), max(mine, key=lambda other: other.iteration_s)
        equal = [row for row in mine if row.iteration_s <= fast.iteration_s * TIE]
        ranks = "1 rank" if at == 1 else f"{at} ranks"
        if last in equal:
            lines += [f"{ranks}: all are equal"] if len(mine) > 1 else []
            continue
        words = ", ".join(_called(row, rows) for row in equal) + (" is best" if len(equal) == 1 else " are best")
        times_as = f"{last.iteration_s / fast.iteration_s:.2f} times as fast as"
        lines.append(f"{ranks}: {words}, {times_as} {_called(last, rows)}")
    return lines


def what_if_table(changes: Sequence[what_if.Change]) -> Table:
    """Make the table of changes."""
    best = what_if.winner(changes)
    words = ("change", "best bucketer", "algorithm")
    table = figures_table("what if", (*words, "step, ms", "samples/s"), words)
    for change in changes:
        if change.row is None:
            table.add_row(change.name, "-", "-", "-", "-")
            continue
        cells = [change.row.bucketer, _algorithm_words(change.row), f"{change.iteration_s * 1e3:.4g}"]
        table.add_row(change.name, *cells, _gain(change.gain), style="bold" if change is best else None)
    return table


def verdict(changes: Sequence[what_if.Change]) -> list[str]:
    """Say which changes have no price and why, and name the best change and what it brings."""
    lines = [f"{change.name}: not priced: {change.why_not}" for change in changes if change.row is None]
    best, now = what_if.winner(changes), changes[0]
    saved_ms = (now.iteration_s - best.iteration_s) * 1e3
    more = f"a step is {saved_ms:.4g} ms shorter" if saved_ms > 0 else "a step is not shorter, but has more ranks"
    if best.gain < WORTH_NAMING:
        return [*lines, f"best: no change brings {WORTH_NAMING - 1:.1%} more samples per second"]
    return [*lines, f"best: {best.name}, {_gain(best.gain)} samples per second; {more}"]


def gains_of(rows: Sequence[Row], modes: Sequence[str], skew: str, staleness: int) -> list[Gain]:
    """Play the rounds of each number of ranks.

    Full steps have the buckets that are best, which hide behind back-propagation. Rounds that do not wait begin after
    it, and have the whole gradient in one bucket.

    Raises:
        InvalidError: a mode, or the skew, is none.
    """
    read, made = Skew.read(skew), []
    for ranks, mine in _by_ranks(rows).items():
        best = scaling.best(mine)
        single = scaling.best([row for row in mine if row.bucketer == "single"])
        made += gains(ranks, best.alone_s, best.iteration_s - best.alone_s, single.exposed_s, read, modes, staleness)
    return made


def rounds_table(made: Sequence[Gain], skew: str) -> Table:
    """Make the table; the shortest step of each number of ranks is bold."""
    headings = ("ranks", "sync", "step, ms", "x full", "waited, ms", "on time", "late by 0, 1, ... rounds, %")
    table = figures_table(f"steps that do not wait for all ranks, {skew}", headings, ("sync",))
    for ranks, mine in _by_ranks(made).items():
        fastest = min(mine, key=lambda gain: gain.step_s)
        for gain in mine:
            late = " ".join(f"{100 * share:.0f}" for share in gain.staleness)
            cells = [f"{gain.step_s * 1e3:.4g}", f"{gain.speedup:.2f}", f"{gain.waited_s * 1e3:.4g}"]
            words = [str(ranks), gain.mode, *cells, f"{gain.active:.1f}", late]
            table.add_row(*words, style="bold" if gain is fastest else None)
        table.add_section()
    return table


def gain_as_json(gain: Gain) -> dict[str, object]:
    """Write a gain as a row of the command's file."""
    return {
        "ranks": gain.ranks,
        "sync": gain.mode,
        "iteration_seconds": gain.step_s,
        "speedup_over_full": gain.speedup,
        "waited_seconds": gain.waited_s,
        "active_ranks": gain.active,
        "staleness_shares": list(gain.staleness),
        "mean_staleness": gain.mean_staleness,
    }


def _by_ranks(rows: Sequence[Of]) -> dict[int, list[Of]]:
    """Group rows by the number of ranks, in their order."""
    return {ranks: [row for row in rows if row.ranks == ranks] for ranks in dict.fromkeys(row.ranks for row in rows)}


def _gain(gain: float) -> str:
    return f"{gain - 1:+.1%}".replace("-0.0%", "+0.0%")


def _algorithm_words(row: Row) -> str:
    if row.algorithm != "auto" or not row.used:
        return row.algorithm
    return f"auto: {', '.join(row.used)}"


def _called(row: Row, rows: Sequence[Row]) -> str:
    """The bucketer, with the algorithm if the rows have several."""
    return row.bucketer if len({other.algorithm for other in rows}) == 1 else f"{row.bucketer} with {row.algorithm}"


def _cluster_words(tree: Tree, counts: Sequence[int]) -> str:
    return f"{'hosts as of ' if counts else ''}{tree.describe()}"


def _times(trace: Path | None, model: str | None, compute: float | None) -> StepTimes:
    if (trace is None) == (model is None):
        raise InvalidError("name the model with either --trace FILE or --model NAME")
    if trace is not None:
        if compute is not None:
            raise InvalidError(f"--compute {compute:g}: the times are in the file of --trace; leave one of them out")
        times = step_times.read(trace)
        if not times.tensors or not times.computed_s:
            raise InvalidError(f"model file {trace}: it has no tensors or no computation, and so nothing to predict")
        return times
    assert model is not None
    return models.times_of(model, compute)


def _model_line(model: str, compute: float | None) -> str:
    source = models.MODELS[model].source if compute is None else "--compute"
    return f"model: {model}, its layers' times made of their operations, that of the step from {source}"


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InvalidError(f"{option} {text!r}: it lists names, with a comma between two of them")
    return list(dict.fromkeys(names))


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidError(f"--ranks {text!r}: it lists numbers of ranks from 1, as in 4,8,16")
    return list(dict.fromkeys(int(part) for part in parts))


def _line(text: str) -> lane.Table:
    try:
        a_s, b_s_per_byte = (float(part) for part in text.split(","))
    except ValueError:
        a_s = b_s_per_byte = -1.0
    if not (0 <= a_s < float("inf") and 0 <= b_s_per_byte < float("inf")):
        raise InvalidError(
            f"--allreduce-cost {text!r}: must be the seconds of a start and those of a byte, as in 5.7e-3,4.4e-9"
        )
    return lane.line(a_s, b_s_per_byte)
