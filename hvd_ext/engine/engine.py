"""The only door to the native engine: typed Python over the C functions.

A process runs the engine of its job, and one for each process set that it is in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.engine import native
from hvd_ext.engine.channels import Channels, OpenChannel
from hvd_ext.engine.native import call as _call
from hvd_ext.engine.reports import Statistics
from hvd_ext.options import Options

if TYPE_CHECKING:
    import numpy.typing as npt


class Engine(Channels):
    """A running engine; made by `start_mpi`, `start_local` or `start_set`."""

    def __init__(self, generation: int, rank: int, ranks: Sequence[int]) -> None:
        """Use `start_mpi`, `start_local` or `start_set`."""
        self.generation = generation  # its number in this process, and that of its handles; the ranks' may differ
        self.rank = rank
        self.ranks = tuple(ranks)  # the job's numbers for its ranks 0, 1, ...
        self.size = len(self.ranks)
        self.channels: dict[int, OpenChannel] = {}  # by lane, for the trace; those that are closed too

    def stop(self, together: bool = False) -> bool:
        """Say farewell to the peers, wait a few seconds at most for work under way, and stop the engine's thread.

        Engines of sets of this one's ranks stop before it.

        Args:
            together: all its ranks stop now, and this process goes on without: what it holds of MPI is given back.

        Returns:
            Whether this rank went down alone: work was cut off, or the transport was broken.
        """
        alone = ctypes.c_int32()
        _call("hvd_ext_stop", self.generation, int(together), ctypes.byref(alone))
        return bool(alone.value)

    def add_plan(self, rows: npt.NDArray[np.int64], units: int) -> int:
        """Hand the rows of this rank to the engine, which checks them.

        Args:
            rows: int64 [n, 5], the columns of tf_ops/plan/ir.def; n = 0 is allowed.
            units: into how many equal units a buffer is divided.

        Returns:
            The plan's handle.

        Raises:
            InvalidError: rows that break the language's rules.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, 5)
        handle = ctypes.c_int64()
        pointer = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        _call("hvd_ext_plan_add", self.generation, pointer, len(rows), units, ctypes.byref(handle))
        return handle.value

    def remove_plan(self, plan: int) -> None:
        """Forget a plan.

        Args:
            plan: from `add_plan`.

        Raises:
            InvalidError: a channel uses it, or there is no such plan.
        """
        _call("hvd_ext_plan_remove", plan)

    def exchange(self, name: str, payload: bytes) -> list[bytes]:
        """Send bytes to all ranks and get everybody's; waits for all ranks.

        Args:
            name: the same on all ranks; several exchanges under one name are matched in their order.
            payload: this rank's bytes, of any length.

        Returns:
            The payloads, by rank.

        Raises:
            CommunicationError: a peer is gone, or stays away for longer than `stall_fatal_s`.
        """
        result, data, offsets = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int64)()
        out = [ctypes.byref(pointer) for pointer in (result, data, offsets)]
        _call("hvd_ext_exchange", self.generation, name.encode(), payload, len(payload), *out)
        try:
            base = data.value or 0
            return [
                ctypes.string_at(base + offsets[rank], offsets[rank + 1] - offsets[rank]) for rank in range(self.size)
            ]
        finally:
            native.load().hvd_ext_exchange_free(result)

    def refuse(self, name: str, why: str) -> None:
        """Tell the ranks that make a call which this rank has refused: they get a mismatch instead of waiting.

        Args:
            name: the call's.
            why: the words of this rank's refusal.
        """
        _call("hvd_ext_refuse", self.generation, name.encode(), why.encode())

    def statistics(self) -> Statistics:
        """Count what the engine has done.

        Returns:
            The counters of this rank since the start.
        """
        values = (ctypes.c_int64 * 5)()
        _call("hvd_ext_statistics", self.generation, values)
        return Statistics(*values)


def start_mpi(options: Options) -> Engine:
    """Start the engine on MPI: MPI_Init with threads, or attached to the MPI that somebody has started.

    Args:
        options: the stall times and the window are used.

    Returns:
        The running engine.

    Raises:
        InvalidError: an engine runs already, or MPI was started without thread support or has been finalised.
        CommunicationError: MPI refused.
        NativeLibraryError: the native library cannot be used.
    """
    number, rank, size = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_int32()
    out = [ctypes.byref(value) for value in (number, rank, size)]
    _call("hvd_ext_start_mpi", ctypes.byref(_config(options)), *out)
    return Engine(number.value, rank.value, range(size.value))


def start_local(options: Options) -> Engine:
    """Start the engine for one rank, without MPI.

    Args:
        options: the stall times and the window are used.

    Returns:
        The running engine.

    Raises:
        InvalidError: an engine runs already.
        NativeLibraryError: the native library cannot be used.
    """
    number = ctypes.c_int64()
    _call("hvd_ext_start_local", ctypes.byref(_config(options)), ctypes.byref(number))
    return Engine(number.value, 0, (0,))


def start_set(job: Engine, ranks: Sequence[int], number: int, options: Options) -> Engine:
    """Start an engine of some ranks of the job; these call it together, and start their sets in one order.

    Args:
        job: the job's running engine.
        ranks: of the job, ascending, each once; this rank is one of them.
        number: of the set, the same on its ranks.
        options: the stall times, the window and the use of shared memory.

    Returns:
        The running engine, in which this rank has its place in `ranks` as its number.

    Raises:
        InvalidError: the ranks are not as they must be.
        CommunicationError: MPI refused.
    """
    engine, place = ctypes.c_int64(), ctypes.c_int32()
    given = (native.int32s(ranks), len(ranks), number, ctypes.byref(_config(options)))
    _call("hvd_ext_start_set", job.generation, *given, ctypes.byref(engine), ctypes.byref(place))
    return Engine(engine.value, place.value, ranks)


def finish_mpi(failed: bool, code: int = 1) -> None:
    """At process exit: finalise MPI if we started it, or end the whole job if this rank goes down alone.

    Args:
        failed: this rank goes down while the others go on: `MPI_Abort` instead of `MPI_Finalize`.
        code: the job's exit code then.
    """
    native.load().hvd_ext_finish_mpi(int(failed), code)


def _config(options: Options) -> native.Config:
    return native.Config(options.stall_warn_s, options.stall_fatal_s, options.window, options.shared_memory)
