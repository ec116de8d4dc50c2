"""Subsets of the job's ranks, each with its own engine, so that its collectives never meet those of other sets."""

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
        ranks_or_comm: global ranks, in any order, each once; or an mpi4py communicator of these ranks in MPI's order,
            which every one of them must pass.

    Attributes:
        process_set_id: the set's number, or None while the set is not added.
        mpi_comm: the communicator that was passed, or None.

    Raises:
        InvalidError: the list is empty, holds something that is not a rank, or holds a rank twice.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        """Store the ranks; `add_process_set` or `init` adds the set."""
        is_communicator = rank_lists.is_communicator(ranks_or_comm)
        self._ranks = _ranks_of(ranks_or_comm) if is_communicator else rank_lists.checked(ranks_or_comm)
        self.process_set_id: int | None = None
        self.mpi_comm: Any = ranks_or_comm if is_communicator else None

    @property
    def ranks(self) -> list[int]:
        """The global ranks, ascending."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks, or None while the set is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place in the set, 0 to `size()` - 1, or None while the set is not added.

        Raises:
            InvalidError: this process is not in the set.
        """
        return None if self.process_set_id is None else member(self, "rank").engine.rank

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return runtime.current().engine.rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks, which is always there; its number is 0."""

    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:
        job = runtime.current_or_none()
        return [] if job is None else list(job.engine.ranks)

    def size(self) -> int | None:
        return runtime.current().engine.size


class _Group(ProcessSet):
    """The ranks of a process set that reduce in each local step; no user sees it, and it ends with the job.

    Args:
        subset: the runtime that runs its collectives.
    """

    def __init__(self, subset: Runtime) -> None:
        super().__init__(subset.engine.ranks)
        self.runtime = subset


_GROUP_TAG = 1 << 14  # of the communicators of groups; process sets are numbered from 1

_added: dict[int, ProcessSet] = {}  # the sets of the running job, by number
_SUBJECT = "process sets"  # one name for all exchanges: an add on one rank meets a remove on another and differs

global_process_set: ProcessSet = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; all ranks of the job call this function with equal ranks, even those outside of the set.

    Where sets are made from communicators, each rank passes its own, as `Comm.Split` returns them; all are added.

    Args:
        process_set: the set, or its ranks or communicator.

    Returns:
        The set, which now has a `process_set_id`.

    Raises:
        InvalidError: the ranks are wrong, or a set of the same ranks exists; raised on all ranks.
        MismatchError: the ranks of the job passed different sets; raised on all ranks.
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    job = runtime.current()
    with job.agreement(_SUBJECT):
        made = [process_set] if isinstance(process_set, ProcessSet) else None
        return _add(job, "add_process_set", lambda: made or [ProcessSet(process_set)])[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this function with the same set, once its work has ended.

    Args:
        process_set: a set from `add_process_set`, or one that was passed to `init`.

    Returns:
        Whether the set was removed: false for the global set and for a set that is not added.

    Raises:
        InvalidError: the argument is not a process set; raised on all ranks.
        MismatchError: the ranks of the job passed different sets; raised on all ranks.
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

    with job.agreement(_SUBJECT):
        answers = consensus.exchange(job.engine, _SUBJECT, about)
        consensus.check_same(_SUBJECT, [answer["same"] for answer in answers])
        if not process_set.process_set_id:
            return False
        left = job.subsets.pop(process_set.process_set_id, None)
        del _added[process_set.process_set_id]
        process_set.process_set_id = None
        if left is not None:
            for ended in (*(one.runtime for one in left.groups.values()), left):
                ended.running = False
                ended.engine.stop(together=True)
        return True


def add_all(job: Runtime, process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Add the sets passed to `init` (None or "dynamic" for none); `InvalidError`, `MismatchError` on all ranks."""

    def checked() -> list[ProcessSet]:
        if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
            return []
        if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
            raise InvalidError(f"init (process_sets={process_sets!r}): takes a list of ProcessSet, or 'dynamic'")
        for process_set in process_sets:
            if not isinstance(process_set, ProcessSet):
                raise InvalidError(
                    f"init (process_sets: {process_set!r}): takes ProcessSet objects, which are then passed to the "
                    f"collectives; got {type(process_set).__name__}"
                )
        return list(process_sets)

    _add(job, "init", checked)


def forget() -> None:
    """Mark the sets of the job that ends as not added: they must be added again after the next `init`."""
    for process_set in _added.values():
        process_set.process_set_id = None
    _added.clear()


def added() -> list[ProcessSet]:
    """Return the sets of the running job, that of all ranks first."""
    return [global_process_set, *_added.values()]


