"""`python -m hvd_ext plan`: every algorithm's price on a cluster, the winner, and a drawing of its plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hvd_ext.errors import HvdExtError
from hvd_ext.planning import explain as explaining, planner
from hvd_ext.topology.read import read
from hvd_ext.topology.tree import Tree, from_hosts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?)b?", re.IGNORECASE)


def size_of(text: str) -> int:
    """Reads a number of bytes.

    Args:
        text: "1000000", "64k" (1,000 bytes), "8MiB" (1,048,576 bytes), "1.5G".

    Returns:
        Bytes.

    Raises:
        typer.BadParameter: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise typer.BadParameter(f"{text!r} is no number of bytes; write 1000000, 64k, 8MiB or 1.5G")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * float(base ** " kmg".index(found[2].lower() or " ")))


def cluster_of(topology: Path | None, hosts: str | None) -> Tree:
    """The cluster that the options name.

    Args:
        topology: a YAML file.
        hosts: ranks on each host, "4,4,3".

    Returns:
        The tree.

    Raises:
        typer.BadParameter: both are given or none, or the hosts are no numbers.
        TopologyError: the file is wrong.
    """
    if (topology is None) == (hosts is None):
        raise typer.BadParameter("name the cluster with either --topology FILE or --hosts, as in --hosts 4,4,3")
    if topology is not None:
        return read(topology)
    assert hosts is not None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", hosts):
        raise typer.BadParameter(f"--hosts {hosts}: it lists the ranks of each host, as in 4,4,3")
    counts = [int(count) for count in hosts.split(",")]
    return from_hosts([f"host {number}" for number, count in enumerate(counts) for _ in range(count)])


@app.command()
def plan(
    topology: Annotated[Path | None, typer.Option(help="the cluster, a YAML file")] = None,
    hosts: Annotated[str | None, typer.Option(help="the cluster as ranks per host, such as 4,4,3")] = None,
    nbytes: Annotated[str, typer.Option("--bytes", help="size of the buffer, such as 1000000 or 8MiB")] = "8MiB",
    algorithm: Annotated[str, typer.Option(help="whose plan to draw")] = "auto",
    draw: Annotated[bool, typer.Option("--draw", help="draw the plan")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures to a file")] = None,
) -> None:
    """Price every algorithm on a cluster, say which is chosen and why, and draw its plan."""
    console = Console()
    try:
        tree = cluster_of(topology, hosts)
        explanation = explaining.explain(tree, size_of(nbytes))
        chosen = planner.allreduce_plan(tree, algorithm, size_of(nbytes))
        if json_file is not None:
            text = json.dumps(explaining.as_json(explanation), indent=1) + "\n"
            try:
                json_file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise HvdExtError(f"--json {json_file}: it cannot be written: {error.strerror or error}") from error
    except HvdExtError as error:
        Console(stderr=True).print(f"hvd_ext plan: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(table_of(explanation, explaining.kinds(tree)))
    for entry in explanation.entries:
        if entry.note:
            console.print(f"{entry.name}: {entry.note}", markup=False, highlight=False, soft_wrap=True)
    line = f"price: {explanation.pricing}; MB: over the busiest port of that kind of link, one way"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    bound = f"bound: no allreduce of whole buffers can take less than {explanation.bound_s * 1e3:.4g} ms on these links"
    console.print(bound, markup=False, highlight=False, soft_wrap=True)
    if draw and tree.size > explaining.MOST_DRAWN:
        console.print(
            f"not drawn: a plan of {tree.size} ranks is too large; up to {explaining.MOST_DRAWN} fit a screen"
        )
    elif draw:
        console.print("\n" + explaining.draw(chosen.plan), markup=False, highlight=False, soft_wrap=True)


def table_of(explanation: explaining.Explanation, kinds: tuple[str, ...]) -> Table:
    """Shows an explanation as a table.

    Args:
        explanation: of a cluster.
        kinds: of its links, from the root down.

    Returns:
        One row for each algorithm.
    """
    table = Table(title=f"allreduce of {explanation.nbytes:,} bytes on {explanation.cluster}", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    table.add_column("price, ms", justify="right", no_wrap=True)
    table.add_column("rounds", justify="right")
    for kind in kinds:
        table.add_column(f"{kind}, MB", justify="right")
    table.add_column("why")
    for entry in explanation.entries:
        price = "-" if entry.price_s is None else f"{entry.price_s * 1e3:.4g}"
        loads = [f"{load.busiest_nbytes / 1e6:.4g}" for load in entry.loads] or ["-"] * len(kinds)
        rounds = "-" if entry.rounds is None else str(entry.rounds)
        style = "bold" if entry.name == explanation.winner else None
        table.add_row(entry.name, price, rounds, *loads, entry.verdict, style=style)
    return table


if __name__ == "__main__":
    app(prog_name="python -m hvd_ext plan")
