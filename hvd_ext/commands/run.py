"""`python -m hvd_ext run`: runs an elastic job, which continues when workers are lost and when hosts are added."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hvd_ext.commands.app import App, ended_in_words, say
from hvd_ext.errors import InvalidError

app = App()


# Everything after the first word of the command belongs to the command, even if it looks like an option.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What each worker runs, behind --.", show_default=False)
    ],
    num_proc: Annotated[
        int, typer.Option("--num-proc", "-np", metavar="N", help="With how many workers the job begins.")
    ],
    min_num_proc: Annotated[
        int | None,
        typer.Option(
            "--min-num-proc",
            "--min-np",
            metavar="N",
            help="With how many workers the job continues; without it more than half of -np.",
        ),
    ] = None,
    max_num_proc: Annotated[
        int | None,
        typer.Option(
            "--max-num-proc",
            "--max-np",
            metavar="N",
            help="With how many workers the job runs if there are slots; without it -np.",
        ),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", "-H", metavar="HOST:N,...", help="Hosts and their slots, as in a:2,b:2.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="A file with a line 'host slots=2' for each host.")
    ] = None,
    host_discovery_script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A program that prints 'host:2' or 'host' lines; it runs every second."),
    ] = None,
    slots_per_host: Annotated[
        int, typer.Option(metavar="N", help="Slots of a host whose line of the script has no number.")
    ] = 1,
    elastic_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the job waits when it has too few workers.")
    ] = 600.0,
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long workers may take to call init().")
    ] = 600.0,
    reset_limit: Annotated[
        int | None, typer.Option(metavar="N", help="How often the workers may change; without it, any number of times.")
    ] = None,
    blacklist_cooldown_range: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="MIN MAX", help="Seconds for which a host that lost a worker is not used; doubles with each loss."
        ),
    ] = None,
    rsh: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="The remote shell, as in 'ssh -p 22'; HVD_EXT_RSH sets it too."),
    ] = None,
    ssh_port: Annotated[int | None, typer.Option(metavar="N", help="The SSH port of the other hosts.")] = None,
    ssh_identity_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The private key for the other hosts.")
    ] = None,
    network_interfaces: Annotated[
        str | None,
        typer.Option(
            "--network-interfaces",
            "--network-interface",
            metavar="NAME,...",
            help="The interfaces on which workers reach this host and each other.",
        ),
    ] = None,
    output_filename: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder that keeps the output of each worker.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say how agents and workers are started.")] = False,
) -> None:
    """Run a training that continues when workers are lost, and that uses hosts which are added.

    Without hosts, all workers run on this machine. A worker that ends with an error of its program ends the job with
    its status; one that is killed is replaced. The script uses hvd.elastic.run.
    """
    from hvd_ext.runner import hosts as host_lists, supervisor

    console = Console(stderr=True)
    with ended_in_words("hvd_ext run"):
        given = [text for text in (hosts, hostfile, host_discovery_script) if text is not None]
        if len(given) > 1:
            raise InvalidError("hosts, hostfile, host-discovery-script: each says where workers run; give one of them")
        if hosts is not None:
            fixed = host_lists.from_text(hosts)
        elif hostfile is not None:
            fixed = host_lists.from_file(hostfile)
        else:
            fixed = {} if host_discovery_script is not None else {host_lists.LOCAL: num_proc}
        settings = supervisor.Settings(
            command,
            host_lists.Source(fixed, host_discovery_script, slots_per_host),
            workers=num_proc,
            least=num_proc // 2 + 1 if min_num_proc is None else min_num_proc,
            most=max_num_proc or num_proc,
            elastic_timeout_s=elastic_timeout,
            start_timeout_s=start_timeout,
            reset_limit=reset_limit,
            cooldown_s=blacklist_cooldown_range,
            rsh=rsh,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            interfaces=network_interfaces.split(",") if network_interfaces else None,
            outputs=output_filename,
            verbose=verbose,
        )
        status = supervisor.run(settings, lambda line: say(console, [f"hvd_ext run: {line}"]))
    raise typer.Exit(status)
