"""The job in this process: `init`, `shutdown`, the rank and its place on the hosts, and what happens at exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from hvd_ext import options
from hvd_ext.engine import engine, native
from hvd_ext.errors import CommunicationError, InvalidError
from hvd_ext.job import (
    banner,
    bootstrap,
    interrupts,
    launch,
    log,
    membership,
    one_process,
    process_sets as sets,
    rank_lists,
    recording,
    runtime,
    startup_watch,
)
from hvd_ext.options import unsupported

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet

# Worlds that may fail one after another while their engines start; then something else than lost ranks is wrong.
START_LIMIT = 10

# What this process must remember beyond one init() .. shutdown(), because it matters when the process exits.
_exit: dict[str, Any] = {"registered_by": 0, "failed": False, "mpi": False, "last_word": ""}


def init(
    settings: options.Options | None = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
    *,
    comm: Any = None,
) -> None:
    """Start hvd_ext; all ranks of the job call this function. A second call while hvd_ext runs does nothing.

    Under `mpirun` or `horovodrun --mpi` it starts MPI, or uses the MPI that mpi4py or Horovod has started. Under
    `python -m hvd_ext run` it waits for the other workers, without MPI; a worker that is started later is alone until
    it reaches `fit` or `hvd_ext.elastic.run`. Without a launcher the job has one rank and needs no MPI. `init` may be
    called again after `shutdown`.

    Args:
        settings: the options; None to read them from the environment (`hvd_ext.options.SETTINGS`).
        process_sets: process sets to add at once, as `add_process_set` would. Lists of ranks must be equal on all
            ranks; where sets are made from communicators, each rank passes its own. "dynamic" adds none; Horovod
            requires it if sets are to be added later.
        comm: Horovod's argument, but all ranks must take part: None, a list of all ranks, or an mpi4py communicator
            that holds all ranks in MPI's order.

    Raises:
        InvalidError: a launcher that starts no MPI job (`horovodrun --gloo`, elastic), a bad setting, a wrong process
            set, a `comm` without some of the ranks, an MPI that cannot be used, or another process that is this rank
            already: this one is its child, or follows it.
        TopologyError: the topology file is wrong or has another number of ranks; raised on all ranks.
        MismatchError: the ranks have different options, topologies or process sets; raised on all ranks.
        CommunicationError: MPI failed to start, or the processes do not form the job that the launcher started.
        NativeLibraryError: the native library is missing or does not load.
    """
    one_process.refuse_fork("init")
    if is_initialized():
        if process_sets and process_sets != "dynamic":
            raise InvalidError(
                "init: hvd_ext is running already, and process_sets would be ignored; add them with add_process_set()"
            )
        return
    if comm is None and (isinstance(settings, (list, tuple, range)) or rank_lists.is_communicator(settings)):
        settings, comm = None, settings  # Horovod's first argument is comm
    requested = settings
    settings = options.from_environment() if settings is None else settings
    if not isinstance(settings, options.Options):
        raise InvalidError(f"init ({settings!r}): takes hvd_ext.Options or nothing, got {type(settings).__name__}")
    plan = launch.examine(os.environ)
    native.load()  # before this process claims to be the rank
    with contextlib.ExitStack() as failed:
        failed.callback(interrupts.stop)
        interrupts.start()
        session = membership.session()
        if session is not None:
            if settings.gpu_buckets:
                raise InvalidError("gpu_buckets: an elastic job does not know which GPU is a rank's; leave it out")
            one_process.claim(os.environ)
            if session.waits:
                _join(engine.start_local(settings), plan, settings, requested, process_sets, comm)
            else:
                _join_world(session, plan, settings, requested, process_sets, comm)
        else:
            if plan.mpi:
                one_process.claim(os.environ)
                with startup_watch.watch(settings):
                    _exit["mpi"] = True
                    _watch_exit()
                    running = engine.start_mpi(settings)
            else:
                running = engine.start_local(settings)
            _join(running, plan, settings, requested, process_sets, comm)
        failed.pop_all()


def _join_world(session: membership.Session, plan: launch.Launch, settings: options.Options, *others: Any) -> None:
    """Start in the next world of a supervised job; in a later one if a rank is lost meanwhile.

    Raises:
        CommunicationError: `START_LIMIT` worlds have failed one after another.
    """
    if settings.transport == "mpi":
        raise InvalidError('transport="mpi": a job that python -m hvd_ext run has started has no MPI; leave it out')
    for attempt in range(START_LIMIT):
        world, sockets = session.join()
        alone = len(world.peers) == 1
        try:
            running = engine.start_local(settings) if alone else engine.start_mesh(settings, world.rank, sockets)
            _join(running, plan, settings, *others)
        except CommunicationError as error:
            if attempt == START_LIMIT - 1:
                raise
            log.logger.warning("world %d: a rank was lost at its start: %s", world.number, error)
        else:
            return


def _join(
    running: engine.Engine,
    plan: launch.Launch,
    settings: options.Options,
    requested: options.Options | None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None,
    comm: Any,
) -> None:
    """Make the job of a running engine the job of this process; stop the engine if that fails."""
    _exit["failed"] = False
    log.set_rank(running.rank, running.size)
    _watch_exit()
    try:
        launch.check_size(plan, running.size)
        launch.warn_of_unheeded(os.environ, running.rank)
        if requested is not None:
            launch.warn_of_unread(settings, os.environ, running.rank)
        job = bootstrap.joined(running, settings, comm)
        sets.add_all(job, process_sets)
        sets.global_process_set.mpi_comm = comm if rank_lists.is_communicator(comm) else None
        if settings.trace is not None:
            recording.begin(job, settings.trace)
        banner.say(job, banner.job_line(job.hosts, job.engine.inter_host_transport))
        if job.network is not None and job.network.line:
            banner.say(job, f"links: {job.network.line}")
        runtime.set_current(job)
    except BaseException:
        # An error that all ranks share leaves nothing running, so that init() may be called again.
        _exit["failed"] = running.stop()
        sets.forget()
        raise


def shutdown() -> None:
    """Stop hvd_ext on this rank.

    Either all ranks call this function or none does: at the end of a process it is called automatically. It waits a few
    seconds at most. Operations that still wait for another rank fail. Before `init` it does nothing.

    Raises:
        InvalidError: this process was forked from a rank.
    """
    one_process.refuse_fork("shutdown")
    job = runtime.current_or_none()
    if job is None:
        return
    for owner in (job, *job.subsets.values()):
        for local_steps in list(owner.outer_steps):
            local_steps.wait()
    interrupts.stop()
    runtime.set_current(None)
    for ended in (job, *job.subsets.values()):
        ended.running = False
    banner.sum_up(job)
    write_trace = recording.end(job)
    failed = _exit["failed"]
    if failed:  # the other ranks may soon end this process
        write_trace()
    sets.forget()
    _exit["failed"] = job.engine.stop() or failed
    if not failed:
        write_trace()


def rejoin(settings: options.Options) -> None:
    """Leave a world, and join the next one with the options of the first; only for supervised jobs.

    Raises:
        SystemExit: the supervisor has told this worker to end.
    """
    try:
        shutdown()
    except CommunicationError as error:  # of operations that were under way
        log.logger.debug("leaving the world: %s", error)
        shutdown()
    session = membership.session()
    if session is not None:
        session.waits = False
    init(settings)


def is_initialized() -> bool:
    """Return whether hvd_ext runs in this process."""
    return runtime.current_or_none() is not None


def rank() -> int:
    """Return this process's rank, 0 to `size()` - 1."""
    return runtime.current().engine.rank


