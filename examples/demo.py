"""The demo: the same training with Horovod, with hvd_ext and with its TopK, on a cluster of uneven hosts.

The hosts are rehearsed on this machine, with links of 100 Mbit/s (docs/cluster.md). If this machine does not allow
that, all ranks run on one host.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from demo_views import TARGET, Training, plot, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.results import begin_run, save
from hvd_ext.bench.sampling import Follower
from hvd_ext.cluster.rehearsal import Cluster, ClusterError
from hvd_ext.cluster.spec import Spec, counts
from hvd_ext.cluster.tools import obstacle
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import Job, JobError, job_environment, mpirun

HERE = Path(__file__).resolve().parent
BENCHMARK = "demo, handwritten digits"
SCRIPTS = {
    "Horovod": ["digits_horovod.py"],
    "hvd_ext": ["digits.py"],
    "hvd_ext, TopK": ["digits.py", "--density", "0.01"],
}
NO_HOROVOD = "Horovod is not installed, so there is no comparison with it: python -m hvd_ext install-horovod"
# On one host steps are so short that a single training would not show how much their time varies.
TURNS_ON_ONE_HOST = 3


@dataclass(frozen=True)
class Place:
    """Where the ranks run: a description, whether it is one host, how to start a job there, and its environment."""

    words: str
    one_host: bool
    command: Callable[[list[str]], list[str]]
    environment: Callable[..., dict[str, str]]


@contextmanager
def place(hosts: tuple[int, ...], rate: str, why_not: str) -> Iterator[Place]:
    """Make the cluster, and remove it afterwards.

    Args:
        hosts: the number of ranks on each host.
        rate: the rate of the hosts' links.
        why_not: why all ranks must run on one host; empty for a cluster.

    Yields:
        The place.
    """
    ranks = " + ".join(map(str, hosts))
    if why_not:
        yield Place(f"one host of {sum(hosts)} ranks", True, partial(mpirun, sum(hosts)), job_environment)
        return
    with Cluster(Spec(hosts, rate=rate)) as cluster:
        words = f"{len(hosts)} hosts of {ranks} ranks, {rate.replace('mbit', ' Mbit/s')} between them"
        yield Place(words, False, cluster.command, cluster.environment)


def train(training: Training, at: Place, epochs: int, timeout_s: float, log: Path, tell: Callable[[], None]) -> None:
    """Run one training as a job, and follow its report.

    Args:
        training: the training, which takes the events of the report.
        at: where the ranks run.
        epochs: passes over the training digits.
        timeout_s: the time limit.
        log: the file for the output of all ranks; an older one is replaced.
        tell: called after new events.

    Raises:
        JobError: a rank failed; the message has the end of its output.
    """
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_ext-demo-") as folder:
        report = Path(folder) / "report"
        follower = Follower(report)

        def follow() -> None:
            for event in follower.new():
                training.take(event)
            tell()

        script, *options = SCRIPTS[training.name]
        program = [sys.executable, str(HERE / script), "--epochs", str(epochs), "--report", str(report), *options]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        ended = len(training.ends)
        with Job(at.command(program), log, at.environment(PYTHONPATH=path)) as job:
            try:
                job.wait(timeout_s, follow)
            except JobError as error:
                raise JobError(f"{error}\nthe whole output: {log}") from None
        if len(training.ends) == ended:
            raise JobError(f"{script}: the job succeeded but did not finish its report")


def compare(
    at: Place, names: list[str], epochs: int, turns: int, timeout_s: float, output: Path, console: Console
) -> list[Training]:
    """Run all trainings in turns, each turn in another order, and show the progress; the arguments are `main`'s."""
    trainings = [Training(name) for name in names]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as bar:
        tasks = {one.name: bar.add_task(one.name, total=None, start=False, state="waits") for one in trainings}
        for turn in range(turns):
            for one in rotated(trainings, turn):
                task = tasks[one.name]
                bar.start_task(task)

                def tell(one: Training = one, task: int = task) -> None:
                    bar.update(task, completed=one.done, total=turns * one.total or None, state=one.status)  # type: ignore[arg-type]

                log = output / f"{one.name.replace(', ', '_').lower()}.log"
                train(one, at, epochs, timeout_s, log, tell)
                bar.update(task, state="done" if turn == turns - 1 else "waits for its turn")
                if turn == turns - 1:
                    bar.stop_task(task)
    return trainings


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(
    hosts: Annotated[str, typer.Option(metavar="N,N", help="Ranks on each rehearsed host.")] = "2,1",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of each host's link, each way.")] = "100mbit",
    one_host: Annotated[bool, typer.Option("--one-host", help="Put all ranks on one host.")] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 8,
    turns: Annotated[int, typer.Option(min=0, help="Trainings of each kind; 0: 1 on a cluster, 3 on one host.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the picture and the figures.")] = Path("out/demo"),
    horovod: Annotated[bool, typer.Option(help="Compare with Horovod where it is installed.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest time of one training, seconds.")] = 600.0,
) -> None:
    """Train a network in three ways, compare, draw."""
    signal.signal(signal.SIGTERM, _interrupted)
    console = Console()

    def say(words: str, to: Console = console) -> None:
        to.print(words, markup=False, highlight=False, soft_wrap=True)

    errors = Console(stderr=True)
    names = [name for name in SCRIPTS if name != "Horovod" or (horovod and importlib.util.find_spec("horovod"))]
    if horovod and "Horovod" not in names:
        say(NO_HOROVOD)
    try:
        run = begin_run("mpirun") | {"command": "make demo"}
        words = "" if one_host else obstacle()
        why_not = "--one-host was given" if one_host else words and f"a rehearsed cluster {words}"
        if why_not:
            names.remove("hvd_ext, TopK")
            say(f"all ranks are on one host, where TopK leaves nothing out and is not compared: {why_not}")
        output.mkdir(parents=True, exist_ok=True)
        with place(counts("hosts", hosts), rate, why_not) as at:
            say(f"trains on {at.words}: {', then '.join(names)}")
            count = turns or (TURNS_ON_ONE_HOST if at.one_host else 1)
            trainings = compare(at, names, epochs, count, timeout, output, console)
    except (ClusterError, InvalidError, JobError, OSError) as error:
        say(f"demo: {error}", errors)
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; no process was left behind", errors)
        sys.exit(130)
    rows = [one.row() for one in trainings]
    about = {"place": at.words, "parameters": trainings[0].parameters, "target": TARGET}
    result = {"benchmark": BENCHMARK, "run": run, **about, "rows": rows}
    save(output / "demo.json", result)
    plot(result, output / "demo.png")
    console.print(table(result))
    for one in trainings:
        if one.ends[0]["algorithm"]:
            say(f"{one.name}: {one.ends[0]['algorithm']}: {one.ends[0]['why']}")
    say(f"picture: {output / 'demo.png'}; all numbers: {output / 'demo.json'}")
    unequal = [row["name"] for row in rows if not row["equal"]]
    if unequal:
        say(f"demo: {unequal[0]}: the ranks' weights differ after training, they must be equal to the last bit", errors)
        sys.exit(1)
    say("after each training all ranks had the same weights, to the last bit")


if __name__ == "__main__":
    typer.run(main)
