"""`python -m hvd_ext cluster`: rehearses a job on a cluster of several hosts on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hvd_ext.cluster.spec import MTU, Spec, counts, describe, parameters, rack_sizes
from hvd_ext.commands.app import App, ended_in_words, say

app = App(no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Rehearse a cluster of several hosts on this machine."""


# Everything after the first word of the command belongs to the command, even if it looks like an option.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What each rank runs, behind --.", show_default=False)
    ],
    hosts: Annotated[str, typer.Option(metavar="N,N,...", help="Ranks on each host, as in 4,4.")],
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Of each host's link, each way, as in 100mbit or 10gbit; without it no limit."
        ),
    ] = None,
    racks: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="A number of racks, or the hosts in each, as in 2,1.")
    ] = None,
    rack_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each rack's link to the core, each way; without it no limit.")
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What a link sends at once after a pause; without it what its rate carries in 1 ms, 16kb to 1mb.",
        ),
    ] = None,
    mtu: Annotated[int, typer.Option(metavar="N", help="Bytes of an IP packet.")] = MTU,
    mca: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A parameter of Open MPI, as in btl_tcp_links=2; may be given again."),
    ] = None,
) -> None:
    """Run a command with mpirun on hosts that are network namespaces with limited links.

    --rate limits what a host exchanges with the others; what ranks of one host exchange goes through memory, unlimited.

    Needs Linux, iproute2, util-linux, and root or a kernel that lets users have namespaces. Ends with mpirun's status.
    """
    from hvd_ext.cluster import launch
    from hvd_ext.cluster.rehearsal import Cluster

    console = Console(stderr=True)
    try:
        with ended_in_words("hvd_ext cluster"):
            ranks = counts("hosts", hosts)
            sizes = rack_sizes(racks, len(ranks)) if racks is not None else ()
            spec = Spec(ranks, rate, sizes, rack_rate, burst, mtu, parameters(mca or []))
            program = launch.resolve(command)
            with launch.heeding_signals(), Cluster(spec) as running:
                say(console, [f"hvd_ext cluster: {line}" for line in describe(spec)])
                status = running.mpirun(program)
    except launch.Stopped as stopped:
        console.print("hvd_ext cluster: stopped; nothing of it was left behind")
        raise typer.Exit(128 + int(stopped.args[0])) from stopped
    raise typer.Exit(status if status >= 0 else 128 - status)