def size() -> int:
    """Return the number of ranks of the job."""
    return runtime.current().engine.size


def local_rank() -> int:
    """Return this rank's place among the ranks of its host, 0 to `local_size()` - 1."""
    return _place()[0]


def local_size() -> int:
    """Return the number of ranks on this rank's host."""
    return _place()[1]


def cross_rank() -> int:
    """Return this rank's place among the ranks with the same `local_rank()`, of which each host has one at most."""
    return _place()[2]


def cross_size() -> int:
    """Return the number of ranks with the same `local_rank()` as this one."""
    return _place()[3]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    hosts = runtime.current().hosts
    return len({hosts.count(host) for host in set(hosts)}) == 1


def mpi_enabled() -> bool:
    """Return whether this job runs on MPI; without a launcher it does not."""
    runtime.current()
    return bool(_exit["mpi"])


def mpi_built() -> bool:
    """Return whether the package works on MPI; it always does."""
    return True


def mpi_threads_supported() -> bool:
    """Return whether several threads may use MPI beside hvd_ext; they may whenever the job runs on MPI."""
    return mpi_enabled()


def gloo_enabled() -> bool:
    """Return whether this job runs on Gloo; it never does."""
    return False


def gloo_built() -> bool:
    """Return whether the package works on Gloo; it never does."""
    return False


