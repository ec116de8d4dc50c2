"""The command `lars`."""

from __future__ import annotations

from typing import Annotated

import typer

from hvd_ext.bench import command


def lars(
    ranks: Annotated[str | None, command.ranks_option("1,2,4")] = None,
    models: Annotated[str, typer.Option(help="Of resnet50, transformer, with commas.")] = "resnet50,transformer",
    parts: Annotated[
        str,
        typer.Option(
            help="With commas; norms: of all tensors, beside one pass over the same bytes and one op per tensor; "
            "update: the whole step of LARS, beside the same in Keras' operations and SGD; lamb: that of LAMB on one "
            "rank; pto: norms divided among ranks."
        ),
    ] = "norms,update,lamb,pto",
    repetitions: command.Repetitions = 7,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls of a sample.")] = 3,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads of each rank.")] = 1,
    launcher: command.LauncherLine = None,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without a new row.")] = 600.0,
) -> None:
    """Compute the norms and the update of LARS, each rank alone or the ranks together, beside other ways, in turns."""
    from benchmarks.studies.lars import results as told
    from benchmarks.studies.lars.jobs import Request, measure

    with command.ended_in_words("benchmarks.studies lars"):
        start, counts = command.launched(launcher, ranks, "1,2,4")
        request = Request(
            ranks=counts,
            models=command.names(models),
            parts=command.names(parts),
            repetitions=repetitions,
            calls=calls,
            threads=threads,
            timeout_s=timeout,
        )
        record = command.Record(told.BENCHMARK, start.describe(), json_file, append)
        with command.progress(len(request.jobs(start))) as tell:
            rows = measure(request, start, tell)
        record.keep(rows)
        record.end([told.table(rows)], [*told.goals(rows), told.PAPER])
