"""The jobs of a benchmark: how they are started, and how they take turns while they live at the same time.

The ranks of Horovod poll while they have nothing to do; on a machine with few cores they would disturb the times of
others. Therefore the ranks of a job get SIGSTOP while another job has the turn, and SIGCONT when their own turn comes.
The launchers and their daemons are never stopped.
"""

from __future__ import annotations

import importlib.util
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hvd_ext.bench.sampling import ALIVE, EVENTS, TURNS, Argument, Follower, emit
from hvd_ext.errors import InvalidError
from hvd_ext.runner.launcher import RANK_VARIABLES, Job, JobError, job_environment, last_words, mpirun

if TYPE_CHECKING:
    from hvd_ext.bench.expected import Cluster

VARIABLE = "HVD_EXT_LAUNCHER"
REHEARSAL = "hvd_ext.cluster.launch"
NO_HOROVOD = "Horovod is not installed and was not measured (python -m hvd_ext install-horovod)"
LEAST_REPETITIONS = 3
FIRST_POLL_S, LONGEST_POLL_S = 1e-3, 20e-3
# The samples of each contestant, by the numbers of its job and of itself.
Samples = dict[tuple[int, int], list[dict[str, Any]]]
# Takes what runs now, and how many parts of the whole have just become ready.
Tell = Callable[[str, int], None]


@dataclass(frozen=True)
class Launcher:
    """Starts a command on all ranks: by the shell command line `line`, or by mpirun on this host if that is empty."""

    line: str = ""

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.line)
        except ValueError as error:
            raise InvalidError(
                f"launcher ({self.line!r}): it must be a command line as a shell reads it: {error}"
            ) from error
        if self.line and not words:
            raise InvalidError("launcher (blank): it must be a command line that starts a command on all ranks")

    def command(self, ranks: int | None, command: Sequence[str]) -> list[str]:
        """Give the whole command of a job whose ranks run `command`; a launcher's line has its own number of ranks."""
        if self.line:
            return [*shlex.split(self.line), *command]
        assert ranks is not None
        return mpirun(ranks, command)

    def describe(self) -> str:
        """Write the line for a report: this interpreter is "python", and a rehearsal's temporary files are left out."""
        if REHEARSAL in shlex.split(self.line):
            return f"python -m {REHEARSAL}"
        words = ["python" if word == sys.executable else word for word in shlex.split(self.line)]
        return shlex.join(words) if words else "mpirun on this host"