def nccl_built() -> int:
    """Return NCCL's version; always 0, because the package does not use NCCL."""
    return 0


def ddl_built() -> bool:
    """Return whether the package works on DDL; it never does."""
    return False


def ccl_built() -> bool:
    """Return whether the package works on oneCCL; it never does."""
    return False


def cuda_built() -> bool:
    """Return whether the package was built with CUDA; it never is, and GPU tensors are copied through host memory."""
    return False


def rocm_built() -> bool:
    """Return whether the package was built with ROCm; it never is."""
    return False


def place_of(rank: int, hosts: tuple[str, ...]) -> tuple[int, int, int, int]:
    """Return local_rank, local_size, cross_rank and cross_size of a rank, as Horovod defines them."""
    local_rank_of = [hosts[:other].count(host) for other, host in enumerate(hosts)]
    across = [other for other in range(len(hosts)) if local_rank_of[other] == local_rank_of[rank]]
    return local_rank_of[rank], hosts.count(hosts[rank]), across.index(rank), len(across)


def _place() -> tuple[int, int, int, int]:
    job = runtime.current()
    return place_of(job.engine.rank, job.hosts)


def _watch_exit() -> None:
    """Register what happens at exit, once per process: a forked child must not finalise its parent's MPI."""
    if _exit["registered_by"] == os.getpid():
        return
    _exit["registered_by"] = os.getpid()
    atexit.register(_at_exit, os.getpid())
    hook = sys.excepthook

    def noted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _exit["failed"] = True
        unsupported.add_hint(error)
        if log.several():
            _exit["last_word"] = traceback.format_exception_only(kind, error)[0].strip()
        if log.several() and hook is sys.__excepthook__:  # which writes in pieces, between other ranks
            log.write(log.line("".join(traceback.format_exception(kind, error, trace)).rstrip()))
        else:
            hook(kind, error, trace)

    sys.excepthook = noted


def _at_exit(pid: int) -> None:
    if pid != os.getpid():
        return
    job = runtime.current_or_none()
    if _exit["failed"] and _exit["mpi"]:
        # After an uncaught exception the other ranks wait in their next collective, and MPI_Finalize would wait with
        # them forever. So the whole job is ended at once.
        if job is not None:
            recording.end(job)()
    else:
        try:
            shutdown()
        except CommunicationError:
            _exit["failed"] = True
    session = membership.session()
    if session is not None and not _exit["failed"]:
        session.done()
    if _exit["mpi"]:
        # MPI_Abort ends the process before Python flushes its streams.
        sys.stdout.flush()
        sys.stderr.flush()
        if _exit["failed"] and _exit["last_word"]:
            log.write(log.line(f"ended by {_exit['last_word']}"))
        engine.finish_mpi(_exit["failed"])
