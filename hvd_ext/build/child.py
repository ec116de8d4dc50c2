"""Asking other processes: a library that crashes at import takes a child with it, never this process."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "hvd_ext answer: "  # libraries print what they like before it
TAIL_LINES = 40
PIP_BUILD_FOLDER = "pip-build-env-"  # pip/_internal/build_env.py


class InstallError(RuntimeError):
    """A build or an installation that did not work; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a child said.

    Attributes:
        values: the JSON object that it printed; empty where it failed.
        error: empty, or one line that says why it failed.
    """

    values: Mapping[str, Any]
    error: str = ""


def python_environment(python: str, *, isolated: bool = False) -> dict[str, str]:
    """Gives the environment in which the tools installed beside an interpreter are found first.

    Args:
        python: path of the interpreter.
        isolated: leave out the entries of PYTHONPATH that belong to pip's build isolation: they hide the
            site-packages of the interpreter from it.

    Returns:
        A copy of this process's environment with the interpreter's folder first on PATH.
    """
    environment = dict(os.environ)
    folder = str(Path(python).parent)
    others = [entry for entry in environment.get("PATH", os.defpath).split(os.pathsep) if entry != folder]
    environment["PATH"] = os.pathsep.join([folder, *others])
    if isolated:
        entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        kept = [entry for entry in entries if PIP_BUILD_FOLDER not in entry]
        environment["PYTHONPATH"] = os.pathsep.join(kept)
        if len(kept) < len(entries):
            environment.pop("PYTHONNOUSERSITE", None)
    return environment


def ask(python: str, code: str, *, timeout_s: float = 300, isolated: bool = False) -> Answer:
    """Runs Python code in a child and reads the object that it leaves in `answer`.

    Args:
        python: path of the interpreter.
        code: statements that assign a dict to `answer`; JSON must be able to hold it.
        timeout_s: seconds after which the child is given up.
        isolated: see `python_environment`.

    Returns:
        The values, or one line that says why there are none: never an exception.
    """
    script = f"{code}\nimport json as _json\nprint({MARK!r} + _json.dumps(answer))\n"
    environment = python_environment(python, isolated=isolated)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        child = subprocess.run(
            [python, "-c", script], capture_output=True, text=True, errors="replace", env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Answer({}, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Answer({}, f"cannot run {python}: {error.strerror}")
    for line in reversed(child.stdout.splitlines()):
        if line.startswith(MARK):
            return Answer(json.loads(line[len(MARK) :]))
    if child.returncode < 0:
        return Answer({}, f"crashed: {signal.Signals(-child.returncode).name}")
    words = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return Answer({}, words[-1] if words else f"ended with status {child.returncode} and no words")


def printed(command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = 120) -> list[str]:
    """Gives the lines that a command prints, without empty ones; none where it cannot be run or fails."""
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=dict(environment), timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in child.stdout.splitlines() if line.strip()]
    return lines if child.returncode == 0 else []


def first_line(command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = 120) -> str:
    """Gives the first line that a command prints, and nothing where it cannot be run or fails."""
    return next(iter(printed(command, environment, timeout_s=timeout_s)), "")


def version_line(command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = 120) -> str:
    """Gives what an MPI launcher says of its version: the first line, or MPICH's first two, as one line."""
    lines = printed(command, environment, timeout_s=timeout_s)
    return " ".join(lines[:2]) if lines and lines[0].startswith("HYDRA") else next(iter(lines), "")


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs a long command, keeps all that it prints in a file and shows its lines as they come.

    Args:
        command: program and arguments.
        log: file that the output is appended to.
        cwd: folder to run in.
        environment: all of the child's environment; this process's by default.
        echo: called with each line.

    Raises:
        InstallError: the command cannot be run or fails; the text has its last lines and the log's place.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    shown = " ".join(command)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shown}\n")
        file.flush()
        try:
            child = subprocess.Popen(
                list(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                cwd=cwd,
                env=None if environment is None else dict(environment),
            )
        except OSError as error:
            raise InstallError(f"cannot run '{command[0]}': {error.strerror}") from error
        assert child.stdout is not None
        with child:
            for line in child.stdout:
                file.write(line)
                tail.append(line.rstrip())
                echo(line.rstrip())
    if child.returncode != 0:
        words = "\n".join(f"    {line}" for line in tail)
        raise InstallError(f"this command failed with status {child.returncode}: {shown}\n{words}\n  all of it: {log}")
