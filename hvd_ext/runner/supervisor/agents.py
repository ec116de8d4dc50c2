"""The agents of an elastic job: one on each host starts and ends the workers there (`hvd_ext/runner/agent.py`).

An agent on another host is started by a remote shell. Supervisor and agent exchange JSON lines on its stdin and stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from hvd_ext.runner import hosts as host_lists
from hvd_ext.runner.launcher import job_environment
from hvd_ext.runner.supervisor.roster import STOP_S, Host, Roster, Worker
from hvd_ext.runner.supervisor.settings import Settings

RSH = "HVD_EXT_RSH"
PING_S, SILENCE_S = 5.0, 30.0
AGENTS_STOP_S = 8.0
LINE_NBYTES = 1 << 20
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
# Variables that describe a host or a session, and that other hosts must not get.
_OF_A_HOST = re.compile(
    r"(_|HOME|HOST|HOSTNAME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|TERM|DISPLAY|TMPDIR)|(SSH|XDG)_.*"
)
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


class _Agent:
    """The process of an agent, or of the remote shell that leads to it."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.answered = False
        self.heard_s = time.monotonic()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the agent was told to end."""
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write((json.dumps(message) + "\n").encode())

    def dismiss(self) -> bool:
        """Make the agent end its workers and itself; return whether there was a process."""
        if self.process is None or self.process.stdin is None:
            return False
        self.process.stdin.close()
        return True

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Agents:
    """The agents of all hosts that have workers.

    Args:
        settings: what the job is.
        roster: hears of hosts that are lost.
        say: prints a line about the job.
        printed: gets the number of a worker and a line of its output.
        ended: gets a worker whose process has ended, and its exit status or the negative number of a signal.
        variables: gives the environment variables of a worker that are its own.
        spawn: runs a coroutine in a task whose error ends the job.
    """

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        *,
        say: Callable[[str], None],
        printed: Callable[[int, str], None],
        ended: Callable[[Worker, int], object],
        variables: Callable[[Worker], Mapping[str, str]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._settings, self._roster = settings, roster
        self._say, self._printed, self._ended, self._variables, self._spawn = say, printed, ended, variables, spawn
        self._agents: dict[Host, _Agent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pinged_s = self._looked_s = time.monotonic()

    def start(self, worker: Worker) -> None:
        """Start a worker, and first the agent of its host."""
        agent = self._agents.get(worker.host)
        if agent is None:
            agent = self._agents[worker.host] = _Agent()
            task = self._spawn(self._serve(worker.host, agent))  # starts the workers of its host
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif agent.process is not None:
            self._send_start(agent, worker)

    def stop(self, worker: Worker, number: signal.Signals) -> None:
        """Send a signal to the processes of a worker."""
        if worker.host in self._agents:
            self._agents[worker.host].send({"stop": worker.number, "signal": number})

    def dismiss(self, host: Host) -> None:
        """Make the agent of a host end its workers and itself, if it runs."""
        if host in self._agents:
            host.dismissed = self._agents[host].dismiss()

    def look(self) -> None:
        """Ping the agents, and kill those that have been silent for too long; called now and then."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= PING_S:  # this process was stopped for a while, and has read nothing
            for agent in self._agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        if now_s - self._pinged_s >= PING_S:
            self._pinged_s = now_s
            for agent in self._agents.values():
                agent.send({"ping": 0})
        for agent in self._agents.values():
            if now_s - agent.heard_s >= SILENCE_S:
                agent.kill()

    async def close(self) -> None:
        """End all agents with their workers."""
        for agent in self._agents.values():
            agent.dismiss()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=AGENTS_STOP_S)
        for agent in self._agents.values():
            agent.kill()

    async def _serve(self, host: Host, agent: _Agent) -> None:
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
            del self._agents[host]
            self._roster.host_lost(host, f"{words[0]} cannot be started: {error.strerror}")
            return
        agent.process, agent.heard_s = process, time.monotonic()
        if self._roster.over:
            agent.dismiss()
        for worker in self._roster.of(host):
            self._send_start(agent, worker)
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            while line := await process.stdout.readline():
                agent.heard_s = time.monotonic()
                self._heard(host, agent, line)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        agent.kill()
        status = await process.wait()
        del self._agents[host]
        host.dismissed = False
        if self._roster.over or not self._roster.of(host):
            self._roster.review()
        elif not agent.answered:
            self._roster.host_lost(host, f"{words[0]} ended with status {status} before the agent answered")
        elif time.monotonic() - agent.heard_s >= SILENCE_S:
            self._roster.host_lost(host, f"it has not answered for {SILENCE_S:g} s")
        else:
            self._roster.host_lost(host, "its agent has ended")

    def _heard(self, host: Host, agent: _Agent, line: bytes) -> None:
        try:
            message = json.loads(line)
            known = isinstance(message, dict)
        except ValueError:
            known = False
        if not known:
            self._say(f"host {host.name}: {line.decode(errors='replace').rstrip()}")  # of a shell's start-up files
        elif "agent" in message:
            agent.answered = True
        elif "out" in message:
            self._printed(message["out"], message["text"])
        elif "leaving" in message:
            self._roster.host_leaving(host, f"its agent got {signal.Signals(message['leaving']).name}")
        elif "ended" in message and message["ended"] in self._roster.workers:
            self._ended(self._roster.workers[message["ended"]], message["code"])

    def _remote_shell(self) -> list[str]:
        text = self._settings.rsh or os.environ.get(RSH)
        words = shlex.split(text) if text else list(_SSH)
        words += ["-p", str(self._settings.ssh_port)] if self._settings.ssh_port is not None else []
        key = self._settings.ssh_identity_file
        return words + (["-i", str(key.absolute())] if key is not None else [])

    def _send_start(self, agent: _Agent, worker: Worker) -> None:
        local = host_lists.is_local(worker.host.name)
        environment = {
            name: text for name, text in job_environment().items() if local or not _OF_A_HOST.fullmatch(name)
        }
        for name in _THREADS:
            if name not in os.environ:
                environment.pop(name, None)  # a rank's share of the cores is not the launcher's matter
        environment |= self._variables(worker)
        command, folder = list(self._settings.command), os.getcwd()
        agent.send({"start": worker.number, "environment": environment, "command": command, "folder": folder})
