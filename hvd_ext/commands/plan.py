"""`python -m hvd_ext plan`: the price of every algorithm on a cluster, the choice, and a drawing of its plan."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hvd_ext.cluster.spec import rate_bits, rate_text
from hvd_ext.commands.app import App, Hosts, TopologyFile, ended_in_words, say, table_console, writing
from hvd_ext.planning import explain as explaining, explain_sparse, planner
from hvd_ext.planning.cost.sparse import ENTRY_NBYTES
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import LEAST_DENSITY
from hvd_ext.topology import presets
from hvd_ext.topology.read import read
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Tree, from_hosts

app = App()
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?)b?", re.IGNORECASE)


def size_of(text: str) -> int:
    """Read a number of bytes.

    Args:
        text: "1000000", "64k" (1,000 bytes), "8MiB" (1,048,576 bytes), "1.5G".

    Raises:
        typer.BadParameter: the text is not a number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(f"{text!r} is not a number of bytes; write 1000000, 64k, 8MiB or 1.5G")
    base = 1024 if match[3] else 1000
    size = Fraction(match[1]) * base ** " kmg".index(match[2].lower() or " ")
    if size.denominator != 1:
        raise typer.BadParameter(f"{text!r} is not a whole number of bytes")
    return int(size)


def _words(rate: str, alpha_s: str) -> str:
    return f"{rate} each way and {alpha_s} a message"


def _assumed(link: Link) -> str:
    return _words(rate_text(8 / link.beta_s_per_byte), f"{link.alpha_s * 1e6:g} us")


def cluster_of(topology: Path | None, hosts: str | None, rate: str | None = None, preset: str | None = None) -> Tree:
    """Return the cluster that the options describe.

    Raises:
        typer.BadParameter: not exactly one of topology, hosts and preset was given, a rate was given without hosts, or
            hosts is not a list of numbers.
        TopologyError: the file is wrong, or there is no such preset.
        InvalidError: the text of the rate is not a rate.
    """
    if sum(option is not None for option in (topology, hosts, preset)) != 1:
        raise typer.BadParameter(
            "name the cluster with one of --topology FILE, --hosts, as in --hosts 4,4,3, and --preset NAME"
        )
    if topology is not None and rate is not None:
        raise typer.BadParameter(f"--rate {rate}: the rates are in the file of --topology; leave one of them out")
    if preset is not None:
        if rate is not None:
            raise typer.BadParameter(f"--rate {rate}: the rates are those of --preset; leave one of them out")
        return presets.preset(preset)
    between = ETHERNET if rate is None else Link(ETHERNET.alpha_s, 8 / rate_bits(rate))
    if topology is not None:
        return read(topology)
    assert hosts is not None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", hosts):
        raise typer.BadParameter(f"--hosts {hosts}: it lists the ranks of each host, as in 4,4,3")
    counts = [int(count) for count in hosts.split(",")]
    names = [f"host {number}" for number, count in enumerate(counts) for _ in range(count)]
    return from_hosts(names, between=between)


def links_line(
    links: Sequence[explaining.LinkKind], topology: Path | None, rate: str | None, preset: str | None = None
) -> str:
    """Describe the links that the prices assume, and where their rates come from."""
    if not links:
        return "links: none, there is one rank"
    listed = ", ".join(map(_described, links))
    if topology is not None:
        return f"links: {listed}; from {topology}"
    if preset is not None:
        return f"links: {listed}; from {presets.PRESETS[preset].source}"
    if not any(kind.kind == "between hosts" for kind in links):
        nothing = "" if rate is None else "; --rate changes nothing, because no link is between hosts"
        return f"links: {listed}; assumed; a --topology file gives the real ones{nothing}"
    if rate is None:
        return f"links: {listed}; assumed; --rate sets the rate between hosts, a --topology file sets all of them"
    return f"links: {listed}; the rate between hosts is that of --rate, all else is assumed"


def _described(link: explaining.LinkKind) -> str:
    rates = [rate_text(math.inf if bits is None else bits) for bits in link.bits_per_s]
    alphas = [f"{alpha_s * 1e6:.4g}" for alpha_s in link.alpha_s]
    rate, alpha = (" to ".join(dict.fromkeys(texts)) for texts in (rates, alphas))
    return f"{link.kind} {_words(rate, f'{alpha} us')}"


def _size_line(nbytes: int, chosen_for_nbytes: int) -> list[str]:
    """Return a line that says for which size the choice was made, if that is another one."""
    if nbytes == chosen_for_nbytes:
        return []
    return [
        f"size: choices are made for powers of two of bytes: here for {chosen_for_nbytes:,}, which stands for "
        f"{nbytes:,} and all sizes near it; the prices are those of {nbytes:,}"
    ]