def place(environ: Mapping[str, str]) -> int | None:
    """Say which rank of a launched job this process is; None if no launcher has started it."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), None)


def choose(option: str | None, environ: Mapping[str, str]) -> Launcher:
    """Find out how to start jobs.

    Args:
        option: the user's command line; None for that of the environment's `HVD_EXT_LAUNCHER`.

    Raises:
        InvalidError: the line cannot be read, or this process is a rank of a job and does not know how to start
            another job on the same ranks.
    """
    line = environ.get(VARIABLE, "") if option is None else option
    if not line and place(environ) is not None:
        raise InvalidError(
            "launcher (none): the benchmark was started as a rank of a job, but starts jobs of its own: start it "
            "without mpirun and say --launcher 'mpirun ...', or under python -m hvd_ext cluster run"
        )
    return Launcher(line)


class Worker:
    """A job whose rank 0 answers each turn with one event."""

    def __init__(self, name: str, job: Job, folder: Path, timeout_s: float) -> None:
        """Take a job that has just been started; it ends when the caller leaves its `with` block.

        Args:
            timeout_s: longest time without an answer or another sign of life.
        """
        self.name, self.job = name, job
        self._turns, self._follower, self._timeout_s = folder / TURNS, Follower(folder / EVENTS), timeout_s
        self._ranks: list[psutil.Process] = []

    def find_ranks(self, size: int) -> bool:
        """Find the processes of the ranks, which can be stopped; tell whether all `size` are on this machine."""
        processes = self.job.ranks()
        self._ranks = processes if len(processes) == size else []
        return bool(self._ranks)

    def say(self, kind: str, **values: Any) -> None:
        """Write a turn, whose kind is "open", "measure", "check" or "end"."""
        emit(self._turns, kind, **values)

    def answer(self) -> dict[str, Any]:
        """Wait for the next event that is an answer.

        Raises:
            JobError: the job has ended, or gave no sign of life for too long.
        """
        silence = "no answer within {:g} s; where it is only slow, allow more with --timeout"
        for event in events_of(self.job, self._follower, self._timeout_s, self.name, silence, LONGEST_POLL_S):
            if event["kind"] != ALIVE:
                return event
        raise JobError(f"{self.name}: the job ended before its work was done\n{last_words(self.job.log)}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that have been found."""
        for process in self._ranks:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Turns:
    """The jobs of one comparison."""

    def __init__(self) -> None:
        """Begin without jobs."""
        self.workers: list[Worker] = []
        self.stopping = True
        self.hello: dict[str, Any] = {}

    def join(self, worker: Worker) -> None:
        """Wait until a job that has just been started is ready; those that have joined before are stopped meanwhile.

        Raises:
            JobError: the job failed, or its ranks are on other hosts than those of the jobs before.
        """
        hello = worker.answer()
        if self.hello and hello["hosts"] != self.hello["hosts"]:
            raise JobError(
                f"{worker.name}: its ranks are on {hello['hosts']}, those of {self.workers[0].name} on "
                f"{self.hello['hosts']}; the launcher must place the ranks of all jobs alike"
            )
        self.hello = self.hello or hello
        self.stopping = worker.find_ranks(len(hello["hosts"])) and self.stopping
        self.workers.append(worker)
        self._let(None)

    def give(self, worker: Worker, kind: str, **values: Any) -> dict[str, Any]:
        """Give a job that has joined the turn, and wait for its answer.

        Raises:
            JobError: the job failed or did not answer in time.
        """
        self._let(worker)
        worker.say(kind, **values)
        return worker.answer()

    def end(self, timeout_s: float) -> None:
        """Let all jobs end well, one after the other, each in limited time."""
        for worker in self.workers:
            self._let(worker)
            worker.say("end")
            worker.job.wait(timeout_s)

    def _let(self, chosen: Worker | None) -> None:
        # If some ranks are on other machines no rank is stopped: half a stopped job is worse than one that polls.
        if self.stopping:
            for worker in self.workers:
                if worker is not chosen:
                    worker.send(signal.SIGSTOP)
        if chosen is not None:
            chosen.send(signal.SIGCONT)


def check_choices(name: str, values: Sequence[str], valid: Collection[str]) -> None:
    """Check the values of an argument of which each must be a valid one, and occur only once.

    Raises:
        InvalidError: a value breaks the rule.
    """
    for value in values:
        if value not in valid:
            raise InvalidError(f"{name} ({value!r}): must be one of {', '.join(valid)}")
        if values.count(value) > 1:
            raise InvalidError(f"{name} ({value!r}): must be named only once")


def check_least(least: int, why: str = "", **numbers: int | Iterable[int]) -> None:
    """Check arguments, by name, that are numbers not below the least one, or several of them.

    Raises:
        InvalidError: a number breaks the rule; `why` is a reason.
    """
    for name, values in numbers.items():
        for value in (values,) if isinstance(values, int) else values:
            if value < least:
                raise InvalidError(f"{name} ({value}): must be at least {least}{why}")


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    """Rotate a list, so that in each repetition another value is the first."""
    return [values[(place + by) % len(values)] for place in range(len(values))]


