"""The commands `hitopk` and `plot-hitopk`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.studies.hitopk.names import DEFAULT
from benchmarks.studies.options import Only, Output, rows_of
from hvd_ext.bench import command


def hitopk(
    algorithms: Annotated[
        str,
        typer.Option(
            help="Contestants, with commas: ALGORITHM@DENSITY for sparse sums (hitopk, naive_allgather, gtopk), "
            "ALGORITHM for dense ones, mpi, horovod; :fp16 behind it sends half precision."
        ),
    ] = DEFAULT,
    elements: Annotated[str, typer.Option(help="Lengths of the float32 gradient, with commas.")] = "25000000",
    simulate: Annotated[
        str, typer.Option(help="Lengths of which the planner's price is given besides; with commas.")
    ] = "",
    topology: Annotated[
        Path | None, typer.Option(help="Measure nothing: simulate on the cluster of this YAML file.")
    ] = None,
    ranks: Annotated[str | None, command.ranks_option("2")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("floor")] = None,
    repetitions: command.Repetitions = 10,
    seconds_per_row: command.SecondsPerRow = 20.0,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    timeout: command.Timeout = 900.0,
) -> None:
    """Sum a gradient over all ranks, sparse and dense, in turns: times, bytes on the links, hitopk's four steps."""
    from benchmarks.studies.hitopk import results as told
    from benchmarks.studies.hitopk.expected import simulated
    from benchmarks.studies.hitopk.jobs import Request, measure
    from benchmarks.studies.hitopk.names import names_of
    from hvd_ext.bench.expected import Cluster, cluster_of
    from hvd_ext.bench.jobs import Launcher
    from hvd_ext.topology.read import read

    with command.ended_in_words("benchmarks.studies hitopk"):
        simulated_alone = (Launcher(), command.numbers("--ranks", ranks or "2"))
        start, counts = command.launched(launcher, ranks, "2") if topology is None else simulated_alone
        if topology is not None and not simulate:
            raise typer.BadParameter("say which lengths: --simulate 25000000", param_hint="--topology")
        request = Request(
            elements=command.numbers("--elements", elements),
            names=command.names(algorithms),
            ranks=counts,
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        described = start.describe() if topology is None else "none: simulated"
        record = command.Record(told.BENCHMARK, described, json_file, append)
        notes: list[str] = []
        rows: list[dict[str, Any]] = []
        if topology is None:
            with command.progress(max(len(request.ranks), 1) * len(request.elements)) as tell:
                rows, notes, text = measure(request, start, tell)
            clusters = {tuple(row["ranks_per_host"]): row["ranks_per_host"] for row in rows}
            places = [[f"host{place}" for place, count in enumerate(each) for _ in range(count)] for each in clusters]
            found = [cluster_of({"hosts": hosts, "topology": text}, request.rate) for hosts in places]
        else:
            text, tree = topology.read_text(encoding="utf-8"), read(topology)
            host_of = {rank: f"host{place}" for place, ranks in enumerate(tree.hosts()) for rank in ranks}
            found = [Cluster(tuple(host_of[rank] for rank in range(tree.size)), tree, True, request.rate)]
        for cluster in found:
            for length in command.numbers("--simulate", simulate) if simulate else ():
                priced = [simulated(cluster, name, length) for name in names_of(request.names)]
                rows += [row for row in priced if row is not None]
        result = record.keep(rows, topology=text, rate_bytes_per_second=request.rate, notes=notes)
        steps = told.steps_table(result)
        record.end([told.table(result), *([steps] if steps else [])], notes, told.faults(rows))


def plot_hitopk(
    files: Annotated[list[Path], typer.Argument(help="Results of hitopk --json.")],
    output: Output,
    kind: Annotated[
        str, typer.Option(help="bars: all contestants; sizes: time over elements; steps: hitopk's steps.")
    ] = "bars",
    elements: Annotated[str, typer.Option(help="Only these lengths, with commas.")] = "",
    only: Only = "",
) -> None:
    """Draw sparse and dense sums: side by side, over the size, or hitopk's steps."""
    from benchmarks.studies.hitopk import results as told

    with command.ended_in_words("benchmarks.studies plot-hitopk"):
        command.check_folder("--output", output)
        lengths = command.numbers("--elements", elements)
        rows = rows_of(files, told.BENCHMARK)
        rows = [row for row in rows if not lengths or row["elements"] in lengths]
        told.draw(rows, output, kind, command.names(only))
