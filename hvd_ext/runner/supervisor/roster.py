"""The hosts and workers of an elastic job, and the decisions about them: who forms the next world, and when a job ends.

A job is a sequence of worlds. While a world runs, its workers are *members*. A worker that has left its world, or that
is new, is *ready* and waits for the next world. The next world is formed when no members are left.

- A worker that ends with an exit status of its own program (1 to 128) ends the job with that status. One that ends with
  status 0 is done. From then on no worker is started; members that need a world still get one.
- A worker is lost if a signal has ended it, if its connection breaks, or if its host was cut off. So is a worker that
  ends by itself, with any status, before it was in a world, in a job that has begun: the others train without it. A
  lost worker is replaced on a host with a free slot.
- A host whose agent has ended, or does not answer, is given up with all of its workers. So is a host that loses workers
  `MOST_FAILURES` times with less than `LASTING_S` between. With a cooldown, a host that lost a worker is used again
  later in both cases.
- Workers say which peers they cannot reach. After `MOST_ATTEMPTS` worlds that did not come about, without a loss, the
  hosts with the most failed connections are given up, or the workers, if they are on one host. After
  `MOST_EXCLUSIONS` times the job ends.
- A job that has too few workers, for longer than the limit or with no host for more, ends. The workers that were in a
  world before get a *last* world first, in which they save what they have. After it no world is formed.

Nothing here knows of processes and sockets: `Actions` does what is decided, and the methods are told what happens.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvd_ext.runner.supervisor.settings import Settings

# A worker whose connection has broken usually ends at once, and then how it ended decides.
BROKEN_S = 2.0
# How long the workers may take to their next commit when one of them is to leave, and to save in a last world.
GRACE_S = 60.0
# How long a worker may take to end when it was told to, and then after SIGTERM.
LEAVE_S = 10.0
STOP_S = 3.0
# How long "changed" waits for further workers that are starting.
GATHER_S = 5.0
MOST_FAILURES, LASTING_S = 5, 60.0
MOST_ATTEMPTS, MOST_EXCLUSIONS = 3, 3
# How long the second attempt waits; the third one waits twice as long.
RETRY_S = 1.0
# How long the other members may still connect, and report too, when one of them has reported a peer.
REPORT_S = 1.0
# A shell ends with 128 + n when signal n has ended its program.
SIGNALLED = range(129, 193)


class Host:
    """A host, and what it has lost."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self.listed = True
        self.dismissed = False  # its agent was told to end, and has not ended yet
        self.failures, self.failed_s, self.failed_world = 0, -LASTING_S, -1
        self.usable_from_s = 0.0  # infinite if it is given up

    def usable(self, now_s: float) -> bool:
        """Return whether workers may be started here."""
        return self.listed and now_s >= self.usable_from_s


class Worker:
    """A worker, from its start until its process has ended."""

    def __init__(self, number: int, host: Host, now_s: float) -> None:
        self.number, self.host = number, host
        self.started_s = now_s
        self.peer: dict[str, Any] = {}  # what the other workers need to know to reach it
        self.connected = False
        self.ready = False
        self.first_world: int | None = None  # the first one that was formed with it
        self.trained = False  # it was in a world whose workers all reached each other
        self.rank: int | None = None
        self.world = -1
        self.done = False
        self.leaving = False  # it, or the supervisor, wants it to leave at the end of a step
        self.ending = False  # it was told to end
        self.why = ""
        self.broken_s: float | None = None
        self.leave_by_s: float | None = None  # at that time it is told to end
        self.signals: list[tuple[float, signal.Signals]] = []  # that it is to get, and when

    @property
    def stays(self) -> bool:
        """Whether this worker counts for the worlds to come."""
        return not (self.done or self.leaving or self.ending or self.broken_s is not None)

    @property
    def age(self) -> tuple[float, int]:
        """Sorts by age; a worker that was in an earlier world is older, because it has the job's state."""
        return (float("inf") if self.first_world is None else self.first_world, self.number)

    def __str__(self) -> str:
        place = "" if self.rank is None else f"rank {self.rank}, "
        return f"worker {self.number} ({place}host {self.host.name})"


