"""Jobs that take turns, with small processes in the place of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ext.bench.jobs import Turns, Worker
from hvd_ext.runner.launcher import Job, JobError, job_environment

PATIENCE_S = 60.0

# Rank 0 of a job without MPI: it says hello, and answers each turn with its kind. The others only live. All count their
# steps, so that a test sees whether they move.
RANK = """
import sys, time
from pathlib import Path
from hvd_ext.bench.sampling import Follower, emit
rank, folder, hosts = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
if rank == 0:
    emit(folder / "events", "hello", hosts=hosts, topology="")
follower, count = Follower(folder / "turns"), 0
while True:
    count += 1
    (folder / f"count{rank}").write_text(str(count))
    for turn in follower.new():
        if turn["kind"] == "die":
            sys.exit("rank: it was told to die")
        if turn["kind"] == "end":
            sys.exit(0)
        if turn["kind"] == "slow":
            for _ in range(350):
                emit(folder / "events", "alive")
                time.sleep(0.01)
        if rank == 0 and turn["kind"] != "nothing":
            emit(folder / "events", "answer", to=turn["kind"])
    time.sleep(0.002)
"""

# A launcher: ranks with the variable that mpirun sets; it ends them where it is asked to end.
LAUNCHER = """
import os, signal, subprocess, sys
def stop(number, frame):
    for rank in ranks:
        rank.terminate()
ranks = []
signal.signal(signal.SIGTERM, stop)
ranks += [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(rank), *sys.argv[3:]],
                     env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
    for rank in reversed(range(int(sys.argv[2])))  # rank 0 speaks for all, so it comes last
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def all_are(workers: list[psutil.Process], stopped: bool) -> bool:
    return all((process.status() == psutil.STATUS_STOPPED) == stopped for process in workers)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as jobs:
        yield jobs


@pytest.fixture
def start(tmp_path: Path, stack: ExitStack) -> Callable[..., Worker]:
    def start_one(name: str, ranks: int = 2, hosts: str = "here,here", timeout_s: float = PATIENCE_S) -> Worker:
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", LAUNCHER, RANK, str(ranks), str(folder), hosts]
        return Worker(name, stack.enter_context(Job(command, folder / "log")), folder, timeout_s)

    return start_one


def joined(start: Callable[..., Worker], **options: Any) -> tuple[Turns, Worker, Worker]:
    """Start two jobs that take turns."""
    turns, one, two = Turns(), start("one", **options), start("two", **options)
    turns.join(one)
    turns.join(two)
    return turns, one, two


def test_who_has_not_the_turn_is_stopped_and_does_nothing_and_its_launcher_is_not(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    turns, one, two = joined(start)
    assert turns.stopping
    ranks = {worker.name: worker.job.ranks() for worker in (one, two)}
    assert [len(of_job) for of_job in ranks.values()] == [2, 2]
    launchers = [process for worker in (one, two) for process in worker.job.processes()]
    launchers = [process for process in launchers if process not in ranks["one"] + ranks["two"]]
    counts = {name: tmp_path / name / "count1" for name in ("one", "two")}
    for worker, other in ((one, two), (two, one), (one, two)):
        assert turns.give(worker, "open")["to"] == "open"
        wait_for(lambda other=other: all_are(ranks[other.name], stopped=True))
        assert all_are(ranks[worker.name], stopped=False)
        assert all_are(launchers, stopped=False)
        wait_for(counts[worker.name].exists)
    stopped, before = counts["two"].read_text(), counts["one"].read_text()
    wait_for(lambda: counts["one"].read_text() not in ("", before))
    assert counts["two"].read_text() == stopped
    turns.end(PATIENCE_S)
    assert one.job.processes() == two.job.processes() == []


def test_where_ranks_are_elsewhere_no_rank_of_any_job_is_stopped(start: Callable[..., Worker]) -> None:
    turns, one, two = joined(start, ranks=1)  # two are said to be there, one is found
    assert not turns.stopping
    assert turns.give(one, "open")["to"] == turns.give(two, "open")["to"] == "open"
    assert all_are(one.job.ranks() + two.job.ranks(), stopped=False)


def test_jobs_on_different_hosts_are_not_compared(start: Callable[..., Worker]) -> None:
    turns = Turns()
    turns.join(start("one"))
    with pytest.raises(JobError, match=r"two: its ranks are on \['there', 'here'\].*one.*alike"):
        turns.join(start("two", hosts="there,here"))


def test_leaving_the_jobs_ends_also_those_that_are_stopped(start: Callable[..., Worker], stack: ExitStack) -> None:
    _, one, two = joined(start)
    wait_for(lambda: all_are(one.job.ranks() + two.job.ranks(), stopped=True))
    stack.close()
    assert one.job.processes() == two.job.processes() == []


@pytest.mark.parametrize(("turn", "words"), [("die", "it was told to die"), ("end", "ended before its work was done")])
def test_a_job_that_ends_in_its_turn_is_an_error_with_its_last_words(
    start: Callable[..., Worker], turn: str, words: str
) -> None:
    turns = Turns()
    turns.join(one := start("one", ranks=1, hosts="here"))
    with pytest.raises(JobError, match=words):
        turns.give(one, turn)


def test_a_job_that_does_not_answer_is_named(start: Callable[..., Worker]) -> None:
    turns = Turns()
    one = start("one", ranks=1, hosts="here")
    turns.join(one)
    silent = Worker("one", one.job, one.job.log.parent, 0.2)
    silent.answer()  # the hello again
    silent.say("nothing")
    with pytest.raises(JobError, match=r"one: no answer within 0\.2 s.*--timeout"):
        silent.answer()


@pytest.mark.slow
def test_a_job_that_works_for_long_is_waited_for_while_it_shows_life(start: Callable[..., Worker]) -> None:
    turns = Turns()
    one = start("one", ranks=1, hosts="here", timeout_s=3.0)
    begin = time.monotonic()
    while not turns.hello:
        # starting takes as long as it takes
        try:
            turns.join(one)
        except JobError:
            assert time.monotonic() < begin + PATIENCE_S
    assert turns.give(one, "slow")["to"] == "slow"


def test_a_job_of_a_rank_does_not_take_itself_for_a_part_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "self")
    assert job_environment()["OMPI_MCA_btl"] == "self"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("PMIX_NAMESPACE", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    environment = job_environment()
    assert not {"OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "OMPI_MCA_btl"} & set(environment)
    assert environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the signal at the parent's death is its")
def test_a_job_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from hvd_ext.runner.launcher import Job\n"
        "job = Job(['sleep', '600'], Path(sys.argv[1]) / 'log')\n"
        "(Path(sys.argv[1]) / 'pid').write_text(str(job.processes()[0].pid) + '\\n')\n"
        "import time; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    job = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(parent.pid, 9)
    parent.wait()
    wait_for(lambda: not job.is_running() or job.status() == psutil.STATUS_ZOMBIE)
