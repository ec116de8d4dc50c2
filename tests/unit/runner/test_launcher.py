"""A job of several processes: how it ends, what it says, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from hvd_ext.runner import launcher
from hvd_ext.runner.launcher import Job, JobError, last_words
from tests.waiting import until

PATIENCE_S = 60.0


def test_a_job_that_ends_well_is_waited_for_and_ticks(tmp_path: Path) -> None:
    ticks = []
    with Job(["sh", "-c", "echo hello"], tmp_path / "log") as running:
        running.wait(PATIENCE_S, lambda: ticks.append(1))
    assert (tmp_path / "log").read_text() == "hello\n"
    assert ticks


def test_a_job_that_fails_shows_its_status_and_its_last_words_and_a_missing_program_is_named(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo 'rank 1: the disk is on fire' >&2; exit 3"]
    words = "(?s)status 3.*rank 1: the disk is on fire"
    with Job(command, tmp_path / "log") as running, pytest.raises(JobError, match=words):
        running.wait(PATIENCE_S)
    with pytest.raises(JobError, match="no-such-program"):
        Job(["/no-such-program"], tmp_path / "log")


def test_a_job_that_takes_too_long_is_stopped_and_named(tmp_path: Path) -> None:
    with Job(["sleep", "600"], tmp_path / "log") as running:
        with pytest.raises(JobError, match=r"did not end within 0\.2 s: sleep 600"):
            running.wait(0.2)
        assert running.processes() == []


@pytest.mark.slow
def test_leaving_a_job_ends_processes_that_have_left_its_group(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    # A grandchild in a session of its own that ignores the polite signal: what a launcher's lost ranks look like.
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); "
        f"open({str(ready)!r}, 'w').close(); time.sleep(600)"
    )
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"]
    with Job(command, tmp_path / "log") as running:
        until(ready.exists)
        assert len(running.processes()) == 2
    assert running.processes() == []


def test_a_paused_process_hears_the_polite_signal(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    script = f"trap 'touch {heard}; exit' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    with Job(["sh", "-c", script], tmp_path / "log") as running:
        until((tmp_path / "ready").exists)
        for process in running.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # a sleep that has just ended
                process.suspend()
    assert heard.exists() and running.processes() == []


def test_an_exception_in_the_block_ends_the_job_and_leaves_the_processes_of_others_alone(tmp_path: Path) -> None:
    with Job(["sleep", "600"], tmp_path / "others") as others:
        with pytest.raises(KeyboardInterrupt), Job(["sleep", "600"], tmp_path / "log") as running:
            raise KeyboardInterrupt
        assert running.processes() == []
        assert others.status() is None


def test_last_words_leave_out_what_healthy_jobs_print(tmp_path: Path) -> None:
    log = tmp_path / "log"
    noise = "I0000 00:00:1 2 port.cc:153] oneDNN custom operations are on.\n\n"
    log.write_text("first\n" + noise + "ValueError: no\n")
    assert last_words(log) == "first\nValueError: no"
    assert last_words(log, 1) == "ValueError: no"
    assert last_words(tmp_path / "none") == ""


def test_a_launcher_that_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", lambda program: None)
    with pytest.raises(JobError, match=r"mpirun.*doctor"):
        launcher.mpirun(2, ["true"])


def test_the_environment_puts_this_interpreters_tools_first_and_keeps_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = launcher.job_environment(EXTRA="1")
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["EXTRA"] == "1"
