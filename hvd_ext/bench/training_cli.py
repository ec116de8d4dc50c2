"""The commands `python -m hvd_ext bench training` and `bench plot-training`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def register(app: typer.Typer) -> None:
    """Add the commands to those of the benchmark.

    Args:
        app: of `hvd_ext.bench.cli`.
    """
    app.command()(training)
    app.command("plot-training")(plot_training)


def training(
    algorithms: Annotated[
        str,
        typer.Option(
            help="Algorithms, with commas; auto, horovod and horovod-links2 (two TCP connections between two ranks) "
            "are names too. Only these are measured."
        ),
    ] = "auto,flexreduce,blueconnect,ring,horovod,horovod-links2",
    model: Annotated[
        str, typer.Option(help="mlp: 4.3 M parameters, mostly communication; cnn: 1.3 M with far more computation.")
    ] = "mlp",
    width: Annotated[int, typer.Option(help="Units of a hidden dense layer; 0: 1,024 (mlp), 512 (cnn).")] = 0,
    batch: Annotated[int, typer.Option(help="Digits of a rank's batch.")] = 64,
    steps: Annotated[int, typer.Option(help="Timed steps of each contestant.")] = 10,
    repetitions: Annotated[int, typer.Option(help="Turns in which these are done.")] = 5,
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
        str | None, typer.Option(help="Of a host's link, each way, for the bound: 100mbit. Else from the topology.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows that are in the file already.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the rows, also those kept, into this PNG file.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of our DistributedOptimizer, such as compression=bf16; may be given again."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time without an answer of a job, seconds.")] = 600.0,
) -> None:
    """Train a Keras model over all ranks with hvd_ext and with Horovod, in turns; what they trained is checked."""
    from hvd_ext.bench.launcher import choose, place

    rank = place(os.environ)
    if rank:
        # One process per rank was started; rank 0 starts the jobs that measure.
        return
    from hvd_ext.bench import results, training_results
    from hvd_ext.bench.cli import TABLE_WIDTH, _ended_in_words, _in_a_folder, _names, _numbers
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.training import Request, measure
    from hvd_ext.cluster.spec import rate_bits

    with _ended_in_words("hvd_ext bench training"):
        start = choose(launcher, os.environ)
        if start.line and ranks is not None:
            raise typer.BadParameter("the launcher says how many ranks there are", param_hint="--ranks")
        if append and json_file is None:
            raise typer.BadParameter("names no file; say --json FILE too", param_hint="--append")
        for text in option or ():
            if "=" not in text:
                raise typer.BadParameter(f"({text!r}): must be NAME=VALUE", param_hint="--option")
        request = Request(
            options=dict(text.split("=", 1) for text in option or ()),
            algorithms=_names(algorithms),
            model=model,
            width=width,
            batch=batch,
            steps=steps,
            repetitions=repetitions,
            ranks=() if start.line else _numbers("--ranks", ranks or "2"),
            rate=None if rate is None else rate_bits(rate) / 8,
            timeout_s=timeout,
        )
        _in_a_folder("--json", json_file)
        _in_a_folder("--plot", plot_file)
        before = training_results.load(json_file) if append and json_file is not None and json_file.exists() else None
        run = results.begin_run(start.describe())
        with progress(max(len(request.ranks), 1) * request.repetitions) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, options=dict(request.options), rate_bytes_per_second=request.rate, notes=notes)
        result = training_results.result(run, rows)
        kept = results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, kept)
        # A launcher gives its ranks a terminal of their own, which is not the user's; a file or a pipe has no width.
        seen = Console().is_terminal and rank is None
        console = Console() if seen else Console(width=TABLE_WIDTH, force_terminal=False)
        console.print(training_results.table(result))
        for line in [*training_results.trials(rows), *notes]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        wrong = training_results.faults(rows)
        for line in wrong:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")
        if plot_file is not None:
            training_results.draw(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


def plot_training(
    files: Annotated[list[Path], typer.Argument(help="Results of bench training --json.")],
    output: Annotated[Path, typer.Option(help="The PNG file.")],
) -> None:
    """Draw the time of an epoch by cluster and algorithm, one bar each."""
    from hvd_ext.bench import training_results
    from hvd_ext.bench.cli import _ended_in_words, _in_a_folder

    with _ended_in_words("hvd_ext bench plot-training"):
        _in_a_folder("--output", output)
        training_results.draw([row for path in files for row in training_results.load(path)["rows"]], output)
