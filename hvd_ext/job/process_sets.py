"""Subsets of the job's ranks, each with an engine of its own, so that its collectives meet nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext.engine.engine import start_set
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, rank_lists, runtime
from hvd_ext.options import SetOfRanks

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime


class ProcessSet(SetOfRanks):
    """Some ranks of the job, which run collectives among themselves once the set has been added.

    Args:
        ranks_or_comm: global ranks, in any order, each once; or a communicator of mpi4py of these ranks, in MPI's
            order, which each of its ranks gives.

    Attributes:
        process_set_id: the set's number, or None while the set is not added.
        mpi_comm: the communicator that was given, or None.

    Raises:
        InvalidError: no ranks, something that is not a rank, or a rank that is there twice.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Name the ranks; `add_process_set` or `init` adds the set."""
        given = rank_lists.is_communicator(ranks_or_comm)
        self._ranks = _ranks_of(ranks_or_comm) if given else rank_lists.checked(ranks_or_comm)
        self._runtime: Runtime | None = None  # of a set that was added, on its ranks
        self.process_set_id: int | None = None
        self.mpi_comm: Any = ranks_or_comm if given else None

    @property
    def ranks(self) -> list[int]:
        """The global ranks, ascending."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Give the number of ranks, or None while the set is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Give this process's place in the set, 0 to `size()` - 1, or None while the set is not added.

        Raises:
            InvalidError: this process is not in the set.
        """
        return None if self.process_set_id is None else member(self, "rank").engine.rank

    def included(self) -> bool:
        """Tell whether this process is in the set."""
        return runtime.current().engine.rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = None
        self._runtime = None

    @property
    def ranks(self) -> list[int]:
        job = runtime.current_or_none()
        return [] if job is None else list(job.engine.ranks)

    def size(self) -> int | None:
        return runtime.current().engine.size


_SUBJECT = "process sets"  # of the exchanges: an add on one rank and a remove on another meet, and differ

global_process_set: ProcessSet = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; all ranks of the job call it with equal ranks, also those that are not in the set.

    Of sets of communicators each rank gives that of its own communicator, as `Comm.Split` gives them; all are added.

    Args:
        process_set: the set, or its ranks or communicator.

    Returns:
        The set, which has a `process_set_id` now.

    Raises:
        InvalidError: the ranks are wrong, or a set of the same ranks exists; on all ranks.
        MismatchError: the ranks of the job gave different sets; on all ranks.
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    return _add(runtime.current(), "add_process_set", lambda: [_as_set(process_set)])[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call it with the same set, when the set has nothing under way.

    Args:
        process_set: from `add_process_set` or given to `init`.

    Returns:
        Whether it was removed: false for the global set and for one that is not added.

    Raises:
        InvalidError: no process set was given; on all ranks.
        MismatchError: the ranks of the job gave different sets; on all ranks.
    """
    job = runtime.current_or_none()
    if job is None:
        return False

    def about() -> dict[str, Any]:
        if not isinstance(process_set, ProcessSet):
            raise InvalidError(
                f"remove_process_set ({process_set!r}): takes a ProcessSet, got {type(process_set).__name__}"
            )
        return {"same": {"call": "remove_process_set", "process set": process_set.process_set_id}}

    answers = consensus.exchange(job.engine, _SUBJECT, about)
    consensus.check_same(_SUBJECT, [answer["same"] for answer in answers])
    if not process_set.process_set_id:
        return False
    del job.process_sets[process_set.process_set_id]
    left, process_set._runtime, process_set.process_set_id = process_set._runtime, None, None
    if left is not None:
        left.engine.stop(together=True)
    return True


