"""A job on a rehearsed cluster to which something happens while it sums, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import HvdExtError
from hvd_ext.runner.launcher import marked
from tests.mpi import jobs
from tests.mpi.fork_server import OUTPUT

# What a test may take; nothing of it comes near, unless it waits for ever.
LIMIT_S = 240

# Argument: the number of elements. Sums in a loop, without TensorFlow, until rank 0 finds the file "enough".
SUMS = """
import os, pathlib, sys
import numpy as np
from hvd_ext.job import process, runtime
from hvd_ext.options import Sum
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

elements = int(sys.argv[1])
folder = pathlib.Path(os.environ["HVD_EXT_TEST_OUTPUT"])
process.init()
job, rank, size = runtime.current(), process.rank(), process.size()
channel = job.open("sums", layout(job.tree, [Tensor("x", (elements,), "float32")], Sum))
places = np.arange(elements) % 97
step, told = 0, 0
while not told:
    values = ((rank + 1) * (places + step % 50)).astype(np.float32)
    values[-1] = (folder / "enough").exists() if rank == 0 else 0
    job.engine.reduce(channel, [values], [values])
    told = values[-1]
    assert (values[:-1] == size * (size + 1) // 2 * (places + step % 50)[:-1]).all(), step
    step += 1
    print("step", step, flush=True)
    if (folder / f"raise{rank}").exists():
        raise ValueError("told to fail")
print("all sums were right", flush=True)
"""


class Faulty:
    """A job that runs on a rehearsed cluster; each rank writes to a file of its own."""

    def __init__(self, cluster: Cluster, folder: Path, command: Sequence[str], variables: dict[str, str]) -> None:
        """Start the job."""
        self.cluster, self.folder = cluster, folder
        self.size = sum(cluster.spec.hosts)
        self.status: int | None = None
        self.error = ""
        self.ended_s = 0.0
        changes = {OUTPUT: str(folder), **variables}
        self._thread = threading.Thread(target=self._run, args=(command, changes), daemon=True)
        self._thread.start()

    def _run(self, command: Sequence[str], variables: dict[str, str]) -> None:
        with (self.folder / "launcher.txt").open("wb") as log:
            try:
                self.status = self.cluster.mpirun(command, variables=variables, output=log, timeout_s=LIMIT_S)
            except HvdExtError as error:
                self.error = str(error)
        self.ended_s = time.monotonic()

    def runs(self) -> bool:
        """Whether the job has not ended."""
        return self._thread.is_alive()

    def said(self, rank: int) -> str:
        """What a rank has written."""
        return read(self.folder / f"rank{rank}.txt")

    def steps(self, rank: int) -> int:
        """How many steps a rank has done."""
        return self.said(rank).count("\nstep ") + self.said(rank).startswith("step ")

    def text(self) -> str:
        """Everything, for the message of a test that fails."""
        log = read(self.folder / "launcher.txt")
        parts = [f"status {self.status}, {self.error or 'no error'}", log, *map(self.said, range(self.size))]
        return "\n--\n".join(parts)

    def wait(self, condition: Callable[[], object], words: str) -> None:
        """Wait for a condition while the job runs."""
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self.runs(), f"the job has ended before: {words}\n{self.text()}"
            assert time.monotonic() < end_s, f"it did not come true: {words}\n{self.text()}"
            time.sleep(0.05)

    def wait_for_steps(self, more: int) -> None:
        """Wait until every rank has done so many more steps than the quickest had done."""
        goal = max(map(self.steps, range(self.size))) + more
        self.wait(lambda: min(map(self.steps, range(self.size))) >= goal, f"{goal} steps")

    def pids(self) -> dict[int, psutil.Process]:
        """The living ranks."""
        living = marked(OUTPUT, str(self.folder)).items()
        name = "OMPI_COMM_WORLD_RANK"
        return {int(variables[name]): process for process, variables in living if name in variables}

    def end(self) -> None:
        """Wait for the job's end, however it ends."""
        self._thread.join(LIMIT_S + 30)
        assert not self.runs(), self.text()

    def must_succeed(self) -> None:
        """Have the ranks stop, and check that the job has ended well."""
        (self.folder / "enough").touch()
        self.end()
        assert self.status == 0, self.text()
        assert all("all sums were right" in self.said(rank) for rank in range(self.size)), self.text()

    def must_fail(self) -> None:
        """Check that the job ends by itself, with an error."""
        self.end()
        assert self.status != 0, self.text()
        assert "did not end within" not in self.error, self.text()
        assert not any("all sums were right" in self.said(rank) for rank in range(self.size)), self.text()


@contextlib.contextmanager
def running(
    folder: Path,
    spec: Spec,
    program: str = SUMS,
    *,
    elements: int = 50_000,
    prepare: Callable[[Cluster], None] = lambda cluster: None,
    **variables: str,
) -> Iterator[Faulty]:
    """Run a job in a cluster, and check afterwards that nothing is left of either.

    Args:
        folder: an empty folder for its files.
        spec: the cluster.
        program: Python text that every rank runs.
        elements: the program's argument.
        prepare: is called before the job starts.
        variables: of the job's environment.
    """
    before = machine()
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program), encoding="utf-8")
    with Cluster(spec) as cluster:
        state = cluster.state
        prepare(cluster)
        job = Faulty(cluster, folder, [sys.executable, str(jobs.RANK), str(script), str(elements)], variables)
        yield job
        if not job.runs():
            assert left_of(folder) == [], job.text()
    job.end()
    assert left_of(folder) == []
    assert members(state.namespaces["pid"]) == []
    assert not Path(state.folder).exists()
    assert machine() <= before


def read(path: Path) -> str:
    """What a file holds; nothing where there is none yet."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def left_of(folder: Path) -> list[psutil.Process]:
    """The living processes of the job: ranks, daemons and launcher."""
    end_s = time.monotonic() + 60
    while (left := list(marked(OUTPUT, str(folder)))) and time.monotonic() < end_s:
        time.sleep(0.05)
    return left


def members(namespace: str) -> list[str]:
    """The processes in a PID namespace."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == namespace:
                found.append(str(link))
    return found


def machine() -> set[str]:
    """What a rehearsal might leave on the machine: shared memory of its hosts, interfaces, mounts."""
    mounts = {line for line in read(Path("/proc/self/mounts")).splitlines() if "hvd_ext" in line}
    # Open MPI's files are named after the host; other jobs of this machine come and go meanwhile.
    memory = {name for name in os.listdir("/dev/shm") if re.search(r"\.(h\d|switch)\.", name)}
    return mounts | memory | ({"core", "h1", "h2", "h3"} & set(psutil.net_if_addrs()))
