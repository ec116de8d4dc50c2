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
from typer.testing import CliRunner

from hvd_ext.commands import run
from hvd_ext.job import membership
from hvd_ext.runner import launcher
from hvd_ext.runner.supervisor import roster
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

    def job(*words: str, command: list[str] | None = None, folder: Path = tmp_path) -> Job:
        folder.mkdir(exist_ok=True)
        jobs.append(Job(folder, list(words), command or [sys.executable, str(WORKER), str(folder)]))
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


def strangers_are_refused(job: Job) -> None:
    """Connects to the supervisor with wrong words, and sees that it closes the connection."""
    environment = Path(f"/proc/{job.pid(0)}/environ").read_bytes().split(b"\0")
    variables = dict(line.decode().split("=", 1) for line in environment if b"=" in line)
    token = variables["HVD_EXT_SUPERVISOR_TOKEN"]
    assert token not in Path(f"/proc/{job.agent(0)}/cmdline").read_text()
    addresses, _, port = variables["HVD_EXT_SUPERVISOR"].rpartition(":")
    hello = {"kind": "hello", "worker": "99", "host": "x", "pid": 1, "addresses": [], "port": 1}
    hellos = [json.dumps({**hello, "token": text}) for text in ("wrong", None, token)]  # no worker 99 was started
    for words in (*hellos, "GET / HTTP/1.0\n"):
        with socket.create_connection((addresses.split(",")[0], int(port))) as connection:
            connection.sendall(f"{words}\n".encode())
            assert connection.recv(1) == b""


def test_a_job_replaces_lost_workers_and_ends_in_order(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "4", "-H", "a:2,b:2", "--output-filename", str(tmp_path / "outputs"))
    job.until_world(0, 0, 1, 2, 3)
    assert job.hosts(0) == ["a", "a", "b", "b"]
    strangers_are_refused(job)
    job.kill(0)
    world = job.until_workers(1, 4, 2, 3)  # the replacement runs on host a
    assert job.hosts(world) == ["a", "a", "b", "b"]
    job.kill(1, signal.SIGTERM)
    world = job.until_workers(2, 3, 4, 5)  # host b has the oldest worker now
    assert job.hosts(world) == ["b", "b", "a", "a"]
    (tmp_path / "cut.3").touch()
    job.until_workers(2, 6, 4, 5)
    job.finish()
    job.ends(
        0,
        r"elastic job: 4 workers \(3 to 4\) on 2 hosts: a \(2\), b \(2\)",
        r"world 0: 4 workers: a \(2\), b \(2\)",
        r"\[1\] step of worker 1",
        r"worker 0 \(rank 0, host a\) lost: ended by SIGKILL",
        r"worker 1 .* has left: SIGTERM",
        r"worker 3 \(rank 1, host b\) lost: ended with status 1, and its host was cut off",
        "4 workers, 1 of them new",
    )
    assert (tmp_path / "outputs" / "worker.0.txt").read_text().startswith("step of worker 0\n")
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [f"worker.{n}.txt" for n in range(7)]


def test_hosts_are_added_lost_and_removed(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "broken.c").touch()  # the program does not start there
    discover = script(tmp_path, "a:2")
    job = start("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", discover)
    job.until_world(0, 0, 1)
    hosts_are(tmp_path, "a:2", "b:2")
    world = job.until_workers(0, 1, 2, 3)
    assert job.hosts(world) == ["a", "a", "b", "b"]
    os.kill(job.agent(2), signal.SIGKILL)
    job.until_workers(0, 1)
    hosts_are(tmp_path, "a:2", "b:2", "c:1")
    until(lambda: "host c given up: it has lost workers 5 times in a row" in job.output(), limit_s=60)
    hosts_are(tmp_path, "a:2", "d:2")
    job.until_workers(0, 1, 9, 10)
    os.kill(job.agent(0), signal.SIGTERM)
    job.until_workers(9, 10)
    hosts_are(tmp_path, "d")  # one slot is a host's default
    job.until_workers(9)
    job.finish()
    job.ends(
        0,
        "host b added, with 2 slots",
        "host b lost, with 2 workers: its agent has ended",
        r"\(host c\) lost: ended with status 1 before init",
        "host c removed",
        "host a is going away: its agent got SIGTERM",
        "worker 0 .* has left",
    )
    ends = {event["worker"]: event["end"] for event in job.events("end")}
    assert ends[0] == ends[1] == "its host is going away" and ends[10] == "its slot was removed"


