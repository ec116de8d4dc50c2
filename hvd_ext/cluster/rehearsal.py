"""Makes a rehearsed cluster, changes its links while jobs run, and removes it afterwards.

    with Cluster(Spec((2, 2), rate="100mbit")) as cluster:
        status = cluster.mpirun(["python", "train.py"])

The command `python -m hvd_ext cluster run` uses this module, and so do tests and benchmarks that need several hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from hvd_ext.cluster import folder as folders, holder, launch, network, state as states
from hvd_ext.cluster.spec import Spec, describe, rate_bits, topology
from hvd_ext.cluster.state import State
from hvd_ext.cluster.tools import obstacle, tool, unshare
from hvd_ext.errors import HvdExtError, InvalidError

STOP_S = 10.0
# mpirun's remote shell: AGENT HOST COMMAND...
AGENT = """#!/bin/sh
holder=$(cat {folder}/holders/"$1") || exit 1
shift
exec {nsenter} --target "$holder" --mount --uts --ipc --net -- sh -c "$*"
"""


class ClusterError(HvdExtError):
    """A cluster cannot be rehearsed here, or one of its links cannot be changed; the message says why."""


class Cluster:
    """A rehearsed cluster, which exists inside its `with` block."""

    def __init__(self, spec: Spec) -> None:
        """Describe a cluster."""
        self.spec = spec
        self._cleanup = contextlib.ExitStack()
        self._state: State | None = None

    def __enter__(self) -> Cluster:
        words = obstacle()
        if words:
            raise ClusterError(f"namespaces: making them {words}")
        launch.find_mpirun()
        folders.remove_stale()
        with contextlib.ExitStack() as cleanup:
            self._make(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> State:
        """What other processes need to start jobs in the cluster.

        Raises:
            ClusterError: the cluster does not exist outside of its `with` block.
        """
        if self._state is None:
            raise ClusterError("cluster: it exists only inside its with block")
        return self._state

    @property
    def folder(self) -> Path:
        """A folder of the rehearsal, which is removed with it."""
        return Path(self.state.folder)

    def enter(self, host: str | None = None) -> list[str]:
        """Return the words to put before a command that shall run in the switch (None) or on a host."""
        return states.enter(self.state, None if host is None else self._checked(host))

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that starts a job, for callers that start it with `environment()` and watch the process.

        Raises:
            InvalidError: the program does not exist.
        """
        return launch.mpirun(self.state, launch.resolve(program))

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a job, with additional variables."""
        return {**launch.environment(self.state), **extra}

    def mpirun(
        self,
        program: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        output: IO[str] | IO[bytes] | int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Run a program on all ranks, and return mpirun's exit status.

        Args:
            program: the command that each rank runs.
            variables: environment variables in addition to this process's own.
            output: the file for stdout and stderr of all ranks; None for this process's own.

        Raises:
            InvalidError: the program does not exist.
            JobError: the job did not end in time, and was ended.
        """
        environment = self.environment(**(variables or {}))
        return launch.run(self.command(program), environment, output=output, timeout_s=timeout_s)

    def cut(self, host: str) -> None:
        """Pull a host's cable, so that all packets on it are lost."""
        self._batch("ip", [f"link set {self._checked(host)} down"])

    def restore(self, host: str) -> None:
        """Put a host's cable back."""
        self._batch("ip", [f"link set {self._checked(host)} up"])

    def set_rate(self, host: str, rate: str) -> None:
        """Change the rate of a host's link in each direction, even while a job runs; the burst is that of the new rate.

        Raises:
            InvalidError: the rate is wrong, or the host does not exist.
        """
        rate_bits(rate)
        burst = self.spec.burst_at(rate)
        self._batch("tc", [network.limit(self._checked(host), rate, burst, "replace")])
        self._batch("tc", [network.limit("eth0", rate, burst, "replace")], host)

    def close(self) -> None:
        """End every process of the cluster, which removes its namespaces; then remove its folder."""
        self._cleanup.close()

    def _make(self, cleanup: contextlib.ExitStack) -> None:
        folder, lock = folders.make()
        cleanup.enter_context(lock)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("session", "holders"):
            (folder / name).mkdir()
        (folder / "hosts").write_text(network.hosts_file(self.spec), encoding="utf-8")
        remarks = "".join(f"# {line}\n" for line in describe(self.spec))  # benchmark results contain these lines
        links = topology(self.spec, len(os.sched_getaffinity(0)))
        (folder / "topology.yaml").write_text(remarks + links, encoding="utf-8")
        pid, holders = self._start(folder, cleanup)
        for name, number in holders.items():
            (folder / "holders" / name).write_text(f"{number}\n", encoding="utf-8")
        agent = folder / "agent"
        agent.write_text(AGENT.format(folder=folder, nsenter=tool("nsenter")), encoding="utf-8")
        agent.chmod(0o755)
        self._state = State(
            pid,
            states.namespaces(pid),
            str(folder),
            dict(zip(self.spec.names, self.spec.hosts, strict=True)),
            holders,
            dict(self.spec.mca),
            launch.users_parameters(),
        )
        cleanup.callback(setattr, self, "_state", None)
        self._batch("ip", network.switch_links(self.spec, holders))
        self._batch("tc", network.switch_limits(self.spec))
        for number, name in enumerate(self.spec.names, 1):
            self._batch("ip", network.host_links(number), name)
            if self.spec.rate is not None:
                limit = network.limit("eth0", self.spec.rate, self.spec.burst_at(self.spec.rate))
                self._batch("tc", [limit], name)
        self._state.write()

    def _start(self, folder: Path, cleanup: contextlib.ExitStack) -> tuple[int, dict[str, int]]:
        request = {
            "hosts": self.spec.names,
            "switch": network.SWITCH,
            "hosts_file": str(folder / "hosts"),
            "session": str(folder / "session"),
        }
        python = [sys.executable, "-I", "-S", str(Path(holder.__file__).resolve())]
        log = folder / "holder.log"
        with log.open("wb") as errors:
            first = subprocess.Popen(
                [*unshare(), *python, json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        cleanup.callback(_end, first)
        assert first.stdout is not None
        line = first.stdout.readline()
        if not line:
            words = " ".join(log.read_text(errors="replace").split())
            raise ClusterError(f"namespaces: they cannot be made, is a privilege missing? {words}")
        answer = json.loads(line)
        return answer["pid"], answer["holders"]

    def _batch(self, name: str, lines: Sequence[str], host: str | None = None) -> None:
        if not lines:
            return
        words = [*self.enter(host), tool(name) or name, "-batch", "-"]
        done = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"network of {host or network.SWITCH}: {name} failed: {' '.join(done.stderr.split())}")

    def _checked(self, host: str) -> str:
        if host not in self.spec.names:
            raise InvalidError(f"host ({host}): must be one of {', '.join(self.spec.names)}")
        return host


def _end(first: subprocess.Popen[bytes]) -> None:
    assert first.stdin is not None
    with first:
        first.stdin.close()
        try:
            first.wait(STOP_S)
        except subprocess.TimeoutExpired:
            first.kill()
