"""The doctor under a launcher: every rank examines itself, the ranks meet, and rank 0 reports, all in limited time."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from hvd_ext.build.child import MARK
from hvd_ext.doctor import job_checks, job_facts
from hvd_ext.doctor.checks import Finding
from hvd_ext.doctor.job_facts import Facts
from hvd_ext.job import launch

LIMIT_S = 120.0  # ranks of a busy machine need tens of seconds to import TensorFlow
CHECKS_S = 120.0  # the other ranks of a host also wait for the rank that imports TensorFlow
GRACE_S = 15.0  # time after the limit in which the meeting can end by itself and say why, before it is killed
WIDTH = 110
LINGER_S = 20.0  # how long a failed rank waits for rank 0 to report, because its own end would end the job


class Ended(Exception):
    """The launcher ends the job while this rank is still working."""


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process, even one that `init` refuses."""
    try:
        return launch.examine(environ).mpi
    except ValueError:
        return True


def examine(environ: Mapping[str, str], limit_s: float = LIMIT_S) -> list[Finding] | int:
    """Examine this rank, meet the other ranks within the time limit, and judge the job; all ranks call this.

    Returns:
        The findings on the rank that reports them; the exit status on the others.
    """
    launched = job_facts.of_launcher(environ)
    speaks = launched.rank in (0, None) and launched.place in (0, None)
    facts: Facts = launched
    met: dict[str, Any] = {}
    before = signal.signal(signal.SIGTERM, _ended)
    of_host = launched.place in (0, None)
    try:
        facts = job_facts.collect(environ, of_host=of_host)
        if facts.refused:
            met = {"error": facts.refused}
        else:
            met = _meeting(facts, environ, limit_s if of_host else limit_s + CHECKS_S)
    except Ended:
        met = {"error": "the launcher ended the job before the ranks met", "cut_off": True}
    finally:
        signal.signal(signal.SIGTERM, before)
    if "answers" in met:
        return job_checks.judge(met) if met["rank"] == 0 else 0
    if speaks:
        return job_checks.judge({**met, "answers": [{**dataclasses.asdict(facts), "mpi": met.get("mpi", {})}]})
    if launched.place == 0:
        where = ", ".join(f"{name} {address}" for name, address in facts.networks) or "none"
        _say(f"host {facts.host} (rank {facts.rank}): interfaces: {where}")
    if not met.get("cut_off"):
        return 0
    # the end of this process would cut off the report of rank 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(LINGER_S)
    # Had rank 0 reported and ended, the launcher would have ended this process.
    _say(f"rank {facts.rank} of host {facts.host}: {met['error']}; rank 0 has not reported")
    return 1


def _meeting(facts: Facts, environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    request = json.dumps({"facts": dataclasses.asdict(facts), "limit_s": limit_s})
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # MPICH's and SLURM's launchers talk to a rank through a descriptor, which the child must inherit.
        child = subprocess.Popen(
            [sys.executable, "-m", "hvd_ext.doctor.job_meeting"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env={**environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            close_fds=False,
        )
        try:
            said, _ = child.communicate(request, timeout=limit_s + GRACE_S)
        except (subprocess.TimeoutExpired, Ended):
            said = ""  # MPI's messages are in the file
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        errors.seek(0)
        words = [line.strip() for line in errors.read().splitlines() if line.strip(" -")]
    for line in reversed(said.splitlines()):
        if line.startswith(MARK):
            met: dict[str, Any] = json.loads(line[len(MARK) :])
            return met
    ours = [word for word in words if word.startswith(job_checks.OURS)]
    return {"error": job_checks.end_of_meeting(ours or words, child.returncode, limit_s), "cut_off": True}


def _ended(number: int, frame: FrameType | None) -> None:
    raise Ended


def _say(words: str) -> None:
    print(f"hvd_ext doctor: {words}", file=sys.stderr, flush=True)


def console_width(environ: Mapping[str, str]) -> int:
    """Return the columns of the report; what a launcher puts in place of the terminal does not know its width."""
    text = environ.get("COLUMNS", "")
    return int(text) if text.isdigit() else WIDTH
