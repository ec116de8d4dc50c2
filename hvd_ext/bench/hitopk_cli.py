"""The commands `python -m hvd_ext bench hitopk` and `bench plot-hitopk`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hvd_ext.bench.hitopk_names import DEFAULT


def register(app: typer.Typer) -> None:
    """Add the commands to those of the benchmark.

    Args:
        app: of `hvd_ext.bench.cli`.
    """
    app.command()(hitopk)
    app.command("plot-hitopk")(plot_hitopk)


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
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks on this host, with commas; 2 without a launcher.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Starts a command on all ranks: 'mpirun -np 8 -H a:4,b:4'. In a rehearsed cluster it is known."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of a host's link, each way, for the floor: 100mbit. Else from the topology.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="The most samples of a row.")] = 10,
    seconds_per_row: Annotated[float, typer.Option(help="Long calls have fewer samples, at least 3.")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that are in the file already.")] = False,
    timeout: Annotated[float, typer.Option(help="Longest time without an answer of a job, seconds.")] = 900.0,
) -> None:
    """Sum a gradient over all ranks, sparse and dense, in turns: times, bytes on the links, hitopk's four steps."""
    from hvd_ext.bench.launcher import Launcher, choose, place

    rank = place(os.environ)
    if rank:
        # One process per rank was started; rank 0 starts the jobs that measure.
        return
    from hvd_ext.bench import hitopk_results, results
    from hvd_ext.bench.cli import TABLE_WIDTH, _ended_in_words, _in_a_folder, _names, _numbers
    from hvd_ext.bench.expected import Cluster, cluster_of
    from hvd_ext.bench.hitopk import Request, measure
    from hvd_ext.bench.hitopk_expected import simulated
    from hvd_ext.bench.hitopk_names import names_of
    from hvd_ext.bench.progress import progress
    from hvd_ext.cluster.spec import rate_bits
    from hvd_ext.topology.read import read

    with _ended_in_words("hvd_ext bench hitopk"):
        start = Launcher() if topology is not None else choose(launcher, os.environ)
        if start.line and ranks is not None:
            raise typer.BadParameter("the launcher says how many ranks there are", param_hint="--ranks")
        if append and json_file is None:
            raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")
        if topology is not None and not simulate:
            raise typer.BadParameter("say which lengths: --simulate 25000000", param_hint="--topology")
        request = Request(
            elements=_numbers("--elements", elements),
            names=_names(algorithms),
            ranks=() if start.line else _numbers("--ranks", ranks or "2"),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            rate=None if rate is None else rate_bits(rate) / 8,
            timeout_s=timeout,
        )
        _in_a_folder("--json", json_file)
        before = hitopk_results.load(json_file) if append and json_file is not None and json_file.exists() else None
        run = results.begin_run(start.describe() if topology is None else "none: simulated")
        notes: list[str] = []
        rows: list[dict[str, Any]] = []
        if topology is None:
            with progress(max(len(request.ranks), 1) * len(request.elements)) as tell:
                rows, notes, text = measure(request, start, tell)
            clusters = {tuple(row["ranks_per_host"]): row["ranks_per_host"] for row in rows}
            places = [[f"host{place}" for place, count in enumerate(each) for _ in range(count)] for each in clusters]
            found = [cluster_of({"hosts": hosts, "topology": text}, request.rate) for hosts in places]
        else:
            text, tree = topology.read_text(encoding="utf-8"), read(topology)
            host_of = {rank: f"host{place}" for place, ranks in enumerate(tree.hosts()) for rank in ranks}
            found = [Cluster(tuple(host_of[rank] for rank in range(tree.size)), tree, True, request.rate)]
        for cluster in found:
            for length in _numbers("--simulate", simulate) if simulate else ():
                priced = [simulated(cluster, name, length) for name in names_of(request.names)]
                rows += [row for row in priced if row is not None]
        run.update(topology=text, rate_bytes_per_second=request.rate, notes=notes)
        result = hitopk_results.result(run, rows)
        if json_file is not None:
            results.save(json_file, results.joined(before, result) if before else result)
        # A launcher gives its ranks a terminal of their own, which is not the user's; a file or a pipe has no width.
        seen = Console().is_terminal and rank is None
        console = Console() if seen else Console(width=TABLE_WIDTH, force_terminal=False)
        console.print(hitopk_results.table(result))
        steps = hitopk_results.steps_table(result)
        if steps is not None:
            console.print(steps)
        for line in notes:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        wrong = hitopk_results.faults(rows)
        for line in wrong:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")
    sys.exit(1 if wrong else 0)


def plot_hitopk(
    files: Annotated[list[Path], typer.Argument(help="Results of bench hitopk --json.")],
    output: Annotated[Path, typer.Option(help="The PNG file.")],
    kind: Annotated[
        str, typer.Option(help="bars: all contestants; sizes: time over elements; steps: hitopk's steps.")
    ] = "bars",
    elements: Annotated[str, typer.Option(help="Only these lengths, with commas.")] = "",
) -> None:
    """Draw sparse and dense sums: side by side, over the size, or hitopk's steps."""
    from hvd_ext.bench import hitopk_plots, hitopk_results
    from hvd_ext.bench.cli import _ended_in_words, _in_a_folder, _numbers

    with _ended_in_words("hvd_ext bench plot-hitopk"):
        _in_a_folder("--output", output)
        lengths = _numbers("--elements", elements)
        rows = [row for path in files for row in hitopk_results.load(path)["rows"]]
        hitopk_plots.draw([row for row in rows if not lengths or row["elements"] in lengths], output, kind)
