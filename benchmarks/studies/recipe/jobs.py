"""The jobs of the study: they train what is missing, each with real ranks in a folder of its own."""

from __future__ import annotations

import json
import shutil
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
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.runner.launcher import POLL_S, Job, JobError, job_environment, last_words, mpirun

from images.manifest import write_whole  # isort: skip  (ways.py finds it)

SCRIPT = EXAMPLES / "dawnbench_resnet50.py"
HOROVOD = "benchmarks.studies.recipe.horovod"
ABOUT, LINKS = "about.json", "links.yaml"
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
    """Do runs one after the other. A failure does not end the others.

    One that was stopped in its middle goes on; a timed one begins anew, because a start is in the times of its epoch.

    Args:
        chosen: the runs.
        folder: of their folders.
        pictures: the set of examples/make_images.py.
        few: a smaller set, for those that are timed.
        tell: takes each line that a run says.
        silence_s: a run that says nothing for so long has failed.

    Returns:
        Words for each failure.

    Raises:
        InvalidError: the folder is of another study, or was begun with other pictures.
    """
    check_folder(folder)
    _check_pictures(folder, pictures, few)
    failures = []
    for run in chosen:
        if rows(folder, run):
            continue
        if run.kind == "time":
            shutil.rmtree(folder / run.name, ignore_errors=True)
        written = folder / f"{run.name}.yaml"
        written.write_text(known.written(run.settings(few if run.kind == "time" else pictures)), encoding="utf-8")
        about = {"machine": machine(), "versions": versions()}
        try:
            _do(run, written, folder, tell, silence_s)
            save(folder / run.name / ABOUT, about)
        except HvdExtError as error:
            failures.append(f"{run.name}: {error}")
    return failures


def _check_pictures(folder: Path, pictures: Path, few: Path) -> None:
    """Note which pictures the trainings of a folder have, and refuse others."""
    path, named = folder / "pictures.json", {"--pictures": str(pictures.absolute()), "--few": str(few.absolute())}
    if not path.exists():
        write_whole(path, json.dumps(named).encode())
        return
    for option, known_path in json.loads(path.read_text(encoding="utf-8")).items():
        if named[option] != known_path:
            raise InvalidError(
                f"{option} ({named[option]}): trainings in {folder} have {known_path}; take it, or another folder"
            )


def _do(run: Run, settings: Path, folder: Path, tell: Tell, silence_s: float) -> None:
    program = _command(run, settings, folder / run.name, _measured(folder, silence_s))
    log = folder / f"{run.name}.log"
    log.unlink(missing_ok=True)
    with ExitStack() as stack:
        if run.kind == "seed":
            command, environment = mpirun(sum(CLUSTER.hosts), program), job_environment()
        else:
            cluster = stack.enter_context(Cluster(CLUSTER))
            command, environment = cluster.command(program), cluster.environment()
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


def _measured(folder: Path, timeout_s: float) -> Path:
    """Give the file of the cluster's links, which a job measures once: all trainings and their prices have the same."""
    path = folder / LINKS
    if not path.exists():
        with Cluster(CLUSTER) as cluster:
            program = [sys.executable, "-m", "hvd_ext", "probe", "--output", str(path.absolute())]
            with Job(cluster.command(program), folder / "links.log", cluster.environment()) as job:
                job.wait(timeout_s)
    return path


def _command(run: Run, settings: Path, output: Path, where: Path) -> list[str]:
    named = [str(settings.absolute()), "--output", str(output.absolute()), "--topology", str(where.absolute())]
    script = ["-m", HOROVOD, run.way.horovod] if run.way.horovod else [str(SCRIPT)]
    return [sys.executable, *script, *named]
