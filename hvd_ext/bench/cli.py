"""The command `python -m hvd_ext bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from hvd_ext.bench import command, results
from hvd_ext.commands.app import App

app = App(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure collectives and training steps beside MPI and Horovod."""
    command.only_on_rank_0()


@app.command()
def allreduce(
    algorithms: Annotated[
        str,
        typer.Option(
            help="Algorithms, with commas; auto, mpi, horovod are names too, and the yardsticks tcp (several hosts) "
            "and memory (one host). Only these are measured."
        ),
    ] = "auto,mpi,horovod,tcp,memory",
    nbytes: Annotated[str, typer.Option("--bytes", help="Sizes, with commas.")] = "4,4096,65536,1000000,16000000",
    how: Annotated[str, typer.Option(help="Of graph, engine (NumPy, no TensorFlow) and eager.")] = "graph,engine",
    ranks: Annotated[str | None, command.ranks_option("2,4")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("bound")] = None,
    repetitions: command.Repetitions = 30,
    seconds_per_row: command.SecondsPerRow = 8.0,
    check: Annotated[bool, typer.Option(help="Compare every result with the right one.")] = True,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Sum a buffer over all ranks: hvd_ext, MPI_Allreduce and Horovod, in turns, beside what must be done at least:
    plain sockets between hosts, passes over memory in one. Every result is checked."""
    from hvd_ext.bench import plots
    from hvd_ext.bench.allreduce import Request, measure
    from hvd_ext.bench.table import allreduce_table, faults, losses

    with command.ended_in_words("hvd_ext bench"):
        start, counts = command.launched(launcher, ranks, "2,4")
        request = Request(
            sizes=command.numbers("--bytes", nbytes),
            algorithms=command.names(algorithms),
            hows=command.names(how),
            ranks=counts,
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            check=check,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        record = command.Record(results.ALLREDUCE, start.describe(), json_file, append, plot_file)
        with command.progress(max(len(request.ranks), 1) * len(request.sizes)) as tell:
            rows, notes, topology = measure(request, start, tell)
        result = record.keep(rows, topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        said = [*losses(result["rows"]), *notes]
        record.end([allreduce_table(result)], said, faults(rows), plots.draw_allreduce)


@app.command()
def training(
    algorithms: Annotated[
        str,
        typer.Option(
            help="Algorithms, with commas; auto, horovod, horovod-links2 (two TCP connections between two ranks), "
            "horovod-autotune and multiworker (tf.distribute, with tf_keras) are names too. Only these are measured."
        ),
    ] = "auto,flexreduce,blueconnect,ring,horovod,horovod-links2",
    model: Annotated[
        str,
        typer.Option(
            help="mlp: 4.3 M parameters, mostly communication; cnn: 1.3 M with far more computation; small-160 and "
            "small-1000: so many tensors of 4 kB and less, mostly their handling; deep-60: 60 layers with 1.2 M, about "
            "as much communication as computation at 100 Mbit/s."
        ),
    ] = "mlp",
    width: Annotated[
        int,
        typer.Option(
            help="Units of a hidden dense layer; 0: 1,024 (mlp), 512 (cnn), 32 (small-160, small-1000), 40 (deep-60)."
        ),
    ] = 0,
    batch: Annotated[int, typer.Option(help="Digits of a rank's batch.")] = 64,
    steps: Annotated[int, typer.Option(help="Timed steps of each contestant.")] = 10,
    repetitions: Annotated[int, typer.Option(help="Number of turns that share these steps.")] = 5,
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
    buckets: Annotated[
        str, typer.Option(help="Values of the option buckets, with commas; each algorithm is measured with each.")
    ] = "",
    compressions: Annotated[
        str,
        typer.Option(
            help="Values of the option compression, with commas, such as none,fp16,quantized:8,topk:0.01,auto; each "
            "algorithm is measured with each."
        ),
    ] = "",
    warmup: Annotated[int, typer.Option(help="Steps of each contestant before the timed ones.")] = 0,
    timeout: command.Timeout = 600.0,
) -> None:
    """Train a Keras model over all ranks with hvd_ext and with Horovod, in turns; what they trained is checked."""
    from hvd_ext.bench import plots
    from hvd_ext.bench.table import training_faults, training_table, trials
    from hvd_ext.bench.training import Request, measure

    with command.ended_in_words("hvd_ext bench training"):
        start, counts = command.launched(launcher, ranks, "2")
        for text in option or ():
            if "=" not in text:
                raise typer.BadParameter(f"({text!r}): must be NAME=VALUE", param_hint="--option")
        request = Request(
            options=dict(text.split("=", 1) for text in option or ()),
            algorithms=command.names(algorithms),
            buckets=command.names(buckets),
            compressions=command.names(compressions),
            warmup=warmup,
            model=model,
            width=width,
            batch=batch,
            steps=steps,
            repetitions=repetitions,
            ranks=counts,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        record = command.Record(results.TRAINING, start.describe(), json_file, append, plot_file)
        with command.progress(max(len(request.ranks), 1) * request.repetitions) as tell:
            rows, notes, topology = measure(request, start, tell)
        result = record.keep(
            rows, topology=topology, options=dict(request.options), rate_bytes_per_second=request.rate, notes=notes
        )
        record.end([training_table(result)], [*trials(rows), *notes], training_faults(rows), plots.draw_training)


@app.command()
def breakdown(
    schemes: Annotated[
        str,
        typer.Option(
            help="With commas; dense; topk: each rank selects of its own gradient, and all gather; hitopk: MSTopK in "
            "hosts' sums; cached: the same, with pictures of a DataCache."
        ),
    ] = "dense,topk,hitopk,cached",
    pixels: Annotated[str, typer.Option(help="Sides of the pictures, with commas.")] = "32,96",
    batch: Annotated[int, typer.Option(help="Pictures of a rank's step.")] = 16,
    width: Annotated[int, typer.Option(help="Channels of the network's first convolution.")] = 32,
    ranks: Annotated[str | None, command.ranks_option("2")] = None,
    launcher: command.LauncherLine = None,
    repetitions: command.Repetitions = 5,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of a sample.")] = 3,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without a new row.")] = 900.0,
) -> None:
    """Divide a training step into input, computation, top-k, communication and update: each is left out in turns."""
    from hvd_ext.bench.breakdown import breakdown_table, doubts, draw, measure
    from hvd_ext.bench.breakdown_worker import Request

    with command.ended_in_words("hvd_ext bench breakdown"):
        start, counts = command.launched(launcher, ranks, "2")
        (on_host, *others) = counts or (1,)
        if others:
            raise typer.BadParameter("must be one number", param_hint="--ranks")
        request = Request(
            schemes=command.names(schemes),
            pixels=command.numbers("--pixels", pixels),
            batch=batch,
            width=width,
            repetitions=repetitions,
            steps=steps,
            ranks=on_host,
            timeout_s=timeout,
        )
        record = command.Record(results.BREAKDOWN, start.describe(), json_file, append, plot_file)
        with command.progress(len(request.schemes) * len(request.pixels)) as tell:
            rows = measure(request, start, tell)
        record.keep(rows)
        record.end([breakdown_table(rows)], doubts(rows), draw=draw)
