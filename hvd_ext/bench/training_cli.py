"""The commands `python -m hvd_ext bench training` and `bench plot-training`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command


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
    ranks: Annotated[str | None, command.ranks_option("2")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("bound")] = None,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of our DistributedOptimizer, such as compression=bf16; may be given again."),
    ] = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Train a Keras model over all ranks with hvd_ext and with Horovod, in turns; what they trained is checked."""
    from hvd_ext.bench.launcher import place

    rank = place(os.environ)
    if rank:
        # One process per rank was started; rank 0 starts the jobs that measure.
        return
    from hvd_ext.bench import results, training_results
    from hvd_ext.bench.progress import progress
    from hvd_ext.bench.training import Request, measure

    with command.ended_in_words("hvd_ext bench training"):
        start = command.launched(launcher, ranks)
        command.check_append(append, json_file)
        for text in option or ():
            if "=" not in text:
                raise typer.BadParameter(f"({text!r}): must be NAME=VALUE", param_hint="--option")
        request = Request(
            options=dict(text.split("=", 1) for text in option or ()),
            algorithms=command.names(algorithms),
            model=model,
            width=width,
            batch=batch,
            steps=steps,
            repetitions=repetitions,
            ranks=command.ranks_of(start, ranks, "2"),
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(training_results.load, json_file, append)
        run = results.begin_run(start.describe())
        with progress(max(len(request.ranks), 1) * request.repetitions) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, options=dict(request.options), rate_bytes_per_second=request.rate, notes=notes)
        result = training_results.result(run, rows)
        kept = results.joined(before, result) if before else result
        if json_file is not None:
            results.save(json_file, kept)
        console = command.table_console(rank)
        console.print(training_results.table(result))
        wrong = training_results.faults(rows)
        command.say(console, [*training_results.trials(rows), *notes], wrong)
        if plot_file is not None:
            training_results.draw(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


def plot_training(
    files: Annotated[list[Path], typer.Argument(help="Results of bench training --json.")],
    output: command.Output,
    only: command.Only = "",
) -> None:
    """Draw the time of an epoch by cluster and algorithm, one bar each."""
    from hvd_ext.bench import training_results

    with command.ended_in_words("hvd_ext bench plot-training"):
        command.check_folder("--output", output)
        rows = [row for path in files for row in training_results.load(path)["rows"]]
        training_results.draw(rows, output, command.names(only))