def events_of(
    job: Job,
    follower: Follower,
    timeout_s: float,
    what: str,
    silence: str = "no new row for {:g} s",
    longest_poll_s: float = 0.1,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a job until it has ended well.

    Raises:
        JobError: the job failed, or had no new event for the timeout; `silence` says so.
    """
    heard, sleep_s = time.monotonic(), FIRST_POLL_S
    while True:
        ended = job.status() is not None
        events = follower.new()
        yield from events
        if events:
            heard, sleep_s = time.monotonic(), FIRST_POLL_S
        if ended:
            job.wait(timeout_s)  # raises where it has failed
            return
        if time.monotonic() - heard > timeout_s:
            raise JobError(f"{what}: {silence.format(timeout_s)}\n{last_words(job.log)}")
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_poll_s)


def has_horovod() -> bool:
    """Tell whether Horovod can be measured."""
    return importlib.util.find_spec("horovod") is not None


def compare(
    request: Any,
    launcher: Launcher,
    jobs: Mapping[str, tuple[str, Argument]],
    measured: Callable[[Cluster, Turns], tuple[list[dict[str, Any]], list[str]]],
    tell: Tell,
) -> tuple[list[dict[str, Any]], list[str], str]:
    """Start jobs that live at the same time, and measure them; once for each number of ranks.

    Args:
        request: has `ranks`, the numbers of ranks on this host (empty where the launcher says it), `rate`, see
            `Cluster`, and `timeout_s`, the longest time without an answer of a job.
        jobs: by name, the module that a rank runs and its task; it receives them with a folder of turns and events.
        measured: gives the jobs their turns; returns rows and notes.

    Returns:
        The rows, the notes without repetitions, and the YAML text of the topology (empty without one).

    Raises:
        JobError: a job failed.
    """
    # imported here, because it takes time, and most ranks on which a launcher starts a command end at once
    from hvd_ext.bench.expected import cluster_of

    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    topology = ""
    for count in request.ranks or (None,):
        # The folders are removed first: a command that a signal ends may be killed before all its jobs have ended.
        with ExitStack() as stack, ExitStack() as folders:
            turns = Turns()
            for name, (module, task) in jobs.items():
                tell(f"{name} starts", 0)
                # a rank may still write while its folder is removed
                temporary = tempfile.TemporaryDirectory(prefix="hvd_ext-bench-", ignore_cleanup_errors=True)
                folder = Path(folders.enter_context(temporary))
                command = launcher.command(count, [sys.executable, "-m", module, str(folder), task.write()])
                job = stack.enter_context(Job(command, folder / "log", job_environment()))
                turns.join(Worker(name, job, folder, request.timeout_s))
            cluster, topology = cluster_of(turns.hello, request.rate), turns.hello["topology"]
            measured_rows, remarks = measured(cluster, turns)
            turns.end(request.timeout_s)
        rows += measured_rows
        notes += [note for note in remarks if note not in notes]
    return rows, notes, topology


def caveats(cluster: Cluster, turns: Turns, refused: Mapping[str, str], untold: str) -> list[str]:
    """Say what a reader of the rows must know.

    Args:
        refused: by the name of a contestant that does not apply to the cluster, the reason.
        untold: what follows where several hosts have no topology.
    """
    notes = [f"{name} does not apply to {cluster.tree.describe()}: {why}" for name, why in refused.items()]
    if len(cluster.ranks_per_host) > 1 and not cluster.given:
        notes.append(f"no topology was given (HVD_EXT_TOPOLOGY): the planner assumes its links, so {untold}")
    if not turns.stopping and len(turns.workers) > 1:
        notes.append(
            "some ranks run on other machines: a job is not paused while another one is measured, and may disturb it"
        )
    return notes


def sample_count(request: Any, sample_s: float) -> int:
    """Give the number of samples of a row: as many as fit into its seconds, at least 3, and at most the repetitions."""
    fit = int(request.seconds_per_row / max(sample_s, 1e-6))
    return min(request.repetitions, max(LEAST_REPETITIONS, fit))


def samples_of(request: Any, turns: Turns, opened: Sequence[Sequence[dict[str, Any]]]) -> Samples:
    """Let the jobs take turns; in each repetition every contestant is measured once, in another order."""
    left = {
        (job, index): sample_count(request, facts["sample_seconds"])
        for job, contestants in enumerate(opened)
        for index, facts in enumerate(contestants)
    }
    samples: Samples = {place: [] for place in left}
    for repetition in range(max(left.values(), default=0)):
        for job in rotated(range(len(opened)), repetition):
            which = [index for index in range(len(opened[job])) if left[job, index] > repetition]
            if which:
                answer = turns.give(turns.workers[job], "measure", which=rotated(which, repetition))
                for sample in answer["samples"]:
                    samples[job, sample["index"]].append(sample)
    return samples
