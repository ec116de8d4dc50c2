"""A typed Python face of the native engine's C functions.

A process runs one engine for its job, and one more for each process set that it is in.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_ext.engine import gpus, native, spec
from hvd_ext.engine.channels import OpenChannel
from hvd_ext.engine.native import call as _call
from hvd_ext.engine.partial import PartialChannels
from hvd_ext.errors import InvalidError
from hvd_ext.options import Options
from hvd_ext.topology.tree import MEDIA

if TYPE_CHECKING:
    import numpy.typing as npt

_TRANSPORTS = {"mpi": 0, "auto": 1, "tcp": 2}  # TcpOptions::Use of transport.h


class Statistics(NamedTuple):
    """What the engine has done on this rank since it started."""

    buckets: int
    calls: int
    segments: int
    bytes_sent: int
    bytes_received: int


class Engine(PartialChannels):
    """A running engine; made by `start_mpi`, `start_mesh`, `start_local` or `start_set`."""

    def __init__(self, generation: int, rank: int, ranks: Sequence[int]) -> None:
        """Use `start_mpi`, `start_local` or `start_set`."""
        super().__init__()
        self.generation = generation  # its number in this process, part of its handles; it may differ between ranks
        self.rank = rank
        self.ranks = tuple(ranks)  # the numbers in the job of the engine's ranks 0, 1, ...
        self.size = len(self.ranks)
        self.channels: dict[int, OpenChannel] = {}  # by lane, for the trace; closed channels too
        # why this rank skips collectives for now, which the other ranks have already completed; empty if it does not
        self.passes_over = ""

    def stop(self, together: bool = False) -> bool:
        """Send the shutdown handshake, wait a few seconds at most for work under way, and stop the engine's thread.

        The engines of process sets of this engine's ranks stop first.

        Args:
            together: whether all ranks of this engine stop now while the process goes on, as when a process set is
                removed; the engine's MPI communicator is then freed.

        Returns:
            Whether this rank went down alone: its work was cut off, or the transport was broken.
        """
        alone = ctypes.c_int32()
        _call("hvd_ext_stop", self.generation, int(together), ctypes.byref(alone))
        return bool(alone.value)

    def add_plan(self, rows: npt.NDArray[np.int64], units: int) -> int:
        """Hand this rank's rows, int64 [n, 5] as in tf_ops/plan/ir.def, to the engine; may raise `InvalidError`."""
        rows = np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, 5)
        handle = ctypes.c_int64()
        _call("hvd_ext_plan_add", self.generation, native.pointer(rows), len(rows), units, ctypes.byref(handle))
        return handle.value

    def remove_plan(self, plan: int) -> None:
        """Forget a plan; `InvalidError` if a channel uses the plan, or it does not exist."""
        _call("hvd_ext_plan_remove", plan)

    def exchange(self, name: str, payload: bytes, *, agrees: bool = False) -> list[bytes]:
        """Send bytes to all ranks and receive theirs; waits for all ranks.

        Args:
            name: the exchange's name, the same on all ranks; exchanges with the same name are matched in their order.
            agrees: whether ranks that have joined (`join`) agree with the others; else they make it an error.

        Returns:
            The payloads, by rank; b"" for a rank that has joined.

        Raises:
            InvalidError: a rank has joined, and some rank does not give `agrees`; on all ranks that call it. Or the
                other ranks have already completed the exchange (`passes_over`).
            CommunicationError: a peer is gone, or stays away for longer than `stall_fatal_s`.
        """
        self.check_takes_part(name)
        return self._payloads("hvd_ext_exchange", name.encode(), payload, len(payload), int(agrees))

    def check_takes_part(self, name: str) -> None:
        """Raise `InvalidError` if the other ranks have already completed this rank's collectives: it would hang."""
        if self.passes_over:
            raise InvalidError(f"{name}: {self.passes_over}")

    def join(self, plans: Mapping[int, int], payload: bytes) -> tuple[int, list[bytes]]:
        """Give zeros to the steps and sums of the other ranks until all ranks have joined.

        Args:
            plans: the plans of this rank that calls of the others may use, by their digests.
            payload: for all ranks.

        Returns:
            The rank that has joined last, and the payloads, by rank; the same on all ranks.

        Raises:
            InvalidError: a channel of this rank has partial rounds, or another thread has joined.
            CommunicationError: a peer is gone.
        """
        handles, last = np.array(list(plans.values()), np.int64), ctypes.c_int32()
        digests = np.array(list(plans), np.int64)
        lists = (native.pointer(handles), native.pointer(digests))
        payloads = self._payloads("hvd_ext_join", len(plans), *lists, payload, len(payload), ctypes.byref(last))
        return last.value, payloads

    def _payloads(self, function: str, *arguments: Any) -> list[bytes]:
        """Call a function of the C interface that gives a payload of each rank."""
        result, data, offsets = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.POINTER(ctypes.c_int64)()
        out = [ctypes.byref(pointer) for pointer in (result, data, offsets)]
        _call(function, self.generation, *arguments, *out)
        try:
            base = ctypes.cast(data, ctypes.c_void_p).value or 0
            return [
                ctypes.string_at(base + offsets[rank], offsets[rank + 1] - offsets[rank]) for rank in range(self.size)
            ]
        finally:
            native.load().hvd_ext_exchange_free(result)

    def refuse(self, name: str, why: str) -> None:
        """Announce that this rank refuses a call, so that the ranks that make it get a mismatch instead of waiting."""
        _call("hvd_ext_refuse", self.generation, name.encode(), why.encode())

    @property
    def inter_host_transport(self) -> str:
        """What carries data between hosts: "TCP", "MPI", or "threads" in a job of one rank without MPI."""
        return str(native.load().hvd_ext_between(self.generation).decode())

    def media(self) -> list[str]:
        """Give for each rank what joins its GPU and this rank's, of `topology.tree.MEDIA`; "" for other hosts.

        It is "" for all ranks, too, if buckets lie on the host.
        """
        numbers = (ctypes.c_int32 * self.size)()
        _call("hvd_ext_media", self.generation, self.size, numbers)
        return [("", *MEDIA)[number] for number in numbers]

    def statistics(self) -> Statistics:
        """Return the engine's counters."""
        values = (ctypes.c_int64 * 5)()
        _call("hvd_ext_statistics", self.generation, values)
        return Statistics(*values)


