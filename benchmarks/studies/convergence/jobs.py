"""The jobs of a convergence study: they train what is missing, with real ranks, and write a file for each run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.convergence.models import DATA_OF
from benchmarks.studies.convergence.plan import Run, Study, facts
from benchmarks.studies.convergence.worker import Task
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.errors import InvalidError
from hvd_ext.options import Options
from hvd_ext.runner.launcher import POLL_S, Job, JobError, job_environment, last_words, mpirun

WORKER = "benchmarks.studies.convergence.worker"
PYTORCH_WORKER = "benchmarks.studies.convergence.worker_pytorch"
Start = Callable[[ExitStack, Path, list[str]], Job]
Tell = Callable[[str, dict[str, Any]], None]


def data_files(study: Study, models: Sequence[str], folder: Path, images: Path) -> dict[str, str]:
    """Make the missing files of data sets, so that each rank reads one file and not 40,000.

    Args:
        study: says how long texts are.
        models: that will be trained.
        folder: of the files.
        images: the image set, as examples/make_images.py has made it.

    Returns:
        By model, the path of its data set.

    Raises:
        InvalidError: there is no image set.
    """
    paths = {}
    for model in models:
        length = study.models[model].length
        is_text = DATA_OF[model] == data_sets.TEXT
        path = folder / (f"text{length}.npz" if is_text else "images.npz")
        if not path.exists():
            data_sets.save(path, data_sets.text(length) if is_text else data_sets.images(images))
        paths[model] = str(path.absolute())
    return paths


def on_this_machine(study: Study) -> Start:
    """Give the way to start a job whose ranks are all on this machine, with the study's hosts as their topology.

    Models learn the same as on real hosts, because the plans and the order of all additions are the same.
    """

    def start(stack: ExitStack, folder: Path, command: list[str]) -> Job:
        path = folder / "topology.yaml"
        path.write_text(topology(Spec(study.hosts, rate=study.rate)), encoding="utf-8")
        environment = job_environment(HVD_EXT_TOPOLOGY=str(path))
        return stack.enter_context(Job(mpirun(sum(study.hosts), command), folder / "log", environment))

    return start


def on_a_cluster(study: Study) -> Start:
    """Give the way to start a job on a rehearsed cluster with limited links (docs/cluster.md).

    All connections have the congestion control that ours ask for (docs/launch.md), the peer's too.
    """

    def start(stack: ExitStack, folder: Path, command: list[str]) -> Job:
        from hvd_ext.cluster.rehearsal import Cluster

        cluster = stack.enter_context(Cluster(Spec(study.hosts, rate=study.rate)))
        for host in cluster.spec.names:
            choose = f"echo {Options().tcp_congestion} >/proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run([*cluster.enter(host), "sh", "-c", choose], check=True)
        return stack.enter_context(Job(cluster.command(command), folder / "log", cluster.environment()))

    return start


def train(
    study: Study,
    runs: Sequence[Run],
    folder: Path,
    data: Mapping[str, str],
    tell: Tell,
    silence_s: float = 900.0,
    pytorch: str = "",
    starts: Mapping[bool, Callable[[Study], Start]] | None = None,
) -> list[str]:
    """Do runs: a job for those that are timed and one for those that learn, of us and of the peer.

    A failure does not end the others.

    Args:
        study: of the runs.
        runs: that are to be done, in this order.
        folder: of the runs' files.
        data: files of the data sets, by model.
        tell: takes the kind of each event ("run", "epoch", "done", "failed") and the event.
        silence_s: a job that says nothing for so long has failed.
        pytorch: the Python that has PyTorch, for settings with a peer.
        starts: how jobs are started that are timed, and others; None for on a cluster, and on this machine.

    Returns:
        Words for each failure, with the names of the runs that failed with it.
    """
    ways = {True: on_a_cluster, False: on_this_machine} if starts is None else starts
    failures = []
    workers = {"": [sys.executable, "-m", WORKER], "pytorch": [pytorch, "-m", PYTORCH_WORKER]}
    for is_timed, peer in itertools.product((True, False), workers):
        left = {
            run.name: run
            for run in runs
            if (run.seed is None) == is_timed and study.settings[run.setting].peer.partition(":")[0] == peer
        }
        if left and not workers[peer][0]:
            raise InvalidError(f"settings ({', '.join(left)}): give --pytorch, a Python that has PyTorch")
        while left:
            current = ""
            try:
                with tempfile.TemporaryDirectory(prefix="hvd_ext-bench-", ignore_cleanup_errors=True) as temporary:
                    given = (study, left, folder, data, Path(temporary), silence_s, ways[is_timed], workers[peer])
                    for event in _events(*given):
                        current = event["name"]
                        tell(event["kind"], event)
                        if event["kind"] == "done":
                            del left[current]
                            current = ""
                if left:
                    raise JobError(f"the job ended before {', '.join(left)}")
            except JobError as error:
                # a job that fails before its first run would fail again
                names = [current] if current else list(left)
                failures.append(f"{', '.join(names)}: {error}")
                for name in names:
                    left.pop(name)
                    tell("failed", {"kind": "failed", "name": name})
    return failures


def _events(
    study: Study,
    runs: Mapping[str, Run],
    folder: Path,
    data: Mapping[str, str],
    temporary: Path,
    silence_s: float,
    way: Callable[[Study], Start],
    worker: Sequence[str],
) -> Any:
    about = {name: facts(study, run) for name, run in runs.items()}
    task = temporary / "task.json"
    Task(str(folder.absolute()), str(temporary), dict(data), about).write(task)
    follower, end = Follower(temporary / EVENTS), time.monotonic() + silence_s
    with ExitStack() as stack:
        job = way(study)(stack, temporary, [*worker, str(task)])
        while True:
            ended = job.status() is not None
            events = follower.new()
            yield from events
            if events:
                end = time.monotonic() + silence_s
            elif time.monotonic() > end:
                raise JobError(f"nothing was said for {silence_s:g} s\n{last_words(job.log)}")
            if ended:
                job.wait(POLL_S)
                return
            time.sleep(POLL_S)


def check_folder(folder: Path) -> None:
    """Make the folder of the runs' files; refuse one that cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidError(f"folder ({folder}): it cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise InvalidError(f"folder ({folder}): must be one in which files can be written")
