"""The commands of `python -m hvd_ext`: doctor, build, run, bench, plan, probe, simulate, trace and others."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hvd_ext.build.child import InstallError
from hvd_ext.commands.app import App, ended_in_words, say

app = App(
    no_args_is_help=True, help="Data-parallel training on TensorFlow: the tools around it. Each command has --help."
)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    limit_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="under a launcher: how long to wait for the ranks")
    ] = 120,
) -> None:
    """Report what works, what is missing, and the commands that repair it; status 1 means that training cannot work.

    Under a launcher (mpirun -np 2 python -m hvd_ext doctor) it checks the job: all ranks look, and rank 0 reports.
    """
    from hvd_ext.doctor import checks, job

    console = Console(stderr=json)
    title = f"hvd_ext on {sys.executable}"
    if job.under_launcher(os.environ):
        findings = job.examine(os.environ, limit_s)
        if isinstance(findings, int):
            raise typer.Exit(findings)
        console = Console(stderr=json, width=job.console_width(os.environ))
        title = "hvd_ext in this job"
    else:
        with console.status("checking the installed parts"):
            findings = checks.examine()
    if json:
        typer.echo(checks.as_json(findings))
    else:
        console.print(checks.as_table(findings, title))
        say(console, [checks.verdict(findings)])
    raise typer.Exit(0 if checks.can_train(findings) else 1)


@app.command()
def build(
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for the libraries; hvd_ext/lib by default")
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="build the data cache alone, which needs no MPI")] = False,
) -> None:
    """Build the native libraries against the installed TensorFlow and MPI."""
    from hvd_ext.build import native, progress
    from hvd_ext.engine import libraries

    console = Console(stderr=True)
    with ended_in_words("hvd_ext build", InstallError):
        folder = libraries.native_sources()
        if folder is None:
            raise InstallError(f"{libraries.PACKAGE}: the native sources are not in this package; install it again")
        target = (output or libraries.LIBRARIES).absolute()
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise InstallError(
                f"{target} cannot be written: run this as its owner, or name another folder with --output"
            )
        toolchain, missing = native.find_toolchain(mpi=not data)
        if toolchain is None:
            words = "\n".join(f"  {thing}" for thing in missing)
            raise InstallError(f"the native libraries cannot be built here:\n{words}")
        with progress.step(f"native libraries for TensorFlow {toolchain.tensorflow}, {toolchain.mpi}", console) as echo:
            native.build(toolchain, folder, target, echo=echo)


@app.command("install-horovod")
def install_horovod(
    force: Annotated[bool, typer.Option("--force", help="build it even if it works already")] = False,
) -> None:
    """Build and install Horovod 0.28.1, whose original source does not build on TensorFlow 2.19 and later."""
    from hvd_ext.build import horovod, progress
    from hvd_ext.engine import versions

    console = Console(stderr=True)
    if not force:
        answer = horovod.installed()
        if not answer.error and answer.values["version"] == versions.HOROVOD and answer.values["mpi"]:
            console.print(f"Horovod {versions.HOROVOD} is installed and works with this TensorFlow")
            return
    # A random name, because another user could put a link in the place of a predictable one.
    descriptor, name = tempfile.mkstemp(prefix="hvd_ext-horovod-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    with ended_in_words("hvd_ext install-horovod", InstallError):
        try:
            with progress.step(f"Horovod {versions.HOROVOD} from source", console) as echo:
                horovod.install(log, echo=echo)
        except InstallError:
            if log.stat().st_size == 0:
                log.unlink()
            raise
    log.unlink()


# What these commands import takes time, so that each is a module of its own, which gets all arguments.
FORWARDED = {
    "run": (
        "hvd_ext.commands.run",
        "Run an elastic job, which continues when workers are lost, and uses hosts that are added: `run --help`.",
    ),
    "bench": ("hvd_ext.bench.cli", "Measure collectives beside MPI and Horovod: `bench allreduce --help`."),
    "plan": (
        "hvd_ext.commands.plan",
        "Price every algorithm on a cluster, say which is chosen and why, and draw its plan: `plan --help`.",
    ),
    "simulate": (
        "hvd_ext.commands.simulate",
        "Predict the iteration time of a model on a cluster of any size, and what would shorten it: `simulate --help`.",
    ),
    "probe": (
        "hvd_ext.commands.probe",
        "Measure the links between the ranks of a job, and write its topology file: `probe --help`.",
    ),
    "trace": (
        "hvd_ext.commands.trace",
        "Merge the traces of all ranks for Perfetto, and say how much communication was exposed: `trace --help`.",
    ),
    "cache": (
        "hvd_ext.commands.cache",
        "List, verify or delete what data caches have left on the disk and in memory of this host: `cache ls --help`.",
    ),
    "cluster": (
        "hvd_ext.commands.cluster",
        "Rehearse a cluster of several hosts on this machine, with limited links: `cluster run --help`.",
    ),
}


def _forward(name: str, module: str, words: str) -> None:
    # the command that a cluster runs may have options of its own
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    settings["allow_interspersed_args"] = name not in ("cluster", "run")

    @app.command(name, help=words, context_settings=settings)
    def forward(context: typer.Context) -> None:
        importlib.import_module(module).app(args=context.args, prog_name=f"python -m hvd_ext {name}")


for _name, (_module, _words) in FORWARDED.items():
    _forward(_name, _module, _words)


if __name__ == "__main__":
    app(prog_name="python -m hvd_ext")
