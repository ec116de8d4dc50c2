"""Questions to child processes: a library that crashes at its import ends the child, never this process."""

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

MARK = "hvd_ext answer: "  # libraries may print anything before it
TAIL_LINES = 40
PIP_BUILD_FOLDER = "pip-build-env-"  # pip/_internal/build_env.py


class InstallError(RuntimeError):
    """A build or an installation failed; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A child's answer.

    Attributes:
        values: the JSON object that the child printed; empty if it failed.
        error: empty, or one line that says why the child failed.
    """

    values: Mapping[str, Any]
    error: str = ""


def python_environment(python: str, *, isolated: bool = False) -> dict[str, str]:
    """Return an environment in which the tools beside an interpreter are found first.

    Args:
        isolated: remove the entries of PYTHONPATH that belong to pip's build isolation, because they hide the
            interpreter's site-packages.

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
    """Run Python code in a child and read the object that the code assigns to `answer`; never raises.

    Args:
        python: the path of the interpreter.
        code: statements that assign to `answer` a dict that JSON can hold.

    Returns:
        The values, or one line that says why there are none.
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
    return Answer({}, words[-1] if words else f"ended with status {child.returncode} and without output")


def version_line(command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = 120) -> str:
    """Return the first line that a command prints (of MPICH's launcher the first two, joined), empty if it fails."""
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=dict(environment), timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in child.stdout.splitlines() if line.strip()]
    if child.returncode != 0 or not lines:
        return ""
    return " ".join(lines[:2]) if lines[0].startswith("HYDRA") else lines[0]


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a long command, append its output to a file, and pass on each line as it comes.

    Args:
        command: the program and its arguments.
        environment: the child's complete environment; this process's by default.
        echo: called with each line.

    Raises:
        InstallError: the command cannot be run or fails; the message has its last lines and the path of the log.
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
        raise InstallError(
            f"this command failed with status {child.returncode}: {shown}\n{words}\n  the whole output: {log}"
        )
