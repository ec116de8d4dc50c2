"""The command `python -m hvd_ext bench`."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hvd_ext.bench import command, plot_commands
from hvd_ext.commands.app import App

app = App(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure collectives beside MPI and Horovod, and the reading of data."""
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
    from hvd_ext.bench import results
    from hvd_ext.bench.allreduce import Request, measure
    from hvd_ext.bench.table import allreduce_table, faults, losses

    with command.ended_in_words("hvd_ext bench"):
        start = command.launched(launcher, ranks)
        command.check_append(append, json_file)
        request = Request(
            sizes=command.numbers("--bytes", nbytes),
            algorithms=command.names(algorithms),
            hows=command.names(how),
            ranks=command.ranks_of(start, ranks, "2,4"),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            check=check,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        if plot_file is not None and find_spec("matplotlib") is None:
            raise typer.BadParameter("needs matplotlib: python -m pip install matplotlib", param_hint="--plot")
        before = command.kept_result(results.load, json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(max(len(request.ranks), 1) * len(request.sizes)) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        result = results.result_of(run, rows)
        whole = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(allreduce_table(result))
        wrong = faults(rows)
        command.say(console, [*losses(result["rows"]), *notes], wrong)
        if plot_file is not None:
            from hvd_ext.bench import plots

            plots.draw_allreduce(whole["rows"], plot_file)
    sys.exit(1 if wrong else 0)


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
    warmup: Annotated[int, typer.Option(help="Steps of each contestant before the timed ones.")] = 0,
    timeout: command.Timeout = 600.0,
) -> None:
    """Train a Keras model over all ranks with hvd_ext and with Horovod, in turns; what they trained is checked."""
    from hvd_ext.bench import plots, results
    from hvd_ext.bench.table import training_faults, training_table, trials
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
            buckets=command.names(buckets),
            warmup=warmup,
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
        before = command.kept_result(partial(results.load, benchmark=results.TRAINING), json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(max(len(request.ranks), 1) * request.repetitions) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, options=dict(request.options), rate_bytes_per_second=request.rate, notes=notes)
        result = results.result_of(run, rows, results.TRAINING)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(training_table(result))
        wrong = training_faults(rows)
        command.say(console, [*trials(rows), *notes], wrong)
        if plot_file is not None:
            plots.draw_training(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def schedule(
    models: Annotated[
        str,
        typer.Option(
            "--model", help="Files of models (trace FOLDER --model FILE) or names as resnet50, bert-base; with commas."
        ),
    ] = "resnet50",
    scale: Annotated[str, typer.Option(help="Part of every tensor's elements, as 0.0625 or 1/16.")] = "1/16",
    ratios: Annotated[
        str,
        typer.Option(
            "--ratio",
            help="Of communication, one bucket and alone, to computing, with commas; 0: the model's own times.",
        ),
    ] = "1",
    bucketers: Annotated[
        str,
        typer.Option(help="Bucketers, with commas; auto is a name too, and delay: those of auto, one step late."),
    ] = "auto,wfbp,single,by_size,mgwfbp,optimal",
    algorithm: Annotated[str, typer.Option(help="Of all buckets, or auto.")] = "auto",
    ranks: Annotated[str | None, command.ranks_option("2")] = None,
    launcher: command.LauncherLine = None,
    rate: Annotated[str | None, command.rate_option("bound")] = None,
    repetitions: command.Repetitions = 10,
    seconds_per_row: command.SecondsPerRow = 8.0,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Replay a model's step with every bucketer, in turns, beside its prediction: ranks sleep until a tensor is ready
    and hand it to the engine, without TensorFlow, so that computing takes no core. Every result is checked."""
    from hvd_ext.bench import results
    from hvd_ext.bench.schedule import Request, measure
    from hvd_ext.bench.table import schedule_faults, schedule_table

    with command.ended_in_words("hvd_ext bench schedule"):
        start = command.launched(launcher, ranks)
        command.check_append(append, json_file)
        request = Request(
            models=command.names(models),
            bucketers=command.names(bucketers),
            scale=command.part("--scale", scale),
            ratios=command.shares("--ratio", ratios),
            algorithm=algorithm,
            ranks=command.ranks_of(start, ranks, "2"),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            rate=command.bytes_per_second(rate),
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(partial(results.load, benchmark=results.SCHEDULE), json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(max(len(request.ranks), 1) * len(request.models) * len(request.ratios)) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, rate_bytes_per_second=request.rate, notes=notes)
        result = results.result_of(run, rows, results.SCHEDULE)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(schedule_table(result))
        wrong = schedule_faults(rows)
        command.say(console, notes, wrong)
        if plot_file is not None:
            from hvd_ext.bench.schedule_plot import draw_schedule

            draw_schedule(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def stragglers(
    workloads: Annotated[
        str,
        typer.Option(
            help="Names, with commas; hyperplane-200, -300, -400: one rank is delayed by so many ms in each step; "
            "severe: all are, by 50 to 400 ms in turn; video, language, cloud: a tenth of times of real trainings."
        ),
    ] = "hyperplane-200,hyperplane-300,hyperplane-400,severe,video,language,cloud",
    modes: Annotated[
        str,
        typer.Option(
            help="Of sync=, with commas; quorum: of half of the ranks; delay: full with delay=1; horovod. "
            "full is always measured."
        ),
    ] = "full,solo,majority,quorum,auto,horovod",
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 64,
    repetitions: Annotated[int, typer.Option(help="Number of turns that share these steps.")] = 2,
    ranks: Annotated[str | None, command.ranks_option("8")] = None,
    launcher: command.LauncherLine = None,
    seed: Annotated[int, typer.Option(help="Of the data and of the sleeps.")] = 1,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: command.Timeout = 600.0,
) -> None:
    """Train with ranks that are late, with each mode of sync= and with Horovod, in turns, beside the model of rounds:
    computing is slept, so that ranks that share cores lose what ranks on machines of their own lose."""
    from hvd_ext.bench import results
    from hvd_ext.bench.stragglers import Request, measure
    from hvd_ext.bench.table import stragglers_faults, stragglers_table

    with command.ended_in_words("hvd_ext bench stragglers"):
        start = command.launched(launcher, ranks)
        command.check_append(append, json_file)
        request = Request(
            workloads=command.names(workloads),
            modes=command.names(modes),
            steps=steps,
            repetitions=repetitions,
            ranks=command.ranks_of(start, ranks, "8"),
            seed=seed,
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(partial(results.load, benchmark=results.STRAGGLERS), json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(max(len(request.ranks), 1) * len(request.workloads)) as tell:
            rows, notes, topology = measure(request, start, tell)
        run.update(topology=topology, notes=notes)
        result = results.result_of(run, rows, results.STRAGGLERS)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(stragglers_table(result))
        wrong = stragglers_faults(rows)
        command.say(console, notes, wrong)
        if plot_file is not None:
            from hvd_ext.bench.stragglers_plot import draw_stragglers

            draw_stragglers(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def topk(
    elements: Annotated[str, typer.Option(help="Lengths of the float32 inputs, with commas.")] = "25000000",
    densities: Annotated[str, typer.Option(help="k over the length, with commas.")] = "0.001,0.01",
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Of gauss, laplace, gradient (of ResNet-50 in training) and of ties, zeros, nan, ascending, outlier, "
            "sparse, which are hard; all without it."
        ),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            help="Of noop, exact, graph, segments, feedback, separate, mstopk, dgc, threshold, random, algorithm1, "
            "algorithm1-tf, dgc-tf, tf, torch, numpy; all without it."
        ),
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads and cores, with commas.")] = "1",
    repetitions: command.Repetitions = 25,
    seconds_per_row: Annotated[float, typer.Option(help="Slow rows have fewer samples, at least 3.")] = 3.0,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    plot_file: command.PlotFile = None,
    timeout: Annotated[float, typer.Option(help="Longest time without a new row, seconds.")] = 900.0,
) -> None:
    """Select the k largest of one buffer: hvd_ext.mstopk, Algorithm 1, TensorFlow, PyTorch, NumPy, each beside one pass
    over memory; every answer is checked."""
    from hvd_ext.bench import plots, results
    from hvd_ext.bench.table import topk_faults, topk_tables
    from hvd_ext.bench.topk import NAMES, Request, measure
    from hvd_ext.bench.topk_inputs import INPUTS

    with command.ended_in_words("hvd_ext bench topk"):
        command.check_append(append, json_file)
        request = Request(
            elements=command.numbers("--elements", elements),
            densities=command.shares("--densities", densities),
            inputs=INPUTS if inputs is None else command.names(inputs),
            contestants=tuple(NAMES) if contestants is None else command.names(contestants),
            threads=command.numbers("--threads", threads),
            repetitions=repetitions,
            seconds_per_row=seconds_per_row,
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(partial(results.load, benchmark=results.TOPK), json_file, append)
        run = results.begin_run("one process for each number of threads, held to as many cores")
        with command.progress(request.groups()) as tell:
            rows, notes = measure(request, tell)
        run.update(evict_bytes=request.evict_bytes, notes=notes)
        result = results.result_of(run, rows, results.TOPK)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        for table in topk_tables(result):
            console.print(table)
        wrong = topk_faults(rows)
        command.say(console, notes, wrong)
        if plot_file is not None:
            plots.draw_topk(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


@app.command()
def lars(
    ranks: Annotated[str | None, command.ranks_option("1,2,4")] = None,
    models: Annotated[str, typer.Option(help="Of resnet50, transformer, with commas.")] = "resnet50,transformer",
    parts: Annotated[
        str,
        typer.Option(
            help="With commas; norms: of all tensors, beside one pass over the same bytes and one op per tensor; "
            "update: the whole step, beside the same in Keras' operations and SGD; pto: norms divided among ranks."
        ),
    ] = "norms,update,pto",
    repetitions: command.Repetitions = 7,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls of a sample.")] = 3,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads of each rank.")] = 1,
    launcher: command.LauncherLine = None,
    json_file: command.JsonFile = None,
    append: command.Append = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time without a new row.")] = 600.0,
) -> None:
    """Compute the norms and the update of LARS, each rank alone or the ranks together, beside other ways, in turns."""
    from hvd_ext.bench import results
    from hvd_ext.bench.lars import PAPER, Request, goals, lars_table, measure

    with command.ended_in_words("hvd_ext bench lars"):
        command.check_append(append, json_file)
        start = command.launched(launcher, ranks)
        request = Request(
            ranks=command.ranks_of(start, ranks, "1,2,4"),
            models=command.names(models),
            parts=command.names(parts),
            repetitions=repetitions,
            calls=calls,
            threads=threads,
            timeout_s=timeout,
        )
        command.check_folder("--json", json_file)
        before = command.kept_result(partial(results.load, benchmark=results.LARS), json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(len(request.jobs(start))) as tell:
            rows = measure(request, start, tell)
        result = results.result_of(run, rows, results.LARS)
        results.keep(result, before, json_file)
        console = command.table_console()
        console.print(lars_table(rows))
        command.say(console, [*goals(rows), PAPER])


@app.command()
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
    from hvd_ext.bench import results
    from hvd_ext.bench.data import Request, measure
    from hvd_ext.bench.data_table import data_faults, data_table, missed

    with command.ended_in_words("hvd_ext bench data"):
        command.check_append(append, json_file)
        request = Request(
            parts=command.names(parts),
            contestants=() if contestants is None else command.names(contestants),
            repetitions=repetitions,
            scale=command.part("--scale", scale),
            timeout_s=timeout,
            folder=folder,
        )
        if folder is not None and not folder.is_dir():
            raise typer.BadParameter(f"{folder}: must be there", param_hint="--folder")
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(partial(results.load, benchmark=results.DATA), json_file, append)
        run = results.begin_run("processes and jobs of this host, one after the other")
        with command.progress(len(request.parts)) as tell:
            rows, notes = measure(request, tell)
        run.update(notes=notes)
        result = results.result_of(run, rows, results.DATA)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(data_table(result))
        wrong = data_faults(rows)
        command.say(console, [*missed(rows), *notes], wrong)
        if plot_file is not None:
            from hvd_ext.bench.data_plot import draw_data

            draw_data(kept["rows"], plot_file)
    sys.exit(1 if wrong else 0)


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
    from hvd_ext.bench import results
    from hvd_ext.bench.breakdown import Request, breakdown_table, doubts, draw, measure

    with command.ended_in_words("hvd_ext bench breakdown"):
        command.check_append(append, json_file)
        start = command.launched(launcher, ranks)
        (on_host, *others) = command.ranks_of(start, ranks, "2") or (1,)
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
        command.check_folder("--json", json_file)
        command.check_folder("--plot", plot_file)
        before = command.kept_result(partial(results.load, benchmark=results.BREAKDOWN), json_file, append)
        run = results.begin_run(start.describe())
        with command.progress(len(request.schemes) * len(request.pixels)) as tell:
            rows = measure(request, start, tell)
        result = results.result_of(run, rows, results.BREAKDOWN)
        kept = results.keep(result, before, json_file)
        console = command.table_console()
        console.print(breakdown_table(rows))
        command.say(console, doubts(rows))
        if plot_file is not None:
            draw(kept["rows"], plot_file)


for name, function in plot_commands.COMMANDS.items():
    app.command(name)(function)