def add_all(job: Runtime, process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Add the sets that were given to `init`.

    Args:
        job: the job, which is not the current one yet.
        process_sets: the sets; None or "dynamic" for none.

    Raises:
        InvalidError: something else, or a set that cannot be added; on all ranks.
        MismatchError: the ranks gave different sets; on all ranks.
    """

    def given() -> list[ProcessSet]:
        if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
            return []
        if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
            raise InvalidError(f"init (process_sets={process_sets!r}): takes a list of ProcessSet, or 'dynamic'")
        for process_set in process_sets:
            if not isinstance(process_set, ProcessSet):
                raise InvalidError(
                    f"init (process_sets: {process_set!r}): takes ProcessSet objects, which the collectives are given "
                    f"afterwards; got {type(process_set).__name__}"
                )
        return list(process_sets)

    _add(job, "init", given)


def forget(job: Runtime) -> None:
    """Take leave of the sets of a job that ends: they must be added again after the next `init`.

    Args:
        job: the job.
    """
    for process_set in job.process_sets.values():
        process_set._runtime = process_set.process_set_id = None
    job.process_sets.clear()


def runtime_of(process_set: ProcessSet | None) -> Runtime | None:
    """Give what runs a set's collectives.

    Args:
        process_set: a set that was added; None for all ranks.

    Returns:
        The set's runtime; None where this rank is not in the set.

    Raises:
        InvalidError: the set was not added, has been removed, or is of before `shutdown`.
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    job = runtime.current()
    if process_set is None or process_set is global_process_set:
        return job
    if not isinstance(process_set, ProcessSet):
        raise InvalidError(
            f"process_set ({process_set!r}): takes a ProcessSet or None, got {type(process_set).__name__}"
        )
    if process_set.process_set_id is not None and job.process_sets.get(process_set.process_set_id) is process_set:
        return process_set._runtime
    raise InvalidError(
        f"process set (ranks {rank_lists.listed(process_set.ranks)}): it must be added before it is used: call "
        "add_process_set() on all ranks, or give it to init(process_sets=[...]), also after shutdown() and init()"
    )


def find(process_set_id: int | None) -> ProcessSet:
    """Give the set of a number.

    Args:
        process_set_id: of a set that was added; 0 for all ranks.

    Returns:
        The set.

    Raises:
        InvalidError: there is no such set (any more).
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    job = runtime.current()
    found = global_process_set if process_set_id == 0 else job.process_sets.get(process_set_id or -1)
    if found is None:
        there = rank_lists.listed(sorted({0, *job.process_sets}))
        raise InvalidError(f"process set {process_set_id}: it must have been added, there are the sets {there}")
    return found


def member(process_set: ProcessSet | None, what: str) -> Runtime:
    """Give what runs a set's collectives, on a rank of the set.

    Args:
        process_set: a set that was added; None for all ranks.
        what: who asks, for the message.

    Returns:
        The set's runtime.

    Raises:
        InvalidError: this rank is not in the set, or the set is not there (see `runtime_of`).
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    found = runtime_of(process_set)
    if found is None:
        assert process_set is not None
        raise InvalidError(
            f"{what}: rank {runtime.current().engine.rank} is not in process set {process_set.process_set_id} (ranks "
            f"{rank_lists.listed(process_set.ranks)}); only its ranks may call it: ask process_set.included() first"
        )
    return found


def _as_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def _ranks_of(comm: Any) -> tuple[int, ...]:
    """Find the ranks of a communicator of mpi4py in the job, whose order is MPI's."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise InvalidError(
            "process set (COMM_NULL): only the ranks of a communicator give it; leave it out on this one"
        )
    ranks = tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group()))
    if ranks != tuple(sorted(ranks)):
        raise InvalidError(
            f"process set (communicator of ranks {rank_lists.listed(ranks)}): it must have its ranks in MPI's order; "
            "give the key COMM_WORLD.rank when you split, or the list of ranks"
        )
    return ranks


def _add(job: Runtime, call: str, given: Callable[[], list[ProcessSet]]) -> list[ProcessSet]:
    """Agree on what is added, then start it: all ranks add all of it, or none does."""
    own: list[ProcessSet] = []
    started: list[Runtime] = []

    def about() -> dict[str, Any]:
        own.extend(given())
        known = {tuple(range(job.engine.size)): "the global process set"}
        known |= {tuple(old.ranks): f"process set {number}" for number, old in job.process_sets.items()}
        for process_set in own:
            rank_lists.check_new(call, tuple(process_set.ranks), job.engine.size, known)
            known[tuple(process_set.ranks)] = "an earlier one of this call"
        return {
            "same": {"call": call, "ranks": [one.ranks for one in own if one.mpi_comm is None]},
            "communicators": [one.ranks for one in own if one.mpi_comm is not None],
        }

    def start() -> None:
        for number, process_set in enumerate(added, job.last_process_set + 1):
            if job.engine.rank in process_set.ranks:
                started.append(job.subset(start_set(job.engine, process_set.ranks, number, job.options)))

    answers = consensus.exchange(job.engine, _SUBJECT, about)
    consensus.check_same(_SUBJECT, [answer["same"] for answer in answers])
    agreed = rank_lists.of_communicators(call, [answer["communicators"] for answer in answers])
    agreed += [tuple(ranks) for ranks in answers[0]["same"]["ranks"]]
    mine = {tuple(process_set.ranks): process_set for process_set in own}
    added = [mine.get(ranks) or ProcessSet(ranks) for ranks in agreed]
    if not added:
        return own
    try:
        consensus.exchange(job.engine, f"start of {_SUBJECT}", start)
    except BaseException:
        for one in started:
            one.engine.stop()
        raise
    runtimes = iter(started)
    for process_set in added:
        job.last_process_set += 1
        job.process_sets[job.last_process_set] = process_set
        process_set.process_set_id = job.last_process_set
        process_set._runtime = next(runtimes) if job.engine.rank in process_set.ranks else None
    return own