@app.command(
    help=f"""Price every algorithm on a cluster, say which is chosen and why, and draw its plan.

    With --hosts the links are assumed: between hosts {_assumed(ETHERNET)}, in hosts {_assumed(SHARED_MEMORY)}. --rate
    states the rate between hosts; a file of --topology states all."""
)
def plan(
    topology: TopologyFile = None,
    hosts: Hosts = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="with --hosts: of each host's link to the others, each way, such as 100mbit or 10gbit; links inside "
            "hosts stay as they are assumed",
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="the cluster of a paper; `simulate --help` has the names")
    ] = None,
    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="size of the buffer, such as 1000000 or 8MiB")
    ] = "8MiB",
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="whose plan to draw")] = "auto",
    density: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="price the sparse algorithms: the part of the elements that is selected, such as 0.01"
        ),
    ] = None,
    entry_nbytes: Annotated[
        float,
        typer.Option("--entry-bytes", metavar="N", help="with --density: of a selected value and its index on the way"),
    ] = ENTRY_NBYTES,
    height: Annotated[
        int,
        typer.Option(
            metavar="N", help="with --density: levels that add up before they select; 1 hosts, 2 racks, 0 by price"
        ),
    ] = 1,
    draw: Annotated[bool, typer.Option("--draw", help="draw the plan")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures to a file")
    ] = None,
) -> None:
    """Price every algorithm on a cluster, say which is chosen and why, and draw its plan."""
    console = table_console()
    with ended_in_words("hvd_ext plan"):
        tree, size = cluster_of(topology, hosts, rate, preset), size_of(nbytes)
        if density is None:
            explanation = explaining.explain(tree, size)
            drawn = planner.allreduce_plan(tree, algorithm, size).plan
            _write(json_file, explaining.as_json(explanation))
            _show(console, explanation, explaining.kinds(tree), links_line(explanation.links, topology, rate, preset))
        else:
            name = "hitopk" if algorithm == "auto" else algorithm
            sparse, chosen = explain_sparse.explain(tree, size, density, name, entry_nbytes, height or None)
            drawn = chosen.plan
            _write(json_file, dataclasses.asdict(sparse))
            _show_sparse(console, sparse, explaining.kinds(tree), links_line(sparse.links, topology, rate, preset))
    if draw:
        _draw(console, drawn)


def _write(json_file: Path | None, figures: dict[str, object]) -> None:
    if json_file is not None:
        with writing(f"--json {json_file}"):
            json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _show(console: Console, explanation: explaining.Explanation, kinds: tuple[str, ...], links: str) -> None:
    title = f"allreduce of {explanation.nbytes:,} bytes on {explanation.cluster}"
    console.print(table_of(explanation.entries, explanation.winner, kinds, title))
    lines = [f"{entry.name}: {entry.note}" for entry in explanation.entries if entry.note]
    lines += [links, *_size_line(explanation.nbytes, explanation.chosen_for_nbytes)]
    lines.append(f"price: {explanation.pricing}; MB: over the busiest port of that kind of link, one way")
    bound_ms = explanation.bound_s * 1e3
    lines.append(f"bound: no allreduce of whole buffers can take less than {bound_ms:.4g} ms on these links")
    say(console, lines)


def _show_sparse(
    console: Console, explanation: explain_sparse.SparseExplanation, kinds: tuple[str, ...], links: str
) -> None:
    title = (
        f"allreduce of {explanation.nbytes:,} bytes at density {explanation.density:g} on {explanation.cluster}, "
        f"{explanation.entry_nbytes:g} bytes an entry"
    )
    console.print(table_of(explanation.entries, explanation.algorithm, kinds, title))
    say(console, [f"{entry.name}: {entry.note}" for entry in explanation.entries if entry.note])
    table = Table(title=f"where the time of {explanation.algorithm} goes", title_justify="left")
    table.add_column("step", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for kind in kinds:
        table.add_column(f"{kind}, MB sent", justify="right")
    for step in explanation.steps:
        sent = [f"{nbytes / 1e6:.4g}" for nbytes in step.sent_nbytes]
        table.add_row(step.name, f"{step.seconds * 1e3:.4g}", *sent)
    console.print(table)
    lines = [
        links,
        *_size_line(explanation.nbytes, explanation.chosen_for_nbytes),
        f"price: {explanation.pricing}; MB sent: by all ranks together",
        f"dense: no dearer {_from(explanation.dense_from)}; it is {explanation.dense_algorithm}, as without TopK",
        f"dense step: TopK takes it {_from(explanation.dense_above)}; it sends the whole gradient and the residuals",
    ]
    if len(kinds) > 1:
        lines.append(f"hitopk: each host sends (m - 1) K entries, {explanation.host_nbytes:,} bytes, to the others")
    say(console, lines)


def _from(density: float) -> str:
    return "at every density" if density <= LEAST_DENSITY else f"from density {density:.3g} on"


def _draw(console: Console, drawn: LogicalPlan) -> None:
    if drawn.size > explaining.MOST_DRAWN:
        console.print(
            f"not drawn: a plan of {drawn.size} ranks is too large; up to {explaining.MOST_DRAWN} fit a screen"
        )
    else:
        say(console, ["\n" + explaining.draw(drawn)])


def table_of(entries: tuple[explaining.Entry, ...], winner: str, kinds: tuple[str, ...], title: str) -> Table:
    """Make the table of algorithms, the winner in bold; `kinds` are those of the links, from the root down."""
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    table.add_column("price, ms", justify="right", no_wrap=True)
    table.add_column("rounds", justify="right")
    for kind in kinds:
        table.add_column(f"{kind}, MB", justify="right")
    table.add_column("why", overflow="fold")
    for entry in entries:
        price = "-" if entry.price_s is None else f"{entry.price_s * 1e3:.4g}"
        loads = [f"{load.busiest_nbytes / 1e6:.4g}" for load in entry.loads] or ["-"] * len(kinds)
        rounds = "-" if entry.rounds is None else str(entry.rounds)
        style = "bold" if entry.name == winner else None
        table.add_row(entry.name, price, rounds, *loads, entry.verdict, style=style)
    return table
