"""The jobs of the study: they train what is missing, each with real ranks in a folder of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.studies.convergence.jobs import check_folder
from benchmarks.studies.recipe.ways import CLUSTER, EXAMPLES, Run, known
from hvd_ext.bench.results import machine, save, versions
from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import topology
from hvd_ext.runner.launcher import POLL_S, Job, JobError, job_environment, last_words, mpirun

SCRIPT = EXAMPLES / "dawnbench_resnet50.py"
HOROVOD = "benchmarks.studies.recipe.horovod"
ABOUT = "about.json"
Tell = Callable[[Run, str], None]


def rows(folder: Path, run: Run) -> list[dict[str, Any]]:
    """Give a row for each epoch of a run that is done; nothing of one that is not, or was made with other settings."""
    from resnet50 import rows as kept

    path = folder / run.name
    try:
        settings = known.read(str(path / "settings.yaml"))
        found = kept.read(path / "report.json")
    except known.SettingsError:
        return []
    wanted = run.settings(Path(settings.data.source))
    return [dict(row) for row in found] if settings == wanted and len(found) == wanted.epochs else []


def train(
    chosen: Sequence[Run], folder: Path, pictures: Path, few: Path, tell: Tell, silence_s: float = 600.0
) -> list[str]:
    """Do runs one after the other; one that was stopped in its middle goes on. A failure does not end the others.

    Args:
        chosen: the runs.
        folder: of their folders.
        pictures: the set of examples/make_images.py.
        few: a smaller set, for those that are timed.
        tell: takes each line that a run says.
        silence_s: a run that says nothing for so long has failed.

    Returns:
        Words for each failure.
    """
    check_folder(folder)
    failures = []
    for run in chosen:
        if rows(folder, run):
            continue
        written = folder / f"{run.name}.yaml"
        written.write_text(known.written(run.settings(few if run.kind == "time" else pictures)), encoding="utf-8")
        about = {"machine": machine(), "versions": versions()}
        try:
            _do(run, written, folder, tell, silence_s)
            save(folder / run.name / ABOUT, about)
        except JobError as error:
            failures.append(f"{run.name}: {error}")
    return failures


def _do(run: Run, settings: Path, folder: Path, tell: Tell, silence_s: float) -> None:
    log, output = folder / f"{run.name}.log", folder / run.name
    log.unlink(missing_ok=True)
    with ExitStack() as stack:
        if run.kind == "seed":
            where = folder / "topology.yaml"
            where.write_text(topology(CLUSTER), encoding="utf-8")
            command = mpirun(sum(CLUSTER.hosts), _command(run, settings, output, where))
            environment = job_environment()
        else:
            cluster = stack.enter_context(Cluster(CLUSTER))
            command, environment = cluster.command(_command(run, settings, output)), cluster.environment()
        job = stack.enter_context(Job(command, log, environment))
        end, seen = time.monotonic() + silence_s, 0
        while job.status() is None:
            lines = log.read_text(errors="replace").splitlines(keepends=True)
            for line in lines[seen:]:
                if line.endswith("\n"):
                    seen, end = seen + 1, time.monotonic() + silence_s
                    tell(run, line.rstrip())
            if time.monotonic() > end:
                raise JobError(f"nothing was said for {silence_s:g} s\n{last_words(log)}")
            time.sleep(POLL_S)
        job.wait(POLL_S)


def _command(run: Run, settings: Path, output: Path, where: Path | None = None) -> list[str]:
    named = [str(settings.absolute()), "--output", str(output.absolute())]
    if where is not None:
        named += ["--topology", str(where.absolute())]
    script = ["-m", HOROVOD, run.way.horovod] if run.way.horovod else [str(SCRIPT)]
    return [sys.executable, *script, *named]