def runtime_of(process_set: ProcessSet | None) -> Runtime | None:
    """Return the runtime that runs a set's collectives.

    Args:
        process_set: a set that was added; None for all ranks.

    Returns:
        The set's runtime; None if this rank is not in the set.

    Raises:
        InvalidError: the set was not added, has been removed, or was added before `shutdown` and not again.
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    job = runtime.current()
    if process_set is None or process_set is global_process_set:
        return job
    if isinstance(process_set, _Group) and process_set.runtime.running:
        return process_set.runtime
    if not isinstance(process_set, ProcessSet):
        raise InvalidError(
            f"process_set ({process_set!r}): takes a ProcessSet or None, got {type(process_set).__name__}"
        )
    if process_set.process_set_id is not None and _added.get(process_set.process_set_id) is process_set:
        return job.subsets.get(process_set.process_set_id)
    raise InvalidError(
        f"process set (ranks {rank_lists.listed(process_set.ranks)}): it must be added before it is used: call "
        "add_process_set() on all ranks, or give it to init(process_sets=[...]), again after each shutdown()"
    )


def group(process_set: ProcessSet | None, within: str) -> ProcessSet | None:
    """Return the ranks of a process set that reduce in each local step; its ranks call it together, with one `within`.

    Args:
        process_set: a set that was added; None for all ranks.
        within: "host": those of this rank's host; "rank": this rank alone.

    Returns:
        The set, which is made at the first call; `process_set` itself if it has no other ranks, or not this one.

    Raises:
        InvalidError, NotInitializedError: as `runtime_of`.
        CommunicationError: an MPI call failed on some rank; raised on all ranks.
    """
    members = runtime_of(process_set)
    if members is None:
        return process_set
    if within not in members.groups:
        job, own = runtime.current(), members.engine.rank
        hosts = members.tree.hosts()
        places = [own] if within == "rank" else next(list(places) for places in hosts if own in places)
        if len(places) == members.engine.size:
            return process_set
        ranks = sorted(members.engine.ranks[place] for place in places)

        def start() -> None:
            made = members.groups[within] = _Group(job.subset(start_set(job.engine, ranks, _GROUP_TAG, job.options)))
            job.subsets[min([0, *job.subsets]) - 1] = made.runtime

        consensus.exchange(members.engine, "local steps", start)
    found: ProcessSet = members.groups[within]
    return found


def find(process_set_id: int | None) -> ProcessSet:
    """Return the set with a number, 0 for all ranks; `InvalidError` if it was not added or has been removed."""
    runtime.current()
    process_set = global_process_set if process_set_id == 0 else _added.get(process_set_id or -1)
    if process_set is None:
        numbers = rank_lists.listed(sorted({0, *_added}))
        raise InvalidError(f"process set {process_set_id}: it has not been added; the sets are {numbers}")
    return process_set


def member(process_set: ProcessSet | None, what: str) -> Runtime:
    """Return the runtime that runs a set's collectives; `InvalidError` if this rank is not in it (see `runtime_of`)."""
    members = runtime_of(process_set)
    if members is None:
        assert process_set is not None
        raise InvalidError(
            f"{what}: rank {runtime.current().engine.rank} is not in process set {process_set.process_set_id} (ranks "
            f"{rank_lists.listed(process_set.ranks)}); only its ranks may call it: ask process_set.included() first"
        )
    return members


def _ranks_of(comm: Any) -> tuple[int, ...]:
    """Return the job's numbers of the ranks in an mpi4py communicator, which must be in MPI's order."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise InvalidError(
            "process set (COMM_NULL): only the ranks of a communicator pass it; this rank is not one of them"
        )
    ranks = tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group()))
    if ranks != tuple(sorted(ranks)):
        raise InvalidError(
            f"process set (communicator of ranks {rank_lists.listed(ranks)}): it must have its ranks in MPI's order; "
            "give the key COMM_WORLD.rank when you split, or the list of ranks"
        )
    return ranks


def _add(job: Runtime, call: str, sets_of: Callable[[], list[ProcessSet]]) -> list[ProcessSet]:
    """Agree on the sets to add, then start them: either all ranks add all of them, or none adds any."""
    requested: list[ProcessSet] = []
    started: dict[int, Runtime] = {}

    def about() -> dict[str, Any]:
        requested.extend(sets_of())
        known = {tuple(range(job.engine.size)): "the global process set"}
        known |= {tuple(old.ranks): f"process set {number}" for number, old in _added.items()}
        for process_set in requested:
            rank_lists.check_new(call, tuple(process_set.ranks), job.engine.size, known)
            known[tuple(process_set.ranks)] = "an earlier one of this call"
        return {
            "same": {"call": call, "ranks": [subset.ranks for subset in requested if subset.mpi_comm is None]},
            "communicators": [subset.ranks for subset in requested if subset.mpi_comm is not None],
        }

    def start() -> None:
        for number, process_set in numbered:
            if job.engine.rank in process_set.ranks:
                started[number] = job.subset(start_set(job.engine, process_set.ranks, number, job.options))

    answers = consensus.exchange(job.engine, _SUBJECT, about)
    consensus.check_same(_SUBJECT, [answer["same"] for answer in answers])
    agreed = rank_lists.of_communicators(call, [answer["communicators"] for answer in answers])
    agreed += [tuple(ranks) for ranks in answers[0]["same"]["ranks"]]
    by_ranks = {tuple(process_set.ranks): process_set for process_set in requested}
    numbered = list(enumerate((by_ranks.get(ranks) or ProcessSet(ranks) for ranks in agreed), job.last_process_set + 1))
    if not numbered:
        return requested
    try:
        consensus.exchange(job.engine, f"start of {_SUBJECT}", start)
    except BaseException:
        for subset in started.values():
            subset.running = False
            subset.engine.stop()
        raise
    job.subsets |= started
    for number, process_set in numbered:
        _added[number] = process_set
        process_set.process_set_id = job.last_process_set = number
    return requested
