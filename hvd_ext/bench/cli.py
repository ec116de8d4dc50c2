"""The command `python -m hvd_ext bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

# They are no plans; each row is compared with them, so naming them changes nothing.
BASELINES = ("mpi", "horovod")


@app.callback()
def bench() -> None:
    """Measure collectives beside MPI and Horovod."""


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: must be whole numbers with commas between them", param_hint=option
        ) from None


@app.command()
def allreduce(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    nbytes: Annotated[str, typer.Option("--bytes", help="Sizes, with commas.")] = "4,4096,65536,1000000,16000000",
    algorithms: Annotated[
        str,
        typer.Option(help="Algorithms, with commas; auto is one. The baselines, mpi and horovod, run anyway."),
    ] = "auto",
    repetitions: Annotated[int, typer.Option(help="Timed samples per row.")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    horovod: Annotated[bool, typer.Option(help="Measure Horovod too, in a job of its own.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest time of one job, seconds.")] = 600.0,
) -> None:
    """Sum a buffer over the ranks of this host: hvd_ext, MPI_Allreduce and Horovod; every result is checked."""
    from hvd_ext.bench.allreduce import Request, has_horovod, measure
    from hvd_ext.bench.table import losses, table
    from hvd_ext.errors import HvdExtError

    console = Console()
    try:
        names = tuple(part for part in algorithms.split(",") if part and part not in BASELINES)
        request = Request(
            _numbers("--ranks", ranks),
            _numbers("--bytes", nbytes),
            names,
            repetitions,
            horovod=horovod,
            timeout_s=timeout,
        )
        if json_file is not None and not json_file.parent.is_dir():
            raise typer.BadParameter(f"{json_file}: its folder must be there", param_hint="--json")
        jobs = len(request.ranks) * (2 if horovod and has_horovod() else 1)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=jobs * len(request.sizes))
            result = measure(request, lambda title, ready: bar.update(task, description=title, advance=ready))
    except HvdExtError as error:
        Console(stderr=True).print(f"hvd_ext bench: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; no process of the job was left behind")
        sys.exit(130)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    console.print(table(result))
    for line in [*losses(result["rows"]), *result["notes"]]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
