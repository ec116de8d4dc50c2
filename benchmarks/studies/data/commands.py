"""The commands `data` and `plot-data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies.options import Only, Output, part, rows_of
from hvd_ext.bench import command


def data(
    parts: Annotated[
        str,
        typer.Option(
            help="With commas; hits: samples that were read before; ranks: memory of four ranks; first: the first "
            "epoch; second: a second job; half: room for half of the data; slow: training from a slow source on a "
            "rehearsed cluster; many: 1.28 million samples."
        ),
    ] = "hits,ranks,first,second,half,slow,many",
    contestants: Annotated[
        str | None,
        typer.Option(
            help="Of datacache, datacache-disk, datacache-keep, memcpy, cache, cache-part, cache-file, snapshot, "
            "memmap, decode, grain, streaming, shuffle; those of each part without it."
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(metavar="N", help="Samples of a figure.")] = 5,
    scale: Annotated[str, typer.Option(help="Share of the full number of samples, as 0.0625 or 1/16.")] = "1",
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where files are written, 4 GB at once; else TMPDIR.")
    ] = None,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without a new sample.")] = 300.0,
) -> None:
    """Hand samples over and keep them: hvd_ext.DataCache, tf.data, np.memmap and other loaders in turns, beside a copy
    of the same bytes, with the goals of the cache."""
    from benchmarks.studies.data import results as told
    from benchmarks.studies.data.jobs import Request, measure

    with command.ended_in_words("benchmarks.studies data"):
        request = Request(
            parts=command.names(parts),
            contestants=() if contestants is None else command.names(contestants),
            repetitions=repetitions,
            scale=part("--scale", scale),
            timeout_s=timeout,
            folder=folder,
        )
        if folder is not None and not folder.is_dir():
            raise typer.BadParameter(f"{folder}: must be there", param_hint="--folder")
        record = command.Record(
            told.BENCHMARK, "processes and jobs of this host, one after the other", json_file, append, plot_file
        )
        with command.progress(len(request.parts)) as tell:
            rows, notes = measure(request, tell)
        result = record.keep(rows, notes=notes)
        record.end([told.table(result)], [*told.missed(rows), *notes], told.faults(rows), told.draw)


def plot_data(
    files: Annotated[list[Path], typer.Argument(help="Results of data --json.")],
    output: Output,
    only: Only = "",
) -> None:
    """Draw the processor time of samples that were read before, over that of a copy of the same bytes."""
    from benchmarks.studies.data import results as told

    with command.ended_in_words("benchmarks.studies plot-data"):
        command.check_folder("--output", output)
        told.draw(rows_of(files, told.BENCHMARK), output, command.names(only))