class Actions(Protocol):
    """What a roster makes happen. No call waits, and none calls the roster before it has returned."""

    def say(self, line: str) -> None:
        """Print a line about the job."""

    def start(self, worker: Worker) -> None:
        """Start a worker on its host."""

    def stop(self, worker: Worker, number: signal.Signals) -> None:
        """Send a signal to the processes of a worker."""

    def send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Send a message to a worker, if it is connected."""

    def disconnect(self, worker: Worker) -> None:
        """Close the connection with a worker whose process has ended."""

    def dismiss(self, host: Host) -> None:
        """Make the agent of a host end, if there is one, and note that (`Host.dismissed`)."""

    def finish(self, code: int, why: str) -> None:
        """End the job."""


class Roster:
    """The hosts and workers of a job; `review` decides what follows from each event, and from time.

    Args:
        settings: what the job is.
        actions: does what is decided.
        clock: the time, in seconds.
    """

    def __init__(self, settings: Settings, actions: Actions, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._actions, self._clock = settings, actions, clock
        self.hosts: dict[str, Host] = {}
        self.workers: dict[int, Worker] = {}
        self.over = False
        self._next = 0
        self._done = 0
        self._world = -1
        self._members: set[Worker] = set()
        self._size = 0  # of this world when it was formed
        self._forming = False  # whether its workers have not yet reached each other
        self._joined: set[Worker] = set()  # members of this world that have reached all others
        self._meeting_s: float | None = None  # since when ready members wait for the others
        self._short_s: float | None = None  # since when there are too few workers
        self._gathered_s: float | None = None  # since when new workers wait
        self._changed: set[Worker] = set()  # members of this world that were told
        self._loss = self._reported = False  # whether this world has lost a member, and whether one has reported a peer
        self._unreached: dict[tuple[int, int], str] = {}  # addresses and errors, by caller and peer, of the attempts
        self._attempts = 0  # worlds in a row that did not come about, though no worker was lost
        self._retry_s = 0.0  # before that no further attempt is made
        self._unformed = 0  # how many such worlds the job has had
        self._exclusions = 0  # how often `MOST_ATTEMPTS` were made since a world came about
        self._departed: list[tuple[float, int]] = []  # workers of this world that have left it, and when others hear
        self._cause = ""  # why a host was given up since the last world that came about
        self._last: str | None = None  # why this world is the last one
        self._last_until_s = 0.0
        self._begin_s = clock()

    @property
    def begun(self) -> bool:
        """Whether a world was formed, so that a worker that is started now is late."""
        return self._world >= 0

    def of(self, host: Host) -> list[Worker]:
        """Return the workers of a host, also those that are about to end."""
        return [worker for worker in self.workers.values() if worker.host is host]

    def finish(self, code: int, why: str) -> None:
        """End the job; nothing that happens from here on counts."""
        if not self.over:
            self.over = True
            self._actions.finish(code, why)

    # What happens

    def list_hosts(self, listed: Mapping[str, int]) -> None:
        """Take over a list of hosts: slots by name, in order."""
        for name, slots in listed.items():
            host = self.hosts.get(name)
            if host is None or not host.listed:
                if self._next:
                    self._actions.say(f"host {name} added, with {counted(slots, 'slot')}")
                host = host or self.hosts.setdefault(name, Host(name, slots))
                host.listed, host.usable_from_s, host.failures = True, 0.0, 0
            host.slots = slots
        for host in self.hosts.values():
            if host.listed and host.name not in listed:
                host.listed = False
                self._actions.say(f"host {host.name} removed")
            kept = [worker for worker in self.of(host) if worker.stays]
            for worker in sorted(kept, key=lambda worker: worker.age)[host.slots if host.listed else 0 :]:
                self._leave(worker, "its slot was removed" if host.listed else "its host was removed")
        self.review()

    def host_lost(self, host: Host, why: str) -> None:
        """Note that a host's agent has ended, and with it all of its workers."""
        workers = self.of(host)
        self._actions.say(f"host {host.name} lost, with {counted(len(workers), 'worker')}: {why}")
        self._blame(host)
        for worker in workers:
            self._forget(worker)
        self.review()

    def host_leaving(self, host: Host, why: str) -> None:
        """Note that a host is about to go away; its workers leave after their step."""
        self._actions.say(f"host {host.name} is going away: {why}")
        host.usable_from_s = float("inf")
        for worker in self.of(host):
            self._leave(worker, "its host is going away")
        self.review()

    def connected(self, worker: Worker, peer: Mapping[str, Any]) -> None:
        """Note that a worker has connected, and what the others need to know to reach it."""
        worker.peer, worker.connected = dict(peer), True
        self.review()

    def disconnected(self, worker: Worker) -> None:
        """Note that the connection with a worker has ended."""
        worker.connected = False
        if worker.number in self.workers and not worker.done:
            worker.broken_s = self._clock()
            self._leaves_world(worker)
            self.review()

    def heard(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Note what a worker says."""
        kind, now_s = message.get("kind"), self._clock()
        # Until a worker knows of its new world, what it says is about an earlier one.
        of_world = message.get("world") == worker.world
        if kind == "ready" and of_world:
            worker.ready = True
            if worker in self._members:
                self._leaves_world(worker, lost=False)
                self._meeting_s = self._meeting_s or now_s
        elif kind == "joined" and of_world and worker in self._members:
            self._joined.add(worker)
            if len(self._joined) == self._size:
                self._comes_about()
        elif kind == "unreachable" and of_world and worker in self._members and isinstance(message.get("peer"), int):
            self._unreached[worker.number, message["peer"]] = str(message.get("tried"))
            self._reported = True
        elif kind == "leaving":
            self._leave(worker, str(message.get("why")))
        elif kind == "done" and self._counts(worker):
            worker.done = not (worker.leaving or worker.ending)
            self._members.discard(worker)  # the others do not miss it
        self.review()

    def ended(self, worker: Worker, code: int, *, cut: bool = False) -> None:
        """Decide what the end of a worker's process means.

        Args:
            code: its exit status, or the negative number of a signal.
            cut: whether the connection with the worker has outlived it, because its host was cut off.
        """
        failed = code > 0 and code not in SIGNALLED
        self._forget(worker)
        if self.over:
            return
        if self._last is not None:
            if code not in (0, 1) and not worker.ending:
                self._actions.say(f"{worker} {_how(code)} in the last world")
        elif self._counts(worker) and (
            (worker.done and not failed) or (code == 0 and not worker.leaving and not worker.ending)
        ):
            self._done += 1
            if code != 0:
                self._actions.say(f"{worker} {_how(code)} after its program had ended in order")
            if not self.workers:
                self.finish(0, "the job has ended")
        elif worker.ending or worker.leaving:
            self._actions.say(f"{worker} has left: {worker.why}")
            if not worker.leaving and worker.first_world is not None and not self._done:
                self._blame(worker.host, worker)
        elif failed and not cut and self._counts(worker):
            self.finish(code, f"{worker} {_how(code)}, which ends the job: see its output")
        else:
            where = " before init()" if not worker.peer else "" if self._counts(worker) else " before it was in a world"
            where = ", and its host was cut off" if failed and cut else where
            self._actions.say(f"{worker} lost: {_how(code)}{where}")
            self._blame(worker.host, worker)
        self.review()

    # Decisions

    def review(self) -> None:
        """Decide what follows from the state of the job; called after each event, and now and then."""
        if self.over:
            return
        now_s = self._clock()
        self._enforce(now_s)
        if self._last is not None:
            if not self.workers or now_s >= self._last_until_s:
                self.finish(1, self._last)
            return
        self._place(now_s)
        self._call_changes(now_s)
        if not self._members and not any(
            worker.broken_s is not None and now_s - worker.broken_s < BROKEN_S / 2 for worker in self.workers.values()
        ):
            self._form(now_s)

    @property
    def _finished(self) -> int:
        """How many workers are done, whether or not their processes have ended."""
        return self._done + sum(worker.done for worker in self.workers.values())

    def _counts(self, worker: Worker) -> bool:
        """Return whether the end of a worker's program says something about the job: it was in a world, or none was."""
        return worker.first_world is not None or self._world < 0

    def _enforce(self, now_s: float) -> None:
        """End the agents and workers that have exceeded a limit."""
        for _, number in [entry for entry in self._departed if now_s >= entry[0]]:
            self._tell_lost(number)
        self._departed = [entry for entry in self._departed if now_s < entry[0]]
        for host in self.hosts.values():
            if not self.of(host) and not host.usable(now_s):
                self._actions.dismiss(host)
        for worker in list(self.workers.values()):
            if worker.ending:
                self._send_signals(worker)
            elif worker.broken_s is not None and now_s - worker.broken_s >= BROKEN_S:
                self._actions.say(f"{worker} lost: its connection broke")
                self._dismiss(worker, "its connection broke")
            elif self._last is not None and worker not in self._members and not worker.done and worker.broken_s is None:
                self._dismiss(worker, self._last, leave_s=LEAVE_S)
            elif self._finished and not self._counts(worker):
                self._dismiss(worker, "the program has ended on other workers", code=0, leave_s=LEAVE_S)
            elif not worker.ready and worker.first_world is None and worker.stays:
                if now_s - worker.started_s >= self._settings.start_timeout_s:
                    limit = f"{self._settings.start_timeout_s:g} s (start-timeout)"
                    self._actions.say(f"{worker} has not called init() for {limit}")
                    self._blame(worker.host, worker)
                    self._dismiss(worker, "it did not call init() in time")
            elif worker in self._members and self._late(now_s):
                limit = f"{self._settings.elastic_timeout_s:g} s (elastic-timeout)"
                self._actions.say(f"{worker} given up: the other workers have waited for it for {limit}")
                self._dismiss(worker, "it did not leave its world in time")
            elif worker.leaving and worker not in self._members:
                self._dismiss(worker, "it leaves the job", code=0, leave_s=LEAVE_S)
            elif worker.leave_by_s is not None and now_s >= worker.leave_by_s:
                self._dismiss(worker, "it has not left its world in time")

    def _late(self, now_s: float) -> bool:
        return self._meeting_s is not None and now_s - self._meeting_s >= self._settings.elastic_timeout_s

    def _place(self, now_s: float) -> None:
        """Start workers where slots are free."""
        wanted = self._settings.workers if self._world < 0 else self._settings.most
        wanted = 0 if self._finished else wanted - sum(worker.stays for worker in self.workers.values())
        for host in self.hosts.values():
            while wanted > 0 and host.usable(now_s) and not host.dismissed and len(self.of(host)) < host.slots:
                wanted -= 1
                worker = Worker(self._next, host, now_s)
                self._next += 1
                self.workers[worker.number] = worker
                if self._settings.verbose:
                    self._actions.say(f"{worker} is being started")
                self._actions.start(worker)

    def _call_changes(self, now_s: float) -> None:
        """Ask the members to meet, if new workers wait or members leave."""
        new = [worker for worker in self.workers.values() if worker.first_world is None and worker.stays]
        starting = any(not worker.ready for worker in new)
        leaving = [worker for worker in self._members if worker.leaving]
        if not any(worker.ready for worker in new):
            self._gathered_s = None
        elif self._gathered_s is None:
            self._gathered_s = now_s
        gathered = self._gathered_s is not None and (not starting or now_s - self._gathered_s >= GATHER_S)
        if (gathered and len(self._members) < self._settings.most) or leaving:
            why = leaving[0].why if leaving else "new workers wait"
            for worker in self._members - self._changed:
                self._actions.send(worker, {"kind": "changed", "why": why})
            self._changed |= self._members

    def _form(self, now_s: float) -> None:
        """Form the next world if there are enough workers; else wait for more, or end the job."""
        if self._forming:
            self._forming = False
            if not self._loss:
                self._attempts += 1
                self._unformed += 1
                self._retry_s = now_s + RETRY_S * 2 ** (self._attempts - 1)
        if self._attempts >= MOST_ATTEMPTS:
            self._attempts, self._retry_s = 0, 0.0
            self._exclusions += 1
            self._exclude()
            if self._exclusions >= MOST_EXCLUSIONS:
                attempts = f"{MOST_EXCLUSIONS * MOST_ATTEMPTS} attempts"
                self._end(f"no world has come about in {attempts}, see the output of the workers")
                return
        if now_s < self._retry_s:
            return
        ready = self._ready()[: self._settings.most]
        staying = sum(worker.stays for worker in self.workers.values())
        finished = self._finished
        possible = staying + (0 if finished else self._room())
        first = self._world < 0
        wanted = self._settings.workers if first else self._settings.least
        if first and now_s - self._begin_s >= self._settings.start_timeout_s:
            wanted = self._settings.least
        elif first and self._settings.source.script is None:
            wanted = max(self._settings.least, min(wanted, possible))  # a host that is given up is not waited for
        if ready and len(ready) + finished >= wanted:
            self._announce(ready)
            return
        if finished and not staying:
            if not self.workers:
                self.finish(0, "the job has ended")
            return  # the processes of workers that are done are about to end
        least = f"at least {self._settings.least} (min-np)"
        if possible + finished < self._settings.least and self._settings.source.script is None:
            self._end(f"too few workers: {staying} of {least}, and no host has a free slot")
            return
        # An interval without workers enough; the first world also has the time that workers take to start.
        if self._short_s is None:
            self._short_s = now_s
        limit_s = self._settings.elastic_timeout_s + (self._settings.start_timeout_s if first else 0.0)
        if now_s - self._short_s >= limit_s:
            limit = f"{limit_s:g} s ({'start-timeout and ' if first else ''}elastic-timeout)"
            self._end(f"too few workers: {len(ready)} of {least} for {limit}")

    def _ready(self) -> list[Worker]:
        """Return the workers that may form a world, by age."""
        return sorted((w for w in self.workers.values() if w.ready and w.stays), key=lambda worker: worker.age)

    def _room(self) -> int:
        """Return how many more workers the hosts could run, now or after a cooldown."""
        return sum(
            max(0, host.slots - sum(worker.stays for worker in self.of(host)))
            for host in self.hosts.values()
            if host.listed and host.usable_from_s < float("inf")
        )

    def _announce(self, workers: Sequence[Worker], last: str | None = None) -> None:
        """Form a world of workers that are sorted by age; with `last`, the job ends after it for this reason."""
        number = self._world + 1
        changes = number - self._unformed
        if last is None and self._settings.reset_limit is not None and changes > self._settings.reset_limit:
            self._end(f"the workers of the job have changed {changes} times, more than reset-limit allows")
            return
        self._world, self._last = number, last
        self._last_until_s = self._clock() + max(self._settings.elastic_timeout_s, GRACE_S)
        by_host: dict[Host, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker)
        ranked = [worker for group in by_host.values() for worker in group]
        new = sum(worker.first_world is None for worker in ranked)
        world = {"kind": "world", "number": number, "token": secrets.token_hex(16), "last": last}
        world["peers"] = [worker.peer for worker in ranked]
        for rank, worker in enumerate(ranked):
            worker.rank, worker.world, worker.ready = rank, number, False
            if worker.first_world is None:
                worker.first_world = number
            self._actions.send(worker, {**world, "rank": rank})
        self._members, self._size, self._joined, self._changed = set(ranked), len(ranked), set(), set()
        self._forming, self._loss, self._reported = True, False, False
        self._meeting_s = self._short_s = self._gathered_s = None
        self._departed = []
        where = ", ".join(f"{host.name} ({len(group)})" for host, group in by_host.items())
        added = f", {new} of them new" if number and last is None else ""
        name = f"world {number}" if last is None else f"world {number}, the last one"
        self._actions.say(f"{name}: {counted(len(ranked), 'worker')}{added}: {where}")

    def _comes_about(self) -> None:
        """Note that all workers of this world have reached each other."""
        for worker in self._members:
            worker.trained = True
        self._forming = False
        self._unreached, self._attempts, self._retry_s, self._exclusions, self._cause = {}, 0, 0.0, 0, ""

    def _end(self, why: str) -> None:
        """End the job: with a last world of the workers that have something to save, or at once."""
        why += f"; {self._cause}" if self._cause else ""
        saving: list[Worker] = []
        for worker in self._ready():
            pairs = [{worker.number, other.number} for other in saving]
            if worker.trained and not any(set(pair) in pairs for pair in self._unreached):
                saving.append(worker)
        if saving:
            self._announce(saving, last=why)
        else:
            self.finish(1, why)

    def _exclude(self) -> None:
        """Give up the hosts that most others cannot reach, until no failed connection is left among the others.

        The host that fails with the most workers is first, and the youngest of several. If workers of one host do not
        reach each other, single workers are given up.
        """
        ready = {worker.number: worker for worker in self._ready()}
        pairs = [pair for pair in self._unreached if pair[0] in ready and pair[1] in ready]
        inside = any(ready[caller].host is ready[peer].host for caller, peer in pairs)
        by_host = {w.host: frozenset(o for o in ready.values() if o.host is w.host) for w in ready.values()}
        groups = {number: frozenset([w]) if inside else by_host[w.host] for number, w in ready.items()}
        while pairs:
            cut: dict[frozenset[Worker], set[Worker]] = {}
            for caller, peer in pairs:
                cut.setdefault(groups[caller], set()).update(groups[peer])
                cut.setdefault(groups[peer], set()).update(groups[caller])
            excluded = max(cut, key=lambda group: (len(cut[group]), min(worker.age for worker in group)))
            caller, peer = next(pair for pair in pairs if excluded in (groups[pair[0]], groups[pair[1]]))
            oldest = min(excluded, key=lambda worker: worker.age)
            self._cause = (
                f"{ready[caller]} cannot connect to {ready[peer]}: tried {self._unreached[caller, peer]}; allow TCP "
                "connections between the hosts, or name the network that connects them with --network-interfaces"
            )
            what = str(oldest) if inside else f"host {oldest.host.name}"
            self._actions.say(f"{what} given up after {MOST_ATTEMPTS} attempts to form a world: {self._cause}")
            self._blame(oldest.host, oldest if inside else None)
            for worker in excluded:
                self._dismiss(worker, "other workers cannot connect to it", leave_s=LEAVE_S)
            pairs = [pair for pair in pairs if excluded not in (groups[pair[0]], groups[pair[1]])]

    # What decisions do

    def _blame(self, host: Host, worker: Worker | None = None) -> None:
        """Note that a host has lost a worker, or with None all of them, and decide when it is used again."""
        now_s = self._clock()
        if now_s - host.failed_s >= LASTING_S and self._settings.cooldown_s is None:
            host.failures = 0
        # Workers lost in one world have one cause; a worker that never was in a world counts alone.
        if worker is None or worker.first_world is None or host.failed_world != self._world:
            host.failures += 1
        host.failed_s, host.failed_world = now_s, self._world
        if self._settings.cooldown_s is not None:
            shortest, longest = self._settings.cooldown_s
            host.usable_from_s = now_s + min(longest, shortest * 2.0 ** min(host.failures - 1, 60))
        elif worker is None or host.failures >= MOST_FAILURES:
            if worker is not None and host.usable_from_s < float("inf"):
                self._actions.say(f"host {host.name} given up: it has lost workers {host.failures} times in a row")
            host.usable_from_s = float("inf")

    def _leave(self, worker: Worker, why: str) -> None:
        """Note that a worker is to leave the job when its world meets."""
        if not worker.leaving:
            worker.leaving, worker.why = True, why
            worker.leave_by_s = self._clock() + GRACE_S

    def _forget(self, worker: Worker) -> None:
        self.workers.pop(worker.number, None)
        self._leaves_world(worker)
        self._actions.disconnect(worker)
        worker.connected = False

    def _dismiss(self, worker: Worker, why: str, *, code: int = 1, leave_s: float = 0.0) -> None:
        """End a worker that is not to continue: a message, SIGTERM after some time, and SIGKILL after that.

        Args:
            code: the exit status that the worker should end with.
            leave_s: how long a worker that is connected may take to end by itself.
        """
        worker.ending, worker.why = True, worker.why or why
        self._actions.send(worker, {"kind": "end", "why": worker.why, "code": code})
        self._leaves_world(worker)
        stop_s = self._clock() + (leave_s if worker.connected else 0.0)
        worker.signals = [(stop_s, signal.SIGTERM), (stop_s + STOP_S, signal.SIGKILL)]
        self._send_signals(worker)

    def _send_signals(self, worker: Worker) -> None:
        while worker.signals and self._clock() >= worker.signals[0][0]:
            self._actions.stop(worker, worker.signals.pop(0)[1])

    def _leaves_world(self, worker: Worker, *, lost: bool = True) -> None:
        """Take a worker out of the members, and tell the others, which may be waiting for a connection with it.

        Args:
            lost: whether it will not be in the next world. Otherwise other members may be about to report peers too.
        """
        if worker in self._members:
            self._members.discard(worker)
            self._loss |= lost
            if self._reported and not lost:
                self._departed.append((self._clock() + REPORT_S, worker.number))
            else:
                self._tell_lost(worker.number)

    def _tell_lost(self, number: int) -> None:
        for other in self._members:
            self._actions.send(other, {"kind": "lost", "worker": number})


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 host" and "2 hosts"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _how(code: int) -> str:
    number = -code if code < 0 else code - 128 if code in SIGNALLED else None
    if number is None:
        return f"ended with status {code}"
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
