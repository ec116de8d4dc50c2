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


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank does at the end.

    Attributes:
        findings: the report; None if another rank gives it.
        aside: one line for stderr, or empty.
        linger_s: seconds to wait before the process ends.
        last: what to print after that wait.
    """

    findings: list[Finding] | None
    aside: str = ""
    linger_s: float = 0.0
    last: str = ""


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process, even one that `init` refuses."""
    try:
        return launch.examine(environ).mpi
    except ValueError:
        return True


def examine(environ: Mapping[str, str], limit_s: float = LIMIT_S) -> Report:
    """Examine this rank, meet the other ranks within the time limit, and judge the job; all ranks call this."""
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
        return Report(job_checks.judge(met) if met["rank"] == 0 else None)
    if speaks:
        return Report(job_checks.judge({**met, "answers": [{**dataclasses.asdict(facts), "mpi": met.get("mpi", {})}]}))
    linger_s = LINGER_S if met.get("cut_off") else 0.0
    last = f"rank {facts.rank} of host {facts.host}: {met['error']}"
    if launched.place == 0:
        where = ", ".join(f"{name} {address}" for name, address in facts.networks) or "none"
        return Report(
            None, f"hvd_ext doctor: host {facts.host} (rank {facts.rank}): interfaces: {where}", linger_s, last
        )
    return Report(None, linger_s=linger_s, last=last)


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


def output(report: Report) -> None:
    """Print a rank's line for stderr, and wait if the end of this process would cut off the report."""
    if report.aside:
        print(report.aside, file=sys.stderr, flush=True)
    if report.linger_s:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(report.linger_s)
        # Had rank 0 reported and ended, the launcher would have ended this process.
        print(f"hvd_ext doctor: {report.last}; rank 0 has not reported", file=sys.stderr, flush=True)


def console_width(environ: Mapping[str, str]) -> int:
    """Return the columns of the report; what a launcher puts in place of the terminal does not know its width."""
    text = environ.get("COLUMNS", "")
    return int(text) if text.isdigit() else WIDTH
