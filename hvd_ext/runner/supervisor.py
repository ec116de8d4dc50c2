"""Runs an elastic job: starts its workers on hosts, decides which of them form a world, and replaces lost ones.

A worker connects by TCP and speaks JSON lines; `hvd_ext/job/membership.py` is the other side. The supervisor alone
decides which workers are in the job. A job is a sequence of worlds. While a world runs, its workers are *members*. A
worker that has left its world, or that is new, is *ready* and waits for the next world. The next world is formed when
no members are left.

- A worker that ends with an exit status of its own program (1 to 128) ends the job with that status.
- A worker is lost if a signal has ended it, if its connection breaks, if its host was cut off, or if it ends before
  `init` in a job that has begun. It is replaced on a host with a free slot.
- A host whose agent has ended, or does not answer, is given up with all of its workers. So is a host that loses workers
  `MOST_FAILURES` times with less than `LASTING_S` between. With a cooldown, a host that lost a worker is used again
  later in both cases.
- A worker that ends with status 0 is done. From then on no worker is started; members that need a world still get one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import membership
from hvd_ext.runner import hosts as host_lists
from hvd_ext.runner.launcher import RANK_VARIABLES, job_environment

RSH = "HVD_EXT_RSH"
LOOK_S = 0.2
DISCOVER_S = 1.0
HELLO_S = 10.0
LINK_LIMIT_S = 20.0  # after which the connection of a host that does not answer breaks
PING_S, SILENCE_S = 5.0, 30.0
# A worker whose connection has broken usually ends at once, and then how it ended decides.
BROKEN_S = 2.0
# How long the workers may take to their next commit when one of them is to leave.
GRACE_S = 60.0
# How long a worker may take to end when it was told to, and then after SIGTERM.
LEAVE_S = 10.0
STOP_S = 3.0
# How long "changed" waits for further workers that are starting.
GATHER_S = 5.0
AGENTS_STOP_S = 8.0
MOST_FAILURES, LASTING_S = 5, 60.0
LINE_NBYTES = 1 << 20
# A shell ends with 128 + n when signal n has ended its program.
_SIGNALLED = range(129, 193)
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
# Variables that describe a host or a session, and that other hosts must not get.
_OF_A_HOST = re.compile(
    r"(_|HOME|HOST|HOSTNAME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|TERM|DISPLAY|TMPDIR)|(SSH|XDG)_.*"
)
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a job is.

    Args:
        command: what each worker runs.
        source: the hosts.
        workers: with how many workers the job begins.
        least: with how many workers it continues.
        most: with how many workers it runs if there are slots.
        elastic_timeout_s: how long the job waits for `least` workers, and for a member that does not leave its world.
        start_timeout_s: how long the first world waits for all of its workers, and how long a worker takes to start.
        reset_limit: how many worlds may follow the first one; None for any number.
        cooldown_s: the shortest and longest time for which a host is not used after it has lost a worker.
        rsh: the remote shell; None for ssh.
        ssh_port: the remote shell's -p.
        ssh_identity_file: the remote shell's -i.
        interfaces: the network interfaces on which workers reach the supervisor; None for all.
        outputs: a folder for the output of each worker, in addition to stdout.
        verbose: say more.
    """

    command: Sequence[str]
    source: host_lists.Source
    workers: int
    least: int
    most: int
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None
    rsh: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: Path | None = None
    interfaces: Sequence[str] | None = None
    outputs: Path | None = None
    verbose: bool = False

    def check(self) -> None:
        """Raise an InvalidError if the settings break a rule."""
        if not self.command:
            raise InvalidError("command: must say what each worker runs, behind --, as in -- python train.py")
        if not 1 <= self.least <= self.workers <= self.most:
            raise InvalidError(
                f"min-np ({self.least}), np ({self.workers}), max-np ({self.most}): must be at least 1 and ascend"
            )
        for name, seconds in (("elastic", self.elastic_timeout_s), ("start", self.start_timeout_s)):
            if not seconds > 0:
                raise InvalidError(f"{name}-timeout ({seconds:g}): must be above 0 s")
        if self.cooldown_s is not None and not 0 < self.cooldown_s[0] <= self.cooldown_s[1]:
            raise InvalidError(f"blacklist-cooldown-range {self.cooldown_s}: must be above 0 s and ascend")
        slots = sum(self.source.fixed.values())
        if self.source.script is None and slots < self.workers:
            raise InvalidError(
                f"np ({self.workers}): the hosts have {slots} slots; give them more, or start fewer workers"
            )


