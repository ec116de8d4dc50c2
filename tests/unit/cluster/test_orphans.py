"""What is left of a job: a launcher without ranks is ended, with all that belongs to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from hvd_ext.cluster import launch, orphans
from hvd_ext.runner import launcher
from hvd_ext.runner.launcher import JobError
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT_S = 120
# A launcher and its daemon wait for ever, its rank ends.
LAUNCHER = """
setsid sleep 600 &
echo $! > "$1/daemon"
RANK
echo $? > "$1/rank"
sleep 600
"""


def job(folder: Path, rank: str) -> list[str]:
    return ["sh", "-c", LAUNCHER.replace("RANK", rank), "sh", str(folder)]


def test_a_launcher_without_ranks_is_ended_with_its_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = launcher.marked

    def seen(name: str, mark: str) -> dict[psutil.Process, dict[str, str]]:
        found = marked(name, mark)
        if any("OMPI_COMM_WORLD_RANK" in variables for variables in found.values()):
            (tmp_path / "seen").touch()
        return found

    monkeypatch.setattr(launcher, "marked", seen)
    monkeypatch.setattr(orphans, "PATIENCE_S", 0.5)
    monkeypatch.setattr(orphans, "LOOK_S", 0.1)
    rank = 'OMPI_COMM_WORLD_RANK=0 sh -c \'until [ -e "$0/seen" ]; do sleep 0.05; done\' "$1"'
    with pytest.raises(JobError, match="all its ranks have ended, but mpirun waits"):
        launch.run(job(tmp_path, rank), os.environ, timeout_s=LIMIT_S)
    assert (tmp_path / "rank").exists()
    daemon = int((tmp_path / "daemon").read_text())
    until(lambda: not psutil.pid_exists(daemon) or not launcher.lives(psutil.Process(daemon)))


def test_a_launcher_whose_ranks_were_never_seen_gets_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "PATIENCE_S", 0.0)
    monkeypatch.setattr(orphans, "LOOK_S", 0.1)
    assert launch.run(["sh", "-c", "sleep 1; exit 3"], os.environ, timeout_s=LIMIT_S) == 3


def test_a_rank_with_another_environment_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "PATIENCE_S", 0.2)
    mark = uuid.uuid4().hex
    watch = orphans.Watch(mark)
    program = f"until [ -e {tmp_path}/seen ]; do sleep 0.05; done; exec env -i sleep 600"
    variables = {**os.environ, orphans.MARK: mark, "OMPI_COMM_WORLD_RANK": "0"}
    rank = subprocess.Popen(["sh", "-c", program], env=variables)
    try:
        assert not watch.without_ranks()
        (tmp_path / "seen").touch()
        until(lambda: not launcher.marked(orphans.MARK, mark))
        time.sleep(0.3)
        assert not watch.without_ranks()
        rank.kill()
        until(watch.without_ranks)  # though nobody has read its status yet
    finally:
        rank.kill()
        rank.wait()


def test_the_processes_of_a_job_are_those_with_its_mark() -> None:
    mark = uuid.uuid4().hex
    processes = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, orphans.MARK: value}) for value in (mark, f"{mark}0")
    ]
    try:
        assert [process.pid for process in launcher.marked(orphans.MARK, mark)] == [processes[0].pid]
        orphans.end(mark)
        assert processes[0].wait(LIMIT_S) == -9
        assert processes[1].poll() is None
        assert launcher.marked(orphans.MARK, mark) == {}
    finally:
        for process in processes:
            process.kill()
            process.wait()
