"""The demo: handwritten digits on four ranks with hvd_ext, beside the same training with Horovod."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from demo_views import Training, plot, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_ext.bench.events import Follower
from hvd_ext.job import Job, JobError, find, horovodrun, job_environment, mpirun

HERE = Path(__file__).resolve().parent
NO_HOROVOD = (
    "Horovod is not installed: the ranks are started with mpirun, and there is no comparison "
    "(python -m hvd_ext install-horovod)"
)


def has_horovod() -> bool:
    """Tell whether Horovod can start and train the ranks."""
    return importlib.util.find_spec("horovod") is not None and find("horovodrun") is not None


def train(
    training: Training,
    script: str,
    ranks: int,
    epochs: int,
    launcher: Callable[..., list[str]],
    timeout_s: float,
    log: Path,
    progress: Callable[[], None],
) -> None:
    """Run one training in processes of its own.

    Args:
        training: takes what happens.
        script: the example to run.
        ranks: number of ranks on this host.
        epochs: passes over the training digits.
        launcher: `horovodrun` or `mpirun` of hvd_ext.job.
        timeout_s: longest time.
        log: file for all output of all ranks; an older one is replaced.
        progress: called after news.

    Raises:
        JobError: when a rank fails; the message has its words.
    """
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_ext-demo-") as folder:
        report = Path(folder) / "report"
        follower = Follower(report)

        def follow() -> None:
            for event in follower.new():
                training.take(event)
            progress()

        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        program = [sys.executable, str(HERE / script), "--epochs", str(epochs), "--report", str(report)]
        with Job(launcher(ranks, program), log, job_environment(PYTHONPATH=path)) as job:
            try:
                job.wait(timeout_s, follow)
            except JobError as error:
                raise JobError(f"{error}\nall of it: {log}") from None
        if not training.end:
            raise JobError(f"{script}: the job ended well but did not finish its report")


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks, all on this machine.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 20,
    output: Annotated[Path, typer.Option(help="Folder for the plot and the figures.")] = Path("out/demo"),
    horovod: Annotated[bool, typer.Option(help="Compare with Horovod where it is installed.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest time of one training, seconds.")] = 600.0,
) -> None:
    """Train, compare, draw."""
    signal.signal(signal.SIGTERM, _interrupted)
    console = Console()
    with_horovod = horovod and has_horovod()
    launcher = horovodrun if with_horovod else mpirun
    if horovod and not with_horovod:
        console.print(NO_HOROVOD, markup=False, highlight=False, soft_wrap=True)
    scripts = {"hvd_ext": "digits.py", **({"Horovod": "digits_horovod.py"} if with_horovod else {})}
    trainings = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        output.mkdir(parents=True, exist_ok=True)
        with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as bar:
            for name, script in scripts.items():
                training = Training(name)
                task = bar.add_task(f"{name}, {ranks} ranks", total=epochs, state="starting")
                news = lambda one=training, at=task: bar.update(at, completed=len(one.epochs), state=one.status)  # noqa: E731
                train(training, script, ranks, epochs, launcher, timeout, (output / script).with_suffix(".log"), news)
                trainings.append(training)
    except (JobError, OSError) as error:
        Console(stderr=True).print(f"demo: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; no process was left behind")
        sys.exit(130)
    console.print(table(trainings))
    end = trainings[0].end
    console.print(f"algorithm: {end['algorithm']}: {end['why']}", markup=False, highlight=False, soft_wrap=True)
    (output / "digits.json").write_text(json.dumps([asdict(one) for one in trainings], indent=1) + "\n")
    plot(trainings, output / "digits.png")
    console.print(f"plot: {output / 'digits.png'}", markup=False, highlight=False, soft_wrap=True)
    if not all(one.end["equal"] for one in trainings):
        Console(stderr=True).print("demo: the ranks' weights differ after training, they must be equal to the last bit")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