class Host:
    """A host, the agent on it, and what it has lost."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self.listed = True
        self.process: asyncio.subprocess.Process | None = None
        self.answered = False
        self.heard_s = 0.0
        self.failures, self.failed_s, self.failed_world = 0, -LASTING_S, -1
        self.usable_from_s = 0.0  # infinite if it is given up

    def usable(self, now_s: float) -> bool:
        """Return whether workers may be started here."""
        return self.listed and now_s >= self.usable_from_s

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the agent, if there is one."""
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write((json.dumps(message) + "\n").encode())

    @property
    def dismissed(self) -> bool:
        """Whether the agent was told to end."""
        return self.process is not None and self.process.stdin is not None and self.process.stdin.is_closing()

    def dismiss(self) -> None:
        """Make the agent end its workers and itself."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the agent, or the remote shell that leads to it."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Worker:
    """A worker, from its start until its process has ended."""

    def __init__(self, number: int, host: Host, now_s: float) -> None:
        self.number, self.host = number, host
        self.started_s = now_s
        self.peer: dict[str, Any] = {}
        self.writer: asyncio.StreamWriter | None = None
        self.ready = False
        self.first_world: int | None = None
        self.rank: int | None = None
        self.world = -1
        self.done = False
        self.leaving = False  # it, or the supervisor, wants it to leave at the end of a step
        self.ending = False  # it was told to end
        self.why = ""
        self.broken_s: float | None = None
        self.leave_by_s: float | None = None  # then it is told to end, whatever it does
        self.signals: list[tuple[float, signal.Signals]] = []  # that it is to get, and when

    @property
    def stays(self) -> bool:
        """Whether this worker counts for the worlds to come."""
        return not (self.done or self.leaving or self.ending or self.broken_s is not None)

    def leave(self, why: str) -> None:
        """Note that this worker is to leave the job when its world meets."""
        if not self.leaving:
            self.leaving, self.why = True, why
            self.leave_by_s = time.monotonic() + GRACE_S

    @property
    def age(self) -> tuple[float, int]:
        """Sorts by age; a worker that was in an earlier world is older, because it has the job's state."""
        return (float("inf") if self.first_world is None else self.first_world, self.number)

    def send(self, **message: Any) -> None:
        """Send a message to the worker, if it is connected."""
        if self.writer is not None:
            self.writer.write((json.dumps(message) + "\n").encode())

    def __str__(self) -> str:
        place = "" if self.rank is None else f"rank {self.rank}, "
        return f"worker {self.number} ({place}host {self.host.name})"