def test_too_few_workers_save_and_end_the_job(start: Callable[..., Job]) -> None:
    job = start("-np", "2", "--min-np", "2", "-H", "a:1,b:1")
    job.until_world(0, 0, 1)
    os.kill(job.agent(1), signal.SIGKILL)
    job.ends(1, r"too few workers: 1 of at least 2 \(min-np\), and no host has a free slot", "world 1, the last one")
    assert [(event["worker"], event["saved"]) for event in job.events("saved")] == [
        (0, "too few workers: 1 of at least 2 (min-np), and no host has a free slot")
    ]


def test_hosts_that_are_not_reached_end_the_job(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "broken").write_text('#!/bin/sh\n[ "$1" = c ] && exit 255\nshift\nexec sh -c "$*"\n')
    (tmp_path / "broken").chmod(0o755)
    (tmp_path / "apart.1").touch()
    job = start("-np", "3", "-H", "a:1,b:1,c:1", "--rsh", str(tmp_path / "broken"))
    job.ends(
        1,
        "host c lost, with 1 worker: .*broken ended with status 255 before the agent answered",
        r"host b given up after 3 attempts to form a world: worker . \(rank ., host .\) cannot connect to worker .*"
        "--network-interfaces",
        "too few workers: 1 of at least 2 .*--network-interfaces",
    )
    assert job.world(roster.MOST_ATTEMPTS) is None


def test_an_error_of_the_program_ends_the_job_with_its_status(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "2")
    job.until_world(0, 0, 1)
    (tmp_path / "fail.1").touch()
    job.ends(3, r"\[1\] ValueError: as planned", r"worker 1 \(rank 1, host localhost\) ended with status 3")


def test_a_program_that_does_not_run_ends_the_job(start: Callable[..., Job], tmp_path: Path) -> None:
    missing = start("-np", "2", command=["no-such-program"], folder=tmp_path / "missing")
    killed = start("-np", "1", command=["sh", "-c", "kill -9 $$"], folder=tmp_path / "killed")
    missing.ends(127, "no-such-program: it cannot be started", "see its output")
    killed.ends(1, "host localhost given up", "too few workers")


def test_a_member_that_does_not_leave_its_world_is_given_up(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-np", "3", "--min-np", "1", "--elastic-timeout", "1", "-H", "a:3")
    job.until_world(0, 0, 1, 2)
    (tmp_path / "deaf.1").touch()
    job.kill(2)
    until(lambda: "worker 1 (rank 1, host a) given up" in job.output(), limit_s=30)
    until(lambda: (job.world(1) or [9])[0] == 0, limit_s=30)
    job.finish()
    job.ends(0)


def test_a_signal_ends_the_job(start: Callable[..., Job], tmp_path: Path) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM]
    jobs = [start("-np", "2", "-H", "a:1,b:1", folder=tmp_path / number.name) for number in numbers]
    for job, number in zip(jobs, numbers, strict=True):
        job.until_world(0, 0, 1)
        job.process.send_signal(number)
    for job, number in zip(jobs, numbers, strict=True):
        job.ends(128 + number, f"got {number.name}")


def test_nothing_stays_behind_where_the_supervisor_is_killed(start: Callable[..., Job], tmp_path: Path) -> None:
    # The workers have children in their process groups that know nothing of the supervisor.
    command = ["sh", "-c", f"sleep 600 & {sys.executable} {WORKER} $0 & wait", str(tmp_path)]
    job = start("-np", "2", "-H", "a:1,b:1", command=command)
    job.until_world(0, 0, 1)
    job.process.kill()
    job.ends(-signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "4", "-H", "a:2"], r"np (4): the hosts have 2 slots"),
        (["-np", "2", "--min-np", "3"], r"min-np (3), np (2), max-np (2)"),
        (["-np", "2", "-H", "a:2", "--hostfile", "x"], "give one of them"),
        (["-np", "1", "-H", "-oProxyCommand=x"], "a host must be as in host1:4"),
        (["-np", "1", "--hostfile", "no-such-file"], "it cannot be read"),
        (["-np", "1", "--host-discovery-script", "/bin/false"], "it ended with status 1"),
        (["-np", "1", "-H", "a:1", "--network-interfaces", "no0"], "has none of them"),
        (["-np", "1", "-H", "a:1", "--network-interfaces", "lo"], "no address here that other hosts reach"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    refused = CliRunner().invoke(run.app, [*words, "--", "true"])
    assert refused.exit_code == 1
    assert message in " ".join(refused.output.split())


def test_workers_are_told_the_network_interfaces(start: Callable[..., Job]) -> None:
    names = [name for _, name in socket.if_nameindex() if membership.own_addresses([name])]
    if not names:
        pytest.skip("this host has no network interface beside the loopback")
    program = "import os; print('told', os.environ['HVD_EXT_WORKER_INTERFACES'])"
    job = start("-np", "1", "-H", "a:1", "--network-interfaces", names[0], command=[sys.executable, "-c", program])
    job.ends(0, f"told {names[0]}\n")
