"""Starts the workers of one host for the supervisor of an elastic job, and ends them with it.

    python -m hvd_ext.runner.agent

The agent reads JSON lines from stdin: {"start": id, "environment": {...}, "command": [...], "folder": path},
{"stop": id, "signal": n} and {"ping": 0}. It writes JSON lines to stdout: {"agent": pid} first, {"out": id, "text":
line}, {"ended": id, "code": n}, with the negative number of a signal, {"pong": 0}, and {"leaving": n} when the agent
itself has got signal n: the host is going away. When stdin ends, or nothing has arrived for `SILENCE_S`, all workers
are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from hvd_ext.runner import launcher

# The supervisor pings far more often. A connection that is cut off never ends by itself.
SILENCE_S = 120.0
STOP_S = 3.0
# A worker's children may hold its pipe open.
REST_S = 1.0
LINE_NBYTES = 64 << 10
NOT_FOUND, NOT_STARTED = 127, 126


class Agent:
    """The workers of a host. The main thread starts and signals them; each has a thread that waits for it."""

    def __init__(self) -> None:
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        # Only this descriptor leads to the supervisor; whatever else prints to stdout goes to stderr.
        self._output = os.dup(1)
        os.dup2(2, 1)

    def obey(self, message: Mapping[str, Any]) -> None:
        """Do what a message of the supervisor says."""
        if "start" in message:
            self._start(message["start"], message["environment"], message["command"], message["folder"])
        elif "stop" in message:
            self._signal(message["signal"], message["stop"])
        elif "ping" in message:
            self.send(pong=0)

    def end(self) -> None:
        """End all workers: first SIGTERM, and SIGKILL after `STOP_S`."""
        self._signal(signal.SIGTERM)
        limit_s = time.monotonic() + STOP_S
        while self._workers and time.monotonic() < limit_s:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)

    def send(self, **message: Any) -> None:
        """Write a line to the supervisor; one that has ended gets nothing."""
        data = (json.dumps(message) + "\n").encode()
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._output, data) :]

    def _start(self, number: int, environment: Mapping[str, str], command: list[str], folder: str) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_end_with_agent,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.send(out=number, text=f"hvd_ext run: {command[0]}: it cannot be started in {folder}: {error}")
            self.send(ended=number, code=NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED)
            return
        self._workers[number] = process
        threading.Thread(target=self._watch, args=(number, process), daemon=True).start()

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        reader = threading.Thread(target=self._forward, args=(number, process), daemon=True)
        reader.start()
        # The process stays a zombie until its group has been killed, so that the group's number is still its own.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(process.pid, signal.SIGKILL)
        reader.join(REST_S)
        del self._workers[number]
        self.send(ended=number, code=process.wait())

    def _forward(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(LINE_NBYTES):
            self.send(out=number, text=line.decode(errors="replace").rstrip("\n"))

    def _signal(self, number: int, worker: int | None = None) -> None:
        for name, process in list(self._workers.items()):
            if worker in (None, name):
                _signal_group(process.pid, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_with_agent() -> None:
    launcher.end_with_parent(signal.SIGKILL)


def main() -> NoReturn:
    """Serve the supervisor until it closes stdin."""
    agent = Agent()
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    agent.send(agent=os.getpid())
    unread = b""
    while True:
        ready, _, _ = select.select([0, signals], [], [], SILENCE_S)
        if signals in ready:
            agent.send(leaving=os.read(signals, 1)[0])
            continue
        data = os.read(0, 1 << 16) if ready else b""
        if not data:
            break
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            agent.obey(json.loads(line))
    agent.end()
    os._exit(0)  # threads may still wait for pipes that a worker's children hold


if __name__ == "__main__":
    main()