class Supervisor:
    """A running job. Everything happens in one event loop; `_review` decides what follows from each event."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._token = secrets.token_hex(16)
        self._address: tuple[bool, int] = (True, 0)  # loopback only, port
        self._hosts: dict[str, Host] = {}
        self._workers: dict[int, Worker] = {}
        self._next = 0
        self._done = 0
        self._world = -1
        self._members: set[Worker] = set()
        self._meeting_s: float | None = None  # since when ready members wait for the others
        self._short_s: float | None = None  # since when there are too few workers
        self._gathered_s: float | None = None  # since when new workers wait
        self._changed: set[Worker] = set()  # members of this world that were told
        self._begin_s = time.monotonic()
        self._result: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._agents: set[asyncio.Task[None]] = set()
        self._files: dict[int, IO[str]] = {}

    async def run(self) -> int:
        """Run the job to its end, and return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._finish, 128 + number, f"got {signal.Signals(number).name}")
        server: asyncio.Server | None = None
        try:
            self._list(await self._settings.source.hosts())
            server = await self._listen()
            settings = self._settings
            hosts = ", ".join(f"{host.name} ({host.slots})" for host in self._hosts.values())
            numbers = f"{_count(settings.workers, 'worker')} ({settings.least} to {settings.most})"
            self._say(f"elastic job: {numbers} on {_count(len(self._hosts), 'host')}: {hosts}")
            self._spawn(self._look())
            if settings.source.script is not None:
                self._spawn(self._discover())
            code, why = await self._result
        finally:
            if server is not None:
                server.close()
            await self._close()
        self._say(why)
        return code

    def _finish(self, code: int, why: str) -> None:
        if not self._result.done():
            self._result.set_result((code, why))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._result.done():
                self._result.set_exception(error)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def _close(self) -> None:
        """End all workers, by their agents."""
        if not self._result.done():
            self._result.cancel()  # an error in `run`: nothing that happens from here on counts
        failed = self._result.cancelled() or self._result.exception() is not None
        why = "the supervisor has failed" if failed else self._result.result()[1]
        for worker in self._workers.values():
            worker.send(kind="end", why=why, code=1)
        for host in self._hosts.values():
            host.dismiss()
        if self._agents:
            await asyncio.wait(self._agents, timeout=AGENTS_STOP_S)
        for host in self._hosts.values():
            host.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for file in self._files.values():
            file.close()

    # What happens in time

    async def _look(self) -> None:
        pinged_s, looked_s = 0.0, time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - looked_s >= PING_S:  # this process was stopped for a while, and has read nothing
                for host in self._hosts.values():
                    host.heard_s = now_s
            looked_s = now_s
            if now_s - pinged_s >= PING_S:
                pinged_s = now_s
                for host in self._hosts.values():
                    host.send({"ping": 0})
            self._review()
            await asyncio.sleep(LOOK_S)

    async def _discover(self) -> None:
        failed = ""
        while True:
            await asyncio.sleep(DISCOVER_S)
            try:
                self._list(await self._settings.source.hosts())
                failed = ""
            except InvalidError as error:
                if str(error) != failed:
                    self._say(f"{error}; keeping the hosts")
                failed = str(error)
            self._review()

    def _list(self, listed: Mapping[str, int]) -> None:
        """Take over a list of hosts."""
        for name, slots in listed.items():
            host = self._hosts.get(name)
            if host is None or not host.listed:
                if self._next:
                    self._say(f"host {name} added, with {_count(slots, 'slot')}")
                if host is None or host.process is None:
                    self._hosts[name] = Host(name, slots)
                else:  # it was removed a moment ago, and its workers are leaving
                    host.listed, host.usable_from_s, host.failures = True, 0.0, 0
            self._hosts[name].slots = slots
        for host in self._hosts.values():
            if host.listed and host.name not in listed:
                host.listed = False
                self._say(f"host {host.name} removed")
            kept = [worker for worker in self._of(host) if worker.stays]
            for worker in sorted(kept, key=lambda worker: worker.age)[host.slots if host.listed else 0 :]:
                worker.leave("its slot was removed" if host.listed else "its host was removed")

    # Agents

    async def _agent(self, host: Host) -> None:
        """Start a host's agent, and listen to it until it ends."""
        words = [sys.executable, "-m", "hvd_ext.runner.agent"]
        if not host_lists.is_local(host.name):
            words = [*self._remote_shell(), host.name, f"cd {shlex.quote(os.getcwd())}; exec {shlex.join(words)}"]
        if self._settings.verbose:
            self._say(f"host {host.name}: {shlex.join(words)}")
        try:
            # In a session of its own, so that Ctrl-C reaches the supervisor alone, which ends the job in order.
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_NBYTES,
                start_new_session=True,
            )
        except OSError as error:
            self._lose_host(host, f"{words[0]} cannot be started: {error.strerror}")
            return
        host.process, host.answered, host.heard_s = process, False, time.monotonic()
        if self._result.done():
            host.dismiss()
        for worker in self._of(host):
            self._start(worker)
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            while line := await process.stdout.readline():
                host.heard_s = time.monotonic()
                self._heard_of_agent(host, line)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        host.kill()
        status = await process.wait()
        host.process = None
        if self._of(host) and not self._result.done():
            if not host.answered:
                self._lose_host(host, f"{words[0]} ended with status {status} before the agent answered")
            elif time.monotonic() - host.heard_s >= SILENCE_S:
                self._lose_host(host, f"it has not answered for {SILENCE_S:g} s")
            else:
                self._lose_host(host, "its agent has ended")
        self._review()

    def _heard_of_agent(self, host: Host, line: bytes) -> None:
        try:
            message = json.loads(line)
            known = isinstance(message, dict)
        except ValueError:
            known = False
        if not known:
            self._say(f"host {host.name}: {line.decode(errors='replace').rstrip()}")  # of a shell's start-up files
        elif "agent" in message:
            host.answered = True
        elif "out" in message:
            self._print(message["out"], message["text"])
        elif "leaving" in message:
            self._say(f"host {host.name} is going away: its agent got {signal.Signals(message['leaving']).name}")
            host.usable_from_s = float("inf")
            for worker in self._of(host):
                worker.leave("its host is going away")
        elif "ended" in message and message["ended"] in self._workers:
            self._spawn(self._ended(self._workers[message["ended"]], message["code"]))
        self._review()

    def _remote_shell(self) -> list[str]:
        text = self._settings.rsh or os.environ.get(RSH)
        words = shlex.split(text) if text else list(_SSH)
        words += ["-p", str(self._settings.ssh_port)] if self._settings.ssh_port is not None else []
        key = self._settings.ssh_identity_file
        return words + (["-i", str(key.absolute())] if key is not None else [])

    def _lose_host(self, host: Host, why: str) -> None:
        workers = self._of(host)
        self._say(f"host {host.name} lost, with {_count(len(workers), 'worker')}: {why}")
        self._blame(host)
        for worker in workers:
            self._forget(worker)
        self._review()

    def _blame(self, host: Host, worker: Worker | None = None) -> None:
        """Note that a host has lost a worker, or with None all of them, and decide when it is used again."""
        now_s = time.monotonic()
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
            if worker is not None:
                self._say(f"host {host.name} given up: it has lost workers {host.failures} times in a row")
            host.usable_from_s = float("inf")

    # Workers

    def _of(self, host: Host) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.host is host]

    def _start(self, worker: Worker) -> None:
        local = host_lists.is_local(worker.host.name)
        environment = {
            name: text for name, text in job_environment().items() if local or not _OF_A_HOST.fullmatch(name)
        }
        for name in _THREADS:
            if name not in os.environ:
                environment.pop(name, None)  # a rank's share of the cores is not the launcher's matter
        loopback, port = self._address
        addresses = ["127.0.0.1"] if local else []
        addresses += [] if loopback else membership.own_addresses(self._settings.interfaces)
        environment |= {
            membership.SUPERVISOR: f"{','.join(addresses)}:{port}",
            membership.TOKEN: self._token,
            membership.WORKER: str(worker.number),
            membership.LATE: str(int(self._world >= 0)),
        }
        command, folder = list(self._settings.command), os.getcwd()
        worker.host.send({"start": worker.number, "environment": environment, "command": command, "folder": folder})

    def _print(self, number: int, text: str) -> None:
        worker = self._workers.get(number)
        rank = worker.rank if worker is not None else None
        print(f"[{rank if rank is not None else f'worker {number}'}] {text}", flush=True)
        if self._settings.outputs is not None:
            if number not in self._files:
                path = self._settings.outputs / f"worker.{number}.txt"
                self._files[number] = path.open("w", encoding="utf-8", errors="replace")
            self._files[number].write(text + "\n")
            self._files[number].flush()

    def _forget(self, worker: Worker) -> None:
        self._workers.pop(worker.number, None)
        self._leaves_world(worker)
        if worker.writer is not None:
            worker.writer.close()
            worker.writer = None

    async def _ended(self, worker: Worker, code: int) -> None:
        """Decide what the end of a worker's process means."""
        failed = code > 0 and code not in _SIGNALLED
        limit_s = time.monotonic() + BROKEN_S / 2
        while failed and worker.writer is not None and time.monotonic() < limit_s:
            await asyncio.sleep(0.01)
        # A process that ends closes its connection, unless its host is cut off. Then that is why it has ended.
        cut = worker.writer is not None
        self._forget(worker)
        if self._result.done():
            return
        if (worker.done and not failed) or (code == 0 and not worker.leaving and not worker.ending):
            self._done += 1
            if code != 0:
                self._say(f"{worker} {_how(code)} after its program had ended in order")
            if not self._workers:
                self._finish(0, "the job has ended")
        elif worker.ending or worker.leaving:
            self._say(f"{worker} has left: {worker.why}")
            if not worker.leaving and worker.first_world is not None and not self._done:
                self._blame(worker.host, worker)
        elif failed and not cut and (worker.peer or self._world < 0):
            self._finish(code, f"{worker} {_how(code)}, which ends the job: see its output")
        else:
            where = ", and its host was cut off" if failed and cut else " before init()" if not worker.peer else ""
            self._say(f"{worker} lost: {_how(code)}{where}")
            self._blame(worker.host, worker)
        self._review()

    def _dismiss(self, worker: Worker, why: str, *, code: int = 1, leave_s: float = 0.0) -> None:
        """End a worker that is not to continue: a message, SIGTERM after some time, and SIGKILL after that.

        Args:
            code: the exit status that the worker should end with.
            leave_s: how long a worker that is connected may take to end by itself.
        """
        worker.ending, worker.why = True, worker.why or why
        worker.send(kind="end", why=worker.why, code=code)
        self._leaves_world(worker)
        stop_s = time.monotonic() + (leave_s if worker.writer is not None else 0.0)
        worker.signals = [(stop_s, signal.SIGTERM), (stop_s + STOP_S, signal.SIGKILL)]
        self._send_signals(worker)

    def _send_signals(self, worker: Worker) -> None:
        while worker.signals and time.monotonic() >= worker.signals[0][0]:
            worker.host.send({"stop": worker.number, "signal": worker.signals.pop(0)[1]})

    def _leaves_world(self, worker: Worker) -> None:
        """Take a worker out of the members, and tell the others, who may be waiting for a connection with it."""
        if worker in self._members:
            self._members.discard(worker)
            for other in self._members:
                other.send(kind="lost", worker=worker.number)

    # Connections

    async def _listen(self) -> asyncio.Server:
        loopback = all(host_lists.is_local(name) for name in self._hosts) and self._settings.source.script is None
        if loopback:
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            try:
                listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            except (OSError, ValueError):  # no IPv6 here
                listener = socket.create_server(("", 0))
        self._address = (loopback, listener.getsockname()[1])
        return await asyncio.start_server(
            lambda reader, writer: self._spawn(self._serve(reader, writer)), sock=listener, limit=LINE_NBYTES
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a connection until it ends; one that breaks the protocol is closed."""
        worker: Worker | None = None
        try:
            membership.limited(writer.get_extra_info("socket"), LINK_LIMIT_S)
            hello = await _message(reader, HELLO_S)
            worker = None if hello is None else self._greeted(hello)
            if worker is None:
                return
            worker.writer = writer
            while (message := await _message(reader)) is not None:
                self._heard(worker, message)
                self._review()
        finally:
            writer.close()
            if worker is not None:
                worker.writer = None
                if worker.number in self._workers and not worker.done:
                    worker.broken_s = time.monotonic()
                    self._leaves_world(worker)
                    self._review()

    def _greeted(self, hello: Mapping[str, Any]) -> Worker | None:
        """Return the worker whose hello this is; None if it is not one of this job."""
        token, number = str(hello.get("token")), str(hello.get("worker"))
        addresses, port = hello.get("addresses"), hello.get("port")
        if hello.get("kind") != "hello" or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        worker = self._workers.get(int(number)) if number.isdecimal() else None
        if worker is None or worker.peer or worker.ending:
            return None
        if not isinstance(addresses, list) or not isinstance(port, int):
            return None
        # The name is the host's own, by which the workers find out who is on the same host.
        name = str(hello.get("host"))
        worker.peer = {"worker": worker.number, "host": name, "addresses": addresses, "port": port}
        return worker

    def _heard(self, worker: Worker, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "ready":
            if message.get("world") != worker.world:
                return  # it has not yet read that a later world exists
            worker.ready = True
            if worker in self._members:
                self._leaves_world(worker)
                self._meeting_s = self._meeting_s or time.monotonic()
        elif kind == "leaving":
            worker.leave(str(message.get("why")))
        elif kind == "done":
            worker.done = not (worker.leaving or worker.ending)
            self._members.discard(worker)  # nobody misses it

    # Decisions

    def _review(self) -> None:
        """Decide what follows from the state of the job; called after each event, and now and then."""
        if self._result.done():
            return
        now_s = time.monotonic()
        self._enforce(now_s)
        self._place(now_s)
        self._call_changes(now_s)
        if not self._members and not any(
            worker.broken_s is not None and now_s - worker.broken_s < BROKEN_S / 2 for worker in self._workers.values()
        ):
            self._form(now_s)

    def _enforce(self, now_s: float) -> None:
        """End the agents and workers that have exceeded a limit."""
        for host in self._hosts.values():
            if now_s - host.heard_s >= SILENCE_S:
                host.kill()
            elif not self._of(host) and not host.usable(now_s):
                host.dismiss()
        for worker in list(self._workers.values()):
            if worker.ending:
                self._send_signals(worker)
            elif worker.broken_s is not None and now_s - worker.broken_s >= BROKEN_S:
                self._say(f"{worker} lost: its connection broke")
                self._dismiss(worker, "its connection broke")
            elif not worker.ready and worker.first_world is None and worker.stays:
                if now_s - worker.started_s >= self._settings.start_timeout_s:
                    self._say(
                        f"{worker} has not called init() for {self._settings.start_timeout_s:g} s (start-timeout)"
                    )
                    self._blame(worker.host, worker)
                    self._dismiss(worker, "it did not call init() in time")
            elif worker in self._members and self._late(now_s):
                limit = f"{self._settings.elastic_timeout_s:g} s (elastic-timeout)"
                self._say(f"{worker} given up: the other workers have waited for it for {limit}")
                self._dismiss(worker, "it did not leave its world in time")
            elif worker.leaving and worker not in self._members:
                self._dismiss(worker, "it leaves the job", code=0, leave_s=LEAVE_S)
            elif worker.leave_by_s is not None and now_s >= worker.leave_by_s:
                self._dismiss(worker, "it has not left its world in time")
            elif self._done and worker.first_world is None and self._world >= 0:
                self._dismiss(worker, "the program has ended on other workers", code=0, leave_s=LEAVE_S)

    def _late(self, now_s: float) -> bool:
        return self._meeting_s is not None and now_s - self._meeting_s >= self._settings.elastic_timeout_s

    def _place(self, now_s: float) -> None:
        """Start workers where slots are free."""
        wanted = self._settings.workers if self._world < 0 else self._settings.most
        wanted = 0 if self._done else wanted - sum(worker.stays for worker in self._workers.values())
        for host in self._hosts.values():
            while wanted > 0 and host.usable(now_s) and not host.dismissed and len(self._of(host)) < host.slots:
                wanted -= 1
                worker = Worker(self._next, host, now_s)
                self._next += 1
                alone = not self._of(host)
                self._workers[worker.number] = worker
                if self._settings.verbose:
                    self._say(f"{worker} is being started")
                if host.process is not None:
                    self._start(worker)
                elif alone:
                    self._agents.add(self._spawn(self._agent(host)))  # starts the workers of its host

    def _call_changes(self, now_s: float) -> None:
        """Ask the members to meet, if new workers wait or members leave."""
        waiting = any(worker.ready and worker.first_world is None and worker.stays for worker in self._workers.values())
        starting = any(
            not worker.ready and worker.first_world is None and worker.stays for worker in self._workers.values()
        )
        leaving = [worker for worker in self._members if worker.leaving]
        if not waiting:
            self._gathered_s = None
        elif self._gathered_s is None:
            self._gathered_s = now_s
        gathered = self._gathered_s is not None and (not starting or now_s - self._gathered_s >= GATHER_S)
        if (gathered and len(self._members) < self._settings.most) or leaving:
            for worker in self._members - self._changed:
                worker.send(kind="changed", why=leaving[0].why if leaving else "new workers wait")
            self._changed |= self._members

    def _form(self, now_s: float) -> None:
        """Form the next world if there are enough workers; else wait for more, or end the job."""
        ready = sorted((w for w in self._workers.values() if w.ready and w.stays), key=lambda worker: worker.age)
        ready = ready[: self._settings.most]
        staying = sum(worker.stays for worker in self._workers.values())
        finished = self._done + sum(worker.done for worker in self._workers.values())
        possible = staying + (0 if finished else self._room(now_s))
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
            if not self._workers:
                self._finish(0, "the job has ended")
            return  # the processes of workers that are done are about to end
        if possible + finished < self._settings.least and self._settings.source.script is None:
            self._finish(
                1,
                f"too few workers: {staying} of at least {self._settings.least} (min-np), and no host has a free slot",
            )
        # An interval without workers enough; the first world also has the time that workers take to start.
        if self._short_s is None:
            self._short_s = now_s
        limit_s = self._settings.elastic_timeout_s + (self._settings.start_timeout_s if first else 0.0)
        if now_s - self._short_s >= limit_s:
            self._finish(
                1,
                f"too few workers: {len(ready)} of at least {self._settings.least} (min-np) for {limit_s:g} s "
                f"({'start-timeout and ' if first else ''}elastic-timeout)",
            )

    def _room(self, now_s: float) -> int:
        """Return how many more workers the hosts could run, now or after a cooldown."""
        return sum(
            max(0, host.slots - sum(worker.stays for worker in self._of(host)))
            for host in self._hosts.values()
            if host.listed and host.usable_from_s < float("inf")
        )

    def _announce(self, workers: Sequence[Worker]) -> None:
        """Form a world of workers that are sorted by age."""
        number = self._world + 1
        if self._settings.reset_limit is not None and number > self._settings.reset_limit:
            self._finish(1, f"the workers of the job have changed {number} times, more than reset-limit allows")
            return
        self._world = number
        by_host: dict[str, list[Worker]] = {}
        for worker in workers:
            by_host.setdefault(worker.host.name, []).append(worker)
        ranked = [worker for group in by_host.values() for worker in group]
        new = sum(worker.first_world is None for worker in ranked)
        token, peers = secrets.token_hex(16), [worker.peer for worker in ranked]
        for rank, worker in enumerate(ranked):
            worker.rank, worker.world, worker.ready = rank, number, False
            if worker.first_world is None:
                worker.first_world = number
            worker.send(kind="world", number=number, token=token, rank=rank, peers=peers)
        self._members, self._changed = set(ranked), set()
        self._meeting_s = self._short_s = self._gathered_s = None
        where = ", ".join(f"{name} ({len(group)})" for name, group in by_host.items())
        added = f", {new} of them new" if number else ""
        self._say(f"world {number}: {_count(len(ranked), 'worker')}{added}: {where}")


async def _message(reader: asyncio.StreamReader, limit_s: float | None = None) -> dict[str, Any] | None:
    """Read a message; None if the connection has ended, or what arrives is no message."""
    try:
        message = json.loads(await asyncio.wait_for(reader.readline(), limit_s))
    except (OSError, ValueError, asyncio.TimeoutError):
        return None
    return message if isinstance(message, dict) else None


def _how(code: int) -> str:
    number = -code if code < 0 else code - 128 if code in _SIGNALLED else None
    if number is None:
        return f"ended with status {code}"
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def run(settings: Settings, say: Callable[[str], None]) -> int:
    """Run a job to its end.

    Args:
        say: prints a line about the job, such as a lost worker.

    Returns:
        The exit status: 0, that of a program with an error, 1 if too few workers were left, or 128 + n after signal n.

    Raises:
        InvalidError: a setting breaks its rule.
    """
    settings.check()
    if any(name in os.environ for name in RANK_VARIABLES):
        raise InvalidError("run: this process is a rank of a job already; start the command without mpirun")
    if settings.outputs is not None:
        try:
            settings.outputs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidError(f"output-filename ({settings.outputs}): must be a folder: {error.strerror}") from error

    async def job() -> int:
        return await Supervisor(settings, say).run()

    try:
        return asyncio.run(job())
    except BrokenPipeError as error:
        raise HvdExtError("stdout: it was closed while the job ran") from error