def start_mpi(options: Options) -> Engine:
    """Start the engine on MPI: call MPI_Init with threads, or attach to MPI if it is running already.

    Args:
        options: only the stall times, the window and the options of transports are used.

    Raises:
        InvalidError: an engine runs already, or MPI was started without thread support or has been finalised.
        CommunicationError: an MPI call failed.
        NativeLibraryError: the native library cannot be used.
    """
    number, rank, size = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_int32()
    out = [ctypes.byref(value) for value in (number, rank, size)]
    _call("hvd_ext_start_mpi", ctypes.byref(_config(options)), *out)
    return Engine(number.value, rank.value, range(size.value))


def start_local(options: Options) -> Engine:
    """Start the engine for one rank, without MPI; raises as `start_mpi`."""
    number = ctypes.c_int64()
    _call("hvd_ext_start_local", ctypes.byref(_config(options)), ctypes.byref(number))
    return Engine(number.value, 0, (0,))


def start_mesh(options: Options, rank: int, sockets: Sequence[int]) -> Engine:
    """Start the engine without MPI, on connections that are made; raises as `start_mpi`.

    Args:
        options: as for `start_mpi`.
        rank: this rank.
        sockets: the descriptor of a connection with each rank, and anything for this one; the engine closes them.
    """
    number, descriptors = ctypes.c_int64(), native.int32s(sockets)
    _call("hvd_ext_start_mesh", ctypes.byref(_config(options)), rank, descriptors, len(sockets), ctypes.byref(number))
    return Engine(number.value, rank, range(len(sockets)))


def start_set(job: Engine, ranks: Sequence[int], number: int, options: Options) -> Engine:
    """Start an engine for some ranks of the job; they all call this function, and start their sets in the same order.

    Args:
        ranks: the ranks in the job, ascending, each once; this rank is one of them.

    Returns:
        The running engine, in which this rank's number is its place in `ranks`.

    Raises:
        InvalidError: `ranks` breaks its rule.
        CommunicationError: an MPI call failed.
    """
    engine, place = ctypes.c_int64(), ctypes.c_int32()
    arguments = (native.int32s(ranks), len(ranks), number, ctypes.byref(_config(options)))
    _call("hvd_ext_start_set", job.generation, *arguments, ctypes.byref(engine), ctypes.byref(place))
    return Engine(engine.value, place.value, ranks)


def finish_mpi(failed: bool, code: int = 1) -> None:
    """At exit, finalise MPI if we started it; a rank that goes down alone (failed) ends the job by `MPI_Abort`."""
    native.load().hvd_ext_finish_mpi(int(failed), code)


def interfaces(options: Options) -> str:
    """Return the network interfaces between hosts, as in "eth0,10.0.0.0/24": ours, else Open MPI's; empty for all."""
    variable = "OMPI_MCA_btl_tcp_if_include"
    return options.interfaces or os.environ.get(variable, "")


def _config(options: Options) -> ctypes.Structure:
    return spec.filled(
        spec.Config,
        stall_warn_s=options.stall_warn_s,
        stall_fatal_s=options.stall_fatal_s,
        window=options.window,
        shared_memory=options.shared_memory,
        tcp=_TRANSPORTS[options.transport],
        interfaces=interfaces(options).encode(),
        congestion=options.tcp_congestion.encode(),
        gpu=gpus.number(os.environ) if options.gpu_buckets else 0,
        gpu_library=gpus.library().encode() if options.gpu_buckets else b"",
    )
