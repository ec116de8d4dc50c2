"""Elastic jobs with real agents and workers: worlds, losses, hosts that come and go, and how a job ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.runner import launcher
from tests.waiting import until

WORKER = Path(__file__).with_name("elastic_worker.py")
MARK = "ELASTIC_TEST_MARK"
RSH = '#!/bin/sh\nexport TEST_HOST=$1\nshift\nexec sh -c "$*"\n'


class Job:
    """A supervisor with its workers, in a folder of its own."""

    def __init__(self, folder: Path, words: list[str], command: list[str]) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        rsh = folder / "rsh"
        rsh.write_text(RSH)
        rsh.chmod(0o755)
        environment = {name: text for name, text in os.environ.items() if name not in launcher.RANK_VARIABLES}
        environment.update({MARK: self._mark, "HVD_EXT_RSH": str(rsh)})
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hvd_ext", "run", *words, "--", *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def events(self, name: str = "world") -> list[dict[str, Any]]:
        """Gives the workers' events that have something of this name."""
        log = self.folder / "log"
        text = log.read_text() if log.exists() else ""
        return [event for line in text.split("\n")[:-1] if name in (event := json.loads(line))]

    def world(self, number: int) -> list[int] | None:
        """Gives the workers of a world by rank, when all of them have begun it."""
        begun = [event for event in self.events("peers") if event["world"] == number]
        if not begun or len(begun) < len(begun[0]["peers"]):
            return None
        assert {tuple(event["peers"]) for event in begun} == {tuple(begun[0]["peers"])}
        assert {event["token"] for event in begun} == {begun[0]["token"]}
        assert all(event["peers"][event["rank"]] == event["worker"] for event in begun)
        return list(begun[0]["peers"])

    def until_world(self, number: int, *workers: int) -> None:
        until(lambda: self.world(number) is not None or self.process.poll() is not None, f"world {number}")
        assert self.world(number) == list(workers), self.output()

    def until_workers(self, *workers: int) -> int:
        """Waits for a world of these workers by rank, whatever worlds come before it, and gives its number."""

        def newest() -> int:
            return max((event["world"] for event in self.events("peers")), default=0)

        until(lambda: self.world(newest()) == list(workers) or self.process.poll() is not None, f"{workers}", 60)
        assert self.world(newest()) == list(workers), self.output()
        return newest()

    def hosts(self, number: int) -> list[str]:
        return next(event["hosts"] for event in self.events("hosts") if event["world"] == number)

    def pid(self, worker: int) -> int:
        return next(event["pid"] for event in self.events("peers") if event["worker"] == worker)

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), number)

    def agent(self, host_of: int) -> int:
        """Gives the process number of the agent that has started a worker."""
        return int(Path(f"/proc/{self.pid(host_of)}/stat").read_text().rpartition(")")[2].split()[1])

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def ends(self, code: int, *words: str) -> None:
        """Waits for the end, and checks status, output, and that no process is left."""
        until(lambda: self.process.poll() is not None, "the end of the job", 60)
        assert self.process.returncode == code, self.output()
        for text in words:
            assert re.search(text, self.output()), self.output()
        until(lambda: not self.processes(), "the end of all processes", 20)

    def processes(self) -> list[Any]:
        return list(launcher.marked(MARK, self._mark))

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def close(self) -> None:
        for process in self.processes():
            launcher._signal(process, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def job(*words: str, command: list[str] | None = None) -> Job:
        jobs.append(Job(tmp_path, list(words), command or [sys.executable, str(WORKER), str(tmp_path)]))
        return jobs[-1]

    yield job
    for running in jobs:
        running.close()


def script(folder: Path, *lines: str) -> str:
    """Writes a discovery script that prints the lines of a file, and gives its path."""
    path = folder / "discover"
    path.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    path.chmod(0o755)
    hosts_are(folder, *lines)
    return str(path)


def hosts_are(folder: Path, *lines: str) -> None:
    (folder / "new").write_text("".join(f"{line}\n" for line in lines))
    (folder / "new").rename(folder / "hosts")


def test_a_world_forms_and_all_workers_end_in_order(start: Callable[..., Job]) -> None:
    job = start("-np", "3")
    job.until_world(0, 0, 1, 2)
    job.finish()
    job.ends(0, r"elastic job: 3 workers \(2 to 3\) on 1 host", "world 0: 3 workers", r"\[1\] step of worker 1")


def test_ranks_of_a_host_follow_each_other_and_the_oldest_worker_is_rank_0(start: Callable[..., Job]) -> None:
    job = start("-np", "4", "-H", "a:2,b:2")
    job.until_world(0, 0, 1, 2, 3)
    assert job.hosts(0) == ["a", "a", "b", "b"]
    job.kill(0)
    world = job.until_workers(1, 4, 2, 3)  # the replacement runs on host a
    assert job.hosts(world) == ["a", "a", "b", "b"]
    job.kill(1)
    world = job.until_workers(2, 3, 4, 5)  # host b has the oldest worker now
    assert job.hosts(world) == ["b", "b", "a", "a"]
    job.finish()
    job.ends(0, r"worker 0 \(rank 0, host a\) lost: ended by SIGKILL", "4 workers, 1 of them new")


def test_the_others_continue_where_a_lost_worker_has_no_replacement(start: Callable[..., Job]) -> None:
    job = start("-np", "3", "--min-np", "2", "-H", "a:2,b:1", "--blacklist-cooldown-range", "500", "600")
    job.until_world(0, 0, 1, 2)
    job.kill(2)
    job.until_world(1, 0, 1)
    job.finish()
    job.ends(0)
    assert job.world(2) is None


def test_a_host_that_is_lost_is_given_up(start: Callable[..., Job]) -> None:
    job = start("-np", "4", "--min-np", "2", "-H", "a:2,b:2")
    job.until_world(0, 0, 1, 2, 3)
    os.kill(job.agent(2), signal.SIGKILL)
    job.until_world(1, 0, 1)
    job.finish()
    job.ends(0, "host b lost, with 2 workers: its agent has ended")


def test_a_host_that_cannot_be_reached_is_not_waited_for(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "broken").write_text('#!/bin/sh\n[ "$1" = a ] || exit 255\nshift\nexec sh -c "$*"\n')
    (tmp_path / "broken").chmod(0o755)
    job = start("-np", "3", "-H", "a:2,b:1", "--rsh", str(tmp_path / "broken"))
    job.until_world(0, 0, 1)
    job.finish()
    job.ends(0, "host b lost, with 1 worker: .*broken ended with status 255 before the agent answered")


def test_too_few_workers_end_the_job(start: Callable[..., Job]) -> None:
    job = start("-np", "2", "--min-np", "2", "-H", "a:1,b:1")
    job.until_world(0, 0, 1)
    os.kill(job.agent(1), signal.SIGKILL)
    job.ends(1, r"too few workers: 1 of at least 2 \(min-np\), and no host has a free slot")


def test_too_few_workers_end_the_job_after_a_time(start: Callable[..., Job], tmp_path: Path) -> None:
    discover = script(tmp_path, "a:1", "b:1")
    job = start("-np", "2", "--host-discovery-script", discover, "--elastic-timeout", "1")
    job.until_world(0, 0, 1)
    hosts_are(tmp_path, "a:1")
    job.ends(1, r"too few workers: 1 of at least 2 \(min-np\) for 1 s \(elastic-timeout\)", "host b removed")


def test_an_error_of_the_program_ends_the_job_with_its_status(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "2")
    job.until_world(0, 0, 1)
    (tmp_path / "fail.1").touch()
    job.ends(3, r"\[1\] ValueError: as planned", r"worker 1 \(rank 1, host localhost\) ended with status 3")


def test_a_worker_that_ends_because_its_host_was_cut_off_is_lost(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "3", "--min-np", "2", "-H", "a:2,b:1")
    job.until_world(0, 0, 1, 2)
    (tmp_path / "cut.2").touch()
    job.until_workers(0, 1, 3)
    job.finish()
    job.ends(0, r"worker 2 \(rank 2, host b\) lost: ended with status 1, and its host was cut off")


def test_a_host_where_the_program_does_not_start_does_not_end_a_job(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "broken.b").touch()
    job = start("-np", "1", "--max-np", "2", "--host-discovery-script", script(tmp_path, "a:1", "b:1"))
    until(lambda: "host b given up: it has lost workers 5 times in a row" in job.output(), limit_s=60)
    assert job.world(0) == [0]
    job.finish()
    job.ends(0, r"\(host b\) lost: ended with status 1 before init")


def test_a_program_that_fails_at_once_or_does_not_exist_ends_the_job(start: Callable[..., Job]) -> None:
    start("-np", "2", command=["sh", "-c", "exit 7"]).ends(7, "see its output")
    start("-np", "2", command=["no-such-program"]).ends(127, "no-such-program: it cannot be started")


def test_a_program_that_is_killed_again_and_again_ends_the_job(start: Callable[..., Job]) -> None:
    start("-np", "1", command=["sh", "-c", "kill -9 $$"]).ends(1, "host localhost given up", "too few workers")


def test_hosts_are_added_and_removed(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "2", "--max-np", "4", "--host-discovery-script", script(tmp_path, "a:2"))
    job.until_world(0, 0, 1)
    hosts_are(tmp_path, "a:2", "b:2")
    world = job.until_workers(0, 1, 2, 3)
    assert job.hosts(world) == ["a", "a", "b", "b"]
    hosts_are(tmp_path, "b", "c")
    job.until_workers(2, 4)  # one slot is a host's default, so that a worker of b leaves too
    job.finish()
    job.ends(0, "host b added, with 2 slots", "host a removed", "its slot was removed")
    ends = {event["worker"]: event["end"] for event in job.events("end")}
    assert ends[0] == ends[1] == "its host was removed" and ends[3] == "its slot was removed"


def test_the_workers_of_a_host_that_is_going_away_leave(start: Callable[..., Job]) -> None:
    job = start("-np", "3", "--min-np", "1", "-H", "a:2,b:1")
    job.until_world(0, 0, 1, 2)
    os.kill(job.agent(0), signal.SIGTERM)
    job.until_workers(2)
    job.finish()
    job.ends(0, "host a is going away: its agent got SIGTERM", "worker 0 .* has left")


def test_a_worker_that_gets_sigterm_leaves_and_is_replaced(start: Callable[..., Job]) -> None:
    job = start("-np", "2", "--min-np", "1")
    job.until_world(0, 0, 1)
    job.kill(0, signal.SIGTERM)
    job.until_workers(1, 2)
    job.finish()
    job.ends(0, "worker 0 .* has left: SIGTERM")


def test_a_member_that_does_not_leave_its_world_is_given_up(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "3", "--min-np", "1", "--elastic-timeout", "1", "-H", "a:3")
    job.until_world(0, 0, 1, 2)
    (tmp_path / "deaf.1").touch()
    job.kill(2)
    until(lambda: "worker 1 (rank 1, host a) given up" in job.output(), limit_s=30)
    until(lambda: (job.world(1) or [9])[0] == 0, limit_s=30)
    job.finish()
    job.ends(0)


def test_so_many_resets_and_no_more(start: Callable[..., Job]) -> None:
    job = start("-np", "2", "--min-np", "1", "--reset-limit", "0")
    job.until_world(0, 0, 1)
    job.kill(1)
    job.ends(1, "more than reset-limit allows")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job(start: Callable[..., Job], number: signal.Signals) -> None:
    job = start("-np", "2", "-H", "a:1,b:1")
    job.until_world(0, 0, 1)
    job.process.send_signal(number)
    job.ends(128 + number, f"got {number.name}")


def test_nothing_stays_behind_where_the_supervisor_is_killed(start: Callable[..., Job]) -> None:
    # The workers have children in their process groups that know nothing of the supervisor.
    command = ["sh", "-c", f"sleep 600 & {sys.executable} {WORKER} $0 & wait"]
    job = start("-np", "2", "-H", "a:1,b:1", command=[*command, "FOLDER"])
    job.close()
    job = start("-np", "2", "-H", "a:1,b:1", command=[*command, str(job.folder)])
    job.until_world(0, 0, 1)
    job.process.kill()
    job.ends(-signal.SIGKILL)


def test_a_wrong_token_is_refused(start: Callable[..., Job]) -> None:
    job = start("-np", "1")
    job.until_world(0, 0)
    environment = Path(f"/proc/{job.pid(0)}/environ").read_bytes().split(b"\0")
    variables = dict(line.decode().split("=", 1) for line in environment if b"=" in line)
    assert variables["HVD_EXT_SUPERVISOR_TOKEN"] not in Path(f"/proc/{job.agent(0)}/cmdline").read_text()
    addresses, _, port = variables["HVD_EXT_SUPERVISOR"].rpartition(":")
    hello = {"kind": "hello", "worker": "1", "host": "x", "pid": 1, "addresses": [], "port": 1}
    for token in ("wrong", None, variables["HVD_EXT_SUPERVISOR_TOKEN"]):  # and no worker 1 was started
        with socket.create_connection((addresses, int(port))) as connection:
            connection.sendall((json.dumps({**hello, "token": token}) + "\n").encode())
            assert connection.recv(1) == b""
    with socket.create_connection((addresses, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.0\n\n")
        assert connection.recv(1) == b""
    job.finish()
    job.ends(0)


def test_the_output_of_each_worker_is_kept(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "2", "--output-filename", str(tmp_path / "outputs"), command=["sh", "-c", "echo to a file"])
    job.ends(0, r"\[worker 0\] to a file")
    assert [path.name for path in sorted((tmp_path / "outputs").iterdir())] == ["worker.0.txt", "worker.1.txt"]
    assert (tmp_path / "outputs" / "worker.1.txt").read_text() == "to a file\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "4", "-H", "a:2"], r"np \(4\): the hosts have 2 slots"),
        (["-np", "2", "--min-np", "3"], r"min-np \(3\), np \(2\), max-np \(2\)"),
        (["-np", "2", "-H", "a:2", "--hostfile", "x"], "give one of them"),
        (["-np", "1", "-H", "-oProxyCommand=x"], "a host must be as in host1:4"),
        (["-np", "1", "--hostfile", "no-such-file"], "it cannot be read"),
        (["-np", "1", "--host-discovery-script", "/bin/false"], "it ended with status 1"),
    ],
)
def test_what_makes_no_sense_is_refused(start: Callable[..., Job], words: list[str], message: str) -> None:
    start(*words).ends(1, message)
