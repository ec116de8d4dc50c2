"""Runs an elastic job: starts its workers on hosts, decides which of them form a world, and replaces lost ones.

`roster.py` decides, `agents.py` starts and ends processes, `connections.py` speaks with workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import IO, Any

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.runner.launcher import RANK_VARIABLES
from hvd_ext.runner.supervisor.agents import Agents
from hvd_ext.runner.supervisor.connections import Connections
from hvd_ext.runner.supervisor.roster import BROKEN_S, SIGNALLED, Host, Roster, Worker, counted
from hvd_ext.runner.supervisor.settings import Settings

__all__ = ["Settings", "run"]

LOOK_S = 0.2
DISCOVER_S = 1.0


class _Supervisor:
    """A running job; everything happens in one event loop. It does what the roster decides (`Actions`)."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self.say = say
        self._roster = Roster(settings, self)
        self._connections = Connections(self._roster, self._spawn)
        self._agents = Agents(
            settings,
            self._roster,
            say=say,
            printed=self._print,
            ended=lambda worker, code: self._spawn(self._ended(worker, code)),
            variables=self._connections.variables,
            spawn=self._spawn,
        )
        self._result: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._files: dict[int, IO[str]] = {}

    async def run(self) -> int:
        """Run the job to its end, and return its exit status."""
        loop, settings, roster = asyncio.get_running_loop(), self._settings, self._roster
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, roster.finish, 128 + number, f"got {signal.Signals(number).name}")
        try:
            listed = await settings.source.hosts()
            await self._connections.listen(listed if settings.source.script is None else None, settings.interfaces)
            hosts = ", ".join(f"{name} ({slots})" for name, slots in listed.items())
            numbers = f"{counted(settings.workers, 'worker')} ({settings.least} to {settings.most})"
            self.say(f"elastic job: {numbers} on {counted(len(listed), 'host')}: {hosts}")
            roster.list_hosts(listed)
            self._spawn(self._look())
            if settings.source.script is not None:
                self._spawn(self._discover())
            code, why = await self._result
        finally:
            self._connections.close()
            await self._close()
        self.say(why)
        return code

    # What the roster decides

    def start(self, worker: Worker) -> None:
        self._agents.start(worker)

    def stop(self, worker: Worker, number: signal.Signals) -> None:
        self._agents.stop(worker, number)

    def send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        self._connections.send(worker, message)

    def disconnect(self, worker: Worker) -> None:
        self._connections.disconnect(worker)

    def dismiss(self, host: Host) -> None:
        self._agents.dismiss(host)

    def finish(self, code: int, why: str) -> None:
        if not self._result.done():
            self._result.set_result((code, why))

    # What happens

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._result.done():
                self._result.set_exception(error)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def _look(self) -> None:
        while True:
            self._agents.look()
            self._roster.review()
            await asyncio.sleep(LOOK_S)

    async def _discover(self) -> None:
        failed = ""
        while True:
            await asyncio.sleep(DISCOVER_S)
            try:
                self._roster.list_hosts(await self._settings.source.hosts())
                failed = ""
            except InvalidError as error:
                if str(error) != failed:
                    self.say(f"{error}; keeping the hosts")
                failed = str(error)

    async def _ended(self, worker: Worker, code: int) -> None:
        """Tell the roster that a worker has ended, when its connection has ended too, or has outlived it."""
        limit_s = time.monotonic() + BROKEN_S / 2
        while code > 0 and code not in SIGNALLED and worker.connected and time.monotonic() < limit_s:
            await asyncio.sleep(0.01)
        # A process that ends closes its connection, unless its host is cut off. Then that is why it has ended.
        self._roster.ended(worker, code, cut=worker.connected)

    def _print(self, number: int, text: str) -> None:
        worker = self._roster.workers.get(number)
        rank = worker.rank if worker is not None else None
        print(f"[{rank if rank is not None else f'worker {number}'}] {text}", flush=True)
        if self._settings.outputs is not None:
            if number not in self._files:
                path = self._settings.outputs / f"worker.{number}.txt"
                self._files[number] = path.open("w", encoding="utf-8", errors="replace")
            self._files[number].write(text + "\n")
            self._files[number].flush()

    async def _close(self) -> None:
        """End all workers, by their agents."""
        if not self._result.done():
            self._result.cancel()  # an error in `run`
        failed = self._result.cancelled() or self._result.exception() is not None
        why = "the supervisor has failed" if failed else self._result.result()[1]
        self._roster.over = True
        for worker in self._roster.workers.values():
            self.send(worker, {"kind": "end", "why": why, "code": 1})
        await self._agents.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for file in self._files.values():
            file.close()


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
        return await _Supervisor(settings, say).run()

    try:
        return asyncio.run(job())
    except BrokenPipeError as error:
        raise HvdExtError("stdout: it was closed while the job ran") from error
