"""The decisions of an elastic job, without processes: the test says what happens and sees what is decided."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from hvd_ext.runner.hosts import Source
from hvd_ext.runner.supervisor import Settings, roster
from hvd_ext.runner.supervisor.roster import Host, Roster, Worker

CRASH = -signal.SIGSEGV


class Play:
    """A roster whose actions are noted; workers are named by their numbers.

    Args:
        hosts: slots by name.
        script: whether the hosts may change.
    """

    def __init__(self, hosts: dict[str, int], *, workers: int, script: bool = False, **settings: Any) -> None:
        limits = {"least": 1, "most": workers, **settings}
        self.settings = Settings(["train"], Source(hosts, "hosts" if script else None), workers, **limits)
        self.settings.check()
        self.now_s = 1000.0
        self.lines: list[str] = []
        self.started: list[int] = []
        self.signals: list[tuple[int, int]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.dismissed: set[str] = set()
        self.end: tuple[int, str] | None = None
        self.roster = Roster(self.settings, self, lambda: self.now_s)
        self.roster.list_hosts(hosts)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start(self, worker: Worker) -> None:
        self.started.append(worker.number)

    def stop(self, worker: Worker, number: signal.Signals) -> None:
        self.signals.append((worker.number, number))

    def send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        if worker.connected:
            self.sent.append((worker.number, dict(message)))

    def disconnect(self, worker: Worker) -> None:
        pass

    def dismiss(self, host: Host) -> None:
        self.dismissed.add(host.name)

    def finish(self, code: int, why: str) -> None:
        assert self.end is None
        self.end = (code, why)

    # What happens

    def worker(self, number: int) -> Worker:
        return self.roster.workers[number]

    def hello(self, *numbers: int) -> None:
        for number in numbers:
            self.roster.connected(self.worker(number), {"worker": number})

    def tell(self, number: int, kind: str, **values: Any) -> None:
        self.roster.heard(self.worker(number), {"kind": kind, "world": self.worker(number).world, **values})

    def ready(self, *numbers: int) -> None:
        """Workers ask for the next world; new ones connect first."""
        self.hello(*(number for number in numbers if not self.worker(number).peer))
        for number in numbers:
            self.tell(number, "ready")

    def joined(self, *numbers: int) -> None:
        for number in numbers:
            self.tell(number, "joined")

    def trains(self, *numbers: int) -> None:
        """Workers form a world and reach each other."""
        self.ready(*[number for number in numbers if not self.worker(number).ready])
        assert self.world() == list(numbers), self.lines
        self.joined(*numbers)

    def unreachable(self, *pairs: tuple[int, int]) -> None:
        """Workers of a world do not reach others, and ask for the next one; so do the other workers of the world."""
        members = self.world()
        for caller, peer in pairs:
            self.tell(caller, "unreachable", peer=peer, tried=f"10.0.0.{peer} port 4711 (timed out)")
        for number in members:
            self.tell(number, "ready")
        self.passes(roster.RETRY_S * 2)

    def ended(self, number: int, code: int = -signal.SIGKILL, **how: bool) -> None:
        self.roster.ended(self.worker(number), code, **how)

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.roster.review()

    # What is decided

    def message(self) -> dict[str, Any]:
        """Gives what the last worker was told of the newest world."""
        return [message for _, message in self.sent if message["kind"] == "world"][-1]

    def world(self) -> list[int]:
        """Gives the workers of the newest world by rank, all of which know it."""
        newest = self.message()
        told = [(number, message) for number, message in self.sent if message["kind"] == "world"]
        told = [(number, message) for number, message in told if message["number"] == newest["number"]]
        workers = [peer["worker"] for peer in newest["peers"]]
        assert [(number, message["rank"]) for number, message in told] == [(n, r) for r, n in enumerate(workers)]
        return workers

    def told(self, number: int, kind: str) -> list[dict[str, Any]]:
        return [message for to, message in self.sent if to == number and message["kind"] == kind]

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)


def test_ranks_of_a_host_follow_each_other_and_the_oldest_worker_is_rank_0():
    play = Play({"a": 2, "b": 2}, workers=4)
    play.trains(0, 1, 2, 3)
    play.ended(0)
    assert play.started == [0, 1, 2, 3, 4] and play.worker(4).host.name == "a"
    play.trains(1, 2, 3)
    play.ready(4)
    assert {message["why"] for message in play.told(1, "changed")} == {"new workers wait"}
    play.ready(1, 2, 3)
    assert play.world() == [1, 4, 2, 3]
    play.ended(1)
    play.ready(5, 4, 2, 3)  # host b has the oldest worker now
    assert play.world() == [2, 3, 4, 5]
    assert play.said("worker 0 (rank 0, host a) lost: ended by SIGKILL")
    assert play.said("world 2: 4 workers, 1 of them new: a (2), b (2)")


def test_a_host_that_has_lost_a_worker_is_used_again_after_its_cooldown():
    play = Play({"a": 1, "b": 1}, workers=2, cooldown_s=(10.0, 15.0))
    play.trains(0, 1)
    play.ended(1)
    play.trains(0)
    assert play.started == [0, 1]
    play.passes(10.0)
    assert play.started == [0, 1, 2]
    play.ended(2, CRASH)
    play.passes(14.0)
    assert play.started == [0, 1, 2]
    play.passes(1.0)
    assert play.started == [0, 1, 2, 3]


def test_a_lost_host_is_given_up_with_its_workers():
    play = Play({"a": 2, "b": 2}, workers=4, least=2)
    play.trains(0, 1, 2, 3)
    play.roster.host_lost(play.roster.hosts["b"], "its agent has ended")
    assert play.told(0, "lost") == [{"kind": "lost", "worker": 2}, {"kind": "lost", "worker": 3}]
    play.trains(0, 1)
    assert play.started == [0, 1, 2, 3] and play.said("host b lost, with 2 workers: its agent has ended")


def test_a_host_that_is_given_up_at_the_start_is_not_waited_for():
    play = Play({"a": 2, "b": 1}, workers=3, least=2)
    play.ready(0, 1)
    assert play.sent == []
    play.roster.host_lost(play.roster.hosts["b"], "ssh ended with status 255 before the agent answered")
    assert play.world() == [0, 1]


def test_the_first_world_begins_with_fewer_workers_after_the_start_timeout():
    play = Play({"a": 3}, workers=3, least=2, start_timeout_s=5.0)
    play.ready(0, 1)
    play.passes(4.0)
    assert play.sent == []
    play.passes(1.0)
    assert play.world() == [0, 1]
    assert play.said("worker 2 (host a) has not called init() for 5 s (start-timeout)")


@pytest.mark.parametrize(("code", "status"), [(3, 3), (128, 128)])
def test_an_error_of_a_program_that_was_in_a_world_ends_the_job(code: int, status: int):
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    play.ended(1, code)
    assert play.end == (
        status,
        f"worker 1 (rank 1, host a) ended with status {code}, which ends the job: see its output",
    )


def test_an_error_before_the_first_world_ends_the_job():
    play = Play({"a": 2}, workers=2)
    play.ended(1, 7)
    assert play.end == (7, "worker 1 (host a) ended with status 7, which ends the job: see its output")


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("connected", [False, True])
def test_a_late_worker_that_ends_before_it_was_in_a_world_is_lost_and_replaced(code: int, connected: bool):
    play = Play({"a": 1, "b": 1}, workers=1, most=2)
    play.trains(0)
    for number in range(1, 6):
        assert play.started[-1] == number
        if connected:
            play.hello(number)
            play.tell(number, "done")
            assert not play.worker(number).done
        play.ended(number, code)
    when = "it was in a world" if connected else "init()"
    assert play.said(f"worker 5 (host b) lost: ended with status {code} before {when}")
    assert play.said("host b given up: it has lost workers 5 times in a row")
    assert play.end is None
    play.ended(0)  # a worker that was in a world is replaced all the same
    play.ready(6)
    assert play.world() == [6]


def test_a_late_worker_that_was_in_a_world_ends_the_job_as_the_others_do():
    play = Play({"a": 2}, workers=1, most=2)
    play.trains(0)
    play.ready(1)
    play.trains(0, 1)
    play.ended(1, 3)
    assert play.end is not None and play.end[0] == 3


def test_workers_that_are_done_end_the_job_in_order():
    play = Play({"a": 3}, workers=3)
    play.trains(0, 1, 2)
    play.tell(0, "done")
    play.ended(0, CRASH)
    assert play.said("worker 0 (rank 0, host a) ended by SIGSEGV after its program had ended in order")
    play.ended(1, 0)
    assert play.started == [0, 1, 2]  # from then on no worker is started
    play.ready(2)
    assert play.world() == [2]  # a member that needs a world gets one
    play.tell(2, "done")
    play.ended(2, 0)
    assert play.end == (0, "the job has ended")


def test_new_workers_are_dismissed_when_others_are_done():
    play = Play({"a": 2}, workers=1, most=2)
    play.trains(0)
    play.ready(1)
    play.ended(0, 0)
    assert play.told(1, "end") == [{"kind": "end", "why": "the program has ended on other workers", "code": 0}]
    play.ended(1, 0)
    assert play.end == (0, "the job has ended")


def test_a_new_worker_does_not_begin_the_training_again_when_the_others_are_done():
    play = Play({"a": 1, "b": 1, "c": 1}, workers=1, most=2)
    play.trains(0)
    play.hello(1)
    play.tell(0, "done")  # its process has not ended yet
    assert play.started == [0, 1]
    play.ready(1)
    assert len(play.told(1, "world")) == 0
    assert play.told(1, "end")[0]["code"] == 0
    play.ended(0, 0), play.ended(1, 0)
    assert play.end == (0, "the job has ended")


def test_a_worker_that_is_still_starting_is_not_waited_for_when_the_others_are_done():
    play = Play({"a": 2}, workers=1, most=2)
    play.trains(0)
    play.ended(0, 0)
    assert play.signals == [(1, signal.SIGTERM)]
    play.ended(1)
    assert play.end == (0, "the job has ended")


def test_a_worker_whose_host_was_cut_off_is_lost():
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    play.ended(1, 1, cut=True)
    assert play.said("worker 1 (rank 1, host a) lost: ended with status 1, and its host was cut off")
    assert play.started == [0, 1, 2] and play.end is None


def test_a_broken_connection_is_judged_by_how_the_process_ends_within_a_time():
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    play.roster.disconnected(play.worker(1))
    play.ready(0)
    assert len(play.told(0, "world")) == 1
    play.passes(roster.BROKEN_S / 2)
    assert len(play.told(0, "world")) == 2
    assert play.signals == []
    play.passes(roster.BROKEN_S / 2)
    assert play.said("worker 1 (rank 1, host a) lost: its connection broke")
    assert play.signals == [(1, signal.SIGTERM)]
    play.passes(roster.STOP_S)
    assert play.signals == [(1, signal.SIGTERM), (1, signal.SIGKILL)]


def test_hosts_are_added_and_removed():
    play = Play({"a": 2}, workers=2, most=4, script=True)
    play.trains(0, 1)
    play.roster.list_hosts({"a": 2, "b": 2})
    play.ready(2)
    assert play.told(0, "changed") == []  # worker 3 is still starting
    play.passes(roster.GATHER_S)
    assert play.told(0, "changed") == [{"kind": "changed", "why": "new workers wait"}]
    play.ready(3)
    play.trains(0, 1, 2, 3)
    play.roster.list_hosts({"b": 1, "c": 1})
    assert play.started == [0, 1, 2, 3, 4] and play.worker(4).host.name == "c"
    play.ready(4, 0, 1, 2, 3)
    assert play.world() == [2, 4]
    whys = [play.told(number, "end")[0]["why"] for number in (0, 1, 3)]
    assert whys == ["its host was removed", "its host was removed", "its slot was removed"]
    play.ended(0, 0), play.ended(1, 0), play.ended(3, 0)
    assert play.dismissed == {"a"}
    play.roster.list_hosts({"b": 1, "c": 1, "a": 1})
    assert play.worker(play.started[-1]).host.name == "a"
    added = [line for line in play.lines if "added" in line]
    assert added == [
        "host b added, with 2 slots",
        "host c added, with 1 slot",
        "host a added, with 1 slot",
    ]


def test_the_workers_of_a_host_that_is_going_away_leave():
    play = Play({"a": 2, "b": 1}, workers=3)
    play.trains(0, 1, 2)
    play.roster.host_leaving(play.roster.hosts["a"], "its agent got SIGTERM")
    assert play.told(2, "changed") == [{"kind": "changed", "why": "its host is going away"}]
    play.ready(0, 1, 2)
    assert play.world() == [2]
    assert play.told(0, "end") == [{"kind": "end", "why": "its host is going away", "code": 0}]
    play.ended(0, 0), play.ended(1, 1)
    assert play.said("worker 0 (rank 0, host a) has left: its host is going away")
    assert play.started == [0, 1, 2] and play.end is None


def test_a_worker_that_wants_to_leave_is_replaced():
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    play.tell(0, "leaving", why="SIGTERM")
    play.ready(0, 1)
    assert play.world() == [1]
    play.ended(0, 0)
    assert play.said("worker 0 (rank 0, host a) has left: SIGTERM") and play.started == [0, 1, 2]


def test_a_worker_that_does_not_leave_is_ended():
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    play.tell(0, "leaving", why="SIGTERM")
    play.passes(roster.GRACE_S)
    assert play.told(0, "end") == [{"kind": "end", "why": "SIGTERM", "code": 1}]
    assert play.signals == [(0, signal.SIGTERM)]


def test_a_member_that_does_not_leave_its_world_is_given_up():
    play = Play({"a": 3}, workers=3, elastic_timeout_s=8.0)
    play.trains(0, 1, 2)
    play.ended(2)
    play.ready(0)
    play.passes(7.0)
    assert play.signals == []
    play.passes(1.0)
    assert play.said("worker 1 (rank 1, host a) given up: the other workers have waited for it for 8 s")
    assert play.world() == [0]


def test_what_a_worker_says_about_an_earlier_world_does_not_count():
    play = Play({"a": 2}, workers=2)
    play.trains(0, 1)
    for kind in ("ready", "joined", "unreachable"):
        play.roster.heard(play.worker(0), {"kind": kind, "world": -1, "peer": 1})
    play.tell(0, "unreachable", peer="no number")
    assert not play.worker(0).ready and play.told(1, "lost") == []


# Workers that do not reach each other


def test_workers_that_do_not_reach_each_other_end_the_job_after_some_attempts():
    play = Play({"a": 1, "b": 1}, workers=2, least=2)
    play.ready(0, 1)
    for attempt in range(roster.MOST_ATTEMPTS):
        assert play.end is None
        assert play.message()["number"] == attempt
        play.unreachable((1, 0))
    assert play.end == (
        1,
        "too few workers: 1 of at least 2 (min-np), and no host has a free slot; worker 1 (rank 1, host b) cannot "
        "connect to worker 0 (rank 0, host a): tried 10.0.0.0 port 4711 (timed out); allow TCP connections between the "
        "hosts, or name the network that connects them with --network-interfaces",
    )
    assert play.said("host b given up after 3 attempts to form a world: worker 1 (rank 1, host b) cannot connect to")


def test_the_host_that_most_workers_do_not_reach_is_given_up():
    play = Play({"a": 1, "b": 2, "c": 1}, workers=4)
    play.ready(0, 1, 2, 3)
    for _ in range(roster.MOST_ATTEMPTS):
        play.unreachable((1, 0), (3, 0))  # the oldest worker's host
    assert play.world() == [1, 2, 3]
    assert play.told(0, "end") == [{"kind": "end", "why": "other workers cannot connect to it", "code": 1}]
    play.joined(1, 2, 3)
    play.ended(0, 1)
    assert play.started == [0, 1, 2, 3] and play.end is None


def test_several_hosts_are_given_up_at_once():
    play = Play({"a": 2, "b": 1, "c": 1, "d": 1}, workers=5)
    play.ready(0, 1, 2, 3, 4)
    for _ in range(roster.MOST_ATTEMPTS):
        play.unreachable((2, 0), (3, 1), (3, 2), (4, 0))
    assert play.world() == [0, 1]
    assert [line.split(" given")[0] for line in play.lines if "given up" in line] == ["host c", "host d", "host b"]


def test_a_worker_that_the_workers_of_its_own_host_do_not_reach_is_replaced():
    play = Play({"a": 2, "b": 2}, workers=4)
    play.ready(0, 1, 2, 3)
    for _ in range(roster.MOST_ATTEMPTS):
        play.unreachable((3, 2), (2, 0), (2, 1))
    assert play.said("worker 2 (rank 2, host b) given up after 3 attempts to form a world")
    assert play.world() == [0, 1, 3]
    play.ended(2, 1)
    assert play.worker(4).host.name == "b" and not play.said("host b given up")


def test_workers_of_one_host_that_never_reach_each_other_end_the_job():
    play = Play({"a": 4}, workers=2, least=2)
    play.ready(0, 1)
    for _ in range(roster.MOST_EXCLUSIONS * roster.MOST_ATTEMPTS):
        assert play.end is None
        older, younger = play.world()
        play.unreachable((younger, older))
        if play.end is None and play.worker(younger).ending:
            play.ended(younger, 1)
            play.ready(play.started[-1])
    assert play.end is not None and play.end[0] == 1
    assert "no world has come about in 9 attempts, see the output of the workers; worker 3" in play.end[1]
    assert play.end[1].endswith("--network-interfaces")


def test_the_attempts_before_a_world_that_comes_about_do_not_count():
    play = Play({"a": 1, "b": 1}, workers=2, reset_limit=0)
    play.ready(0, 1)
    for _ in range(3):
        for _ in range(roster.MOST_ATTEMPTS - 1):
            play.unreachable((1, 0))
        play.joined(0, 1)
    assert not play.said("given up") and play.end is None  # such worlds are no resets either


def test_attempts_that_fail_without_a_report_end_the_job_too():
    play = Play({"a": 2}, workers=2)
    play.ready(0, 1)
    for _ in range(roster.MOST_EXCLUSIONS * roster.MOST_ATTEMPTS):
        assert play.end is None
        play.unreachable()
    assert play.end == (1, "no world has come about in 9 attempts, see the output of the workers")


def test_the_next_attempt_waits_for_a_moment():
    play = Play({"a": 1, "b": 1}, workers=2)
    play.ready(0, 1)
    play.ready(1, 0)
    play.passes(roster.RETRY_S - 0.1)
    assert play.message()["number"] == 0
    play.passes(0.1)
    assert play.message()["number"] == 1
    play.ready(1, 0)
    play.passes(2 * roster.RETRY_S - 0.1)
    assert play.message()["number"] == 1


def test_a_peer_that_was_not_reached_because_it_has_ended_is_only_lost():
    play = Play({"a": 1, "b": 2}, workers=2)
    play.ready(0, 1)
    for _ in range(roster.MOST_ATTEMPTS):
        newest = play.world()[1]
        play.tell(0, "unreachable", peer=newest, tried="10.0.0.1 port 4711 (Connection refused)")
        play.ended(newest)
        if play.message()["number"] < roster.MOST_ATTEMPTS - 1:
            play.ready(play.started[-1], 0)
    play.ready(0)
    assert not play.said("given up") and play.world() == [0]


def test_the_other_members_may_report_too_before_they_hear_that_one_has_left():
    play = Play({"a": 1, "b": 1, "c": 1}, workers=3)
    play.ready(0, 1, 2)
    play.tell(1, "unreachable", peer=0, tried="")
    play.tell(1, "ready")
    assert play.told(2, "lost") == []
    play.passes(roster.REPORT_S)
    assert play.told(2, "lost") == [{"kind": "lost", "worker": 1}]


# The end of a job with too few workers


def test_too_few_workers_save_in_a_last_world_and_end_the_job():
    play = Play({"a": 1, "b": 1, "c": 1}, workers=3, least=3)
    play.trains(0, 1, 2)
    play.roster.host_lost(play.roster.hosts["c"], "its agent has ended")
    play.ready(0, 1)
    why = "too few workers: 2 of at least 3 (min-np), and no host has a free slot"
    assert play.world() == [0, 1] and play.message()["last"] == why
    assert play.said("world 1, the last one: 2 workers: a (1), b (1)")
    play.joined(0, 1)
    play.ended(0, 1)
    assert play.end is None and play.started == [0, 1, 2]
    play.ended(1, 1)
    assert play.end == (1, why)


def test_too_few_workers_wait_for_the_elastic_timeout_before_their_last_world():
    play = Play({"a": 2}, workers=2, least=2, script=True, elastic_timeout_s=20.0)
    play.trains(0, 1)
    play.ended(1)
    play.ready(0)
    play.passes(19.0)
    assert play.message()["number"] == 0
    play.hello(2)  # its replacement takes too long
    play.passes(1.0)
    why = "too few workers: 1 of at least 2 (min-np) for 20 s (elastic-timeout)"
    assert play.message()["last"] == why and play.world() == [0]
    play.passes(0.0)
    assert play.told(2, "end") == [{"kind": "end", "why": why, "code": 1}]
    play.ended(2, 1)
    assert play.started == [0, 1, 2]
    play.ended(0, 3)
    assert play.said("worker 0 (rank 0, host a) ended with status 3 in the last world")
    assert play.end == (1, why)


def test_the_first_world_also_waits_for_the_start_timeout_and_has_nothing_to_save():
    play = Play({"a": 2}, workers=2, least=2, script=True, elastic_timeout_s=20.0, start_timeout_s=10.0)
    play.ready(0)
    play.passes(29.0)
    assert play.end is None
    play.passes(1.0)
    limit = "30 s (start-timeout and elastic-timeout)"
    assert play.end == (1, f"too few workers: 1 of at least 2 (min-np) for {limit}")


def test_a_last_world_ends_the_job_after_a_time():
    play = Play({"a": 1, "b": 1}, workers=2, least=2, elastic_timeout_s=5.0)
    play.trains(0, 1)
    play.roster.host_lost(play.roster.hosts["b"], "its agent has ended")
    play.ready(0)
    play.passes(roster.GRACE_S - 1)
    assert play.end is None
    play.passes(1)
    assert play.end is not None and play.end[0] == 1


def test_after_the_last_world_there_is_no_other():
    play = Play({"a": 1, "b": 1, "c": 1}, workers=3, least=3)
    play.trains(0, 1, 2)
    play.roster.host_lost(play.roster.hosts["c"], "its agent has ended")
    play.ready(0, 1)
    play.ended(1)
    play.ready(0)
    why = "too few workers: 2 of at least 3 (min-np), and no host has a free slot"
    assert play.told(0, "end") == [{"kind": "end", "why": why, "code": 1}]
    assert play.message()["number"] == 1
    play.ended(0, 1)
    assert play.end == (1, why)


def test_workers_that_do_not_reach_each_other_are_not_in_one_last_world():
    play = Play({"a": 1, "b": 1, "c": 1}, workers=3, least=3)
    play.trains(0, 1, 2)
    play.ready(0, 1, 2)
    play.tell(1, "unreachable", peer=0, tried="")
    play.ready(0, 1, 2)
    play.roster.host_lost(play.roster.hosts["c"], "its agent has ended")
    play.passes(roster.RETRY_S)
    assert play.world() == [0] and play.message()["last"].startswith("too few workers: 2 of at least 3")
    play.passes(0.0)
    assert play.told(1, "end")[0]["code"] == 1


def test_the_last_world_says_which_workers_do_not_reach_each_other():
    play = Play({"a": 1, "b": 1}, workers=2, least=2)
    play.trains(0, 1)
    play.ready(0, 1)
    for _ in range(roster.MOST_ATTEMPTS):
        play.unreachable((1, 0))
    assert play.world() == [0] and "--network-interfaces" in play.message()["last"]
    play.ended(1, 1), play.ended(0, 1)
    assert play.end is not None and "--network-interfaces" in play.end[1]


def test_so_many_resets_and_no_more():
    play = Play({"a": 2}, workers=2, reset_limit=1)
    play.trains(0, 1)
    play.ended(1)
    play.trains(0)
    play.ready(2)
    play.ready(0)
    why = "the workers of the job have changed 2 times, more than reset-limit allows"
    assert play.message()["last"] == why and play.world() == [0]  # the new worker has nothing to save
    play.ended(0, 1), play.ended(2, 1)
    assert play.end == (1, why)
