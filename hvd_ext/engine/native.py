"""Finds and loads the native libraries, and has the signatures of the C functions (tf_ops/engine/api.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from hvd_ext.engine import libraries, spec
from hvd_ext.errors import NativeLibraryError, raise_for

LIBRARY = libraries.LIBRARIES / libraries.ENGINE_LIBRARY
OPS = libraries.LIBRARIES / libraries.OPS_LIBRARY

ABI_VERSION = 14  # HVD_EXT_ABI_VERSION of api.h
REBUILD_HINT = "build it with: python -m hvd_ext build"


class TraceRecord(ctypes.Structure):
    """TraceRecord of tf_ops/engine/trace.h."""

    _fields_ = [
        ("begin_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("id", ctypes.c_int64),
        ("plan", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("lane", ctypes.c_int32),
        ("part", ctypes.c_int32),
        ("round", ctypes.c_int32),
        ("name", ctypes.c_char * 64),
    ]


_i32, _i64, _text, _memory = ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
_i32s, _i64s, _memories = ctypes.POINTER(_i32), ctypes.POINTER(_i64), ctypes.POINTER(_memory)
_floats, _doubles = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_double)
# what is called before a step, with the channel and the step's number
AT_STEP = ctypes.CFUNCTYPE(None, _i64, _i64)

# name -> (result, arguments); a result of None is a C void
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "hvd_ext_abi_version": (_i64, []),
    "hvd_ext_plan_version": (_i64, []),
    "hvd_ext_error": (_text, []),
    "hvd_ext_between": (_text, [_i64]),
    "hvd_ext_start_mpi": (ctypes.c_int, [ctypes.POINTER(spec.Config), _i64s, _i32s, _i32s]),
    "hvd_ext_start_local": (ctypes.c_int, [ctypes.POINTER(spec.Config), _i64s]),
    "hvd_ext_start_set": (ctypes.c_int, [_i64, _i32s, _i64, _i32, ctypes.POINTER(spec.Config), _i64s, _i32s]),
    "hvd_ext_stop": (ctypes.c_int, [_i64, _i32, _i32s]),
    "hvd_ext_finish_mpi": (None, [_i32, _i32]),
    "hvd_ext_abort": (None, [_i32]),
    "hvd_ext_plan_add": (ctypes.c_int, [_i64, _i64s, _i64, _i64, _i64s]),
    "hvd_ext_plan_remove": (ctypes.c_int, [_i64]),
    "hvd_ext_channel_open": (ctypes.c_int, [_i64, ctypes.POINTER(spec.Channel), _i64s]),
    "hvd_ext_channel_switch": (ctypes.c_int, [_i64, ctypes.POINTER(spec.Channel)]),
    "hvd_ext_channel_at_step": (ctypes.c_int, [_i64, _i64, AT_STEP]),
    "hvd_ext_channel_times": (ctypes.c_int, [_i64, _i64, _i64, _i64s, _doubles, _doubles, _doubles, _i64s]),
    "hvd_ext_channel_close": (ctypes.c_int, [_i64]),
    "hvd_ext_channel_begin_step": (ctypes.c_int, [_i64]),
    "hvd_ext_channel_begin_topk_step": (ctypes.c_int, [_i64, ctypes.c_double, ctypes.c_float]),
    "hvd_ext_channel_end_step": (ctypes.c_int, [_i64, _i32]),
    "hvd_ext_channel_state": (ctypes.c_int, [_i64, _i64, _i64s]),
    "hvd_ext_channel_state_read": (ctypes.c_int, [_i64, _i64, _i32, _floats]),
    "hvd_ext_channel_state_write": (ctypes.c_int, [_i64, _i64, _i32, _floats]),
    "hvd_ext_channel_topk_statistics": (ctypes.c_int, [_i64, _i64s]),
    "hvd_ext_channel_reduce": (ctypes.c_int, [_i64, _i64, _memories, _memories, _i64s]),
    "hvd_ext_channel_submit": (ctypes.c_int, [_i64, _i64, _memory, _i64, _i64s]),
    "hvd_ext_channel_collect": (ctypes.c_int, [_i64, _i64, _i64, _memories, _i64s]),
    "hvd_ext_channel_give_result": (ctypes.c_int, [_i64, _i64, _memory, _i64]),
    "hvd_ext_channel_skip_step": (ctypes.c_int, [_i64, _i64s]),
    "hvd_ext_channel_flush": (ctypes.c_int, [_i64, _i64]),
    "hvd_ext_channel_leave": (ctypes.c_int, [_i64]),
    "hvd_ext_channel_next_round": (ctypes.c_int, [_i64, _i32s]),
    "hvd_ext_channel_progress": (ctypes.c_int, [_i64, _i64s, _i64s]),
    "hvd_ext_channel_set_quorum": (ctypes.c_int, [_i64, _i64]),
    "hvd_ext_channel_set_flags": (ctypes.c_int, [_i64, _i64]),
    "hvd_ext_channel_rounds": (
        ctypes.c_int,
        [_i64, _i64, _i64, _i64, _i64s, _doubles, _doubles, _doubles, _i64s, _i64s, _doubles, _i64s],
    ),
    "hvd_ext_channel_held_read": (ctypes.c_int, [_i64, _i64, _memory, _i32s]),
    "hvd_ext_channel_held_write": (ctypes.c_int, [_i64, _i64, _memory]),
    "hvd_ext_exchange": (
        ctypes.c_int,
        [_i64, _text, _text, _i64, ctypes.POINTER(_memory), ctypes.POINTER(_memory), ctypes.POINTER(_i64s)],
    ),
    "hvd_ext_exchange_free": (None, [_memory]),
    "hvd_ext_refuse": (ctypes.c_int, [_i64, _text, _text]),
    "hvd_ext_interrupt": (None, []),
    "hvd_ext_raise_after_error": (_i32, []),
    "hvd_ext_statistics": (ctypes.c_int, [_i64, _i64s]),
    "hvd_ext_trace_start": (ctypes.c_int, [_i64]),
    "hvd_ext_trace_stop": (ctypes.c_int, []),
    "hvd_ext_trace_read": (ctypes.c_int, [ctypes.POINTER(TraceRecord), _i64, _i64s, _i64s]),
    "hvd_ext_test_add": (ctypes.c_int, [_i32, _memory, _memory, _i64]),
    "hvd_ext_test_divide": (ctypes.c_int, [_i32, _memory, _i64, _i64]),
    "hvd_ext_test_decode": (ctypes.c_int, [_i64s, _i64, _i64, _i32, _i32]),
    "hvd_ext_test_read_pass": (ctypes.c_int, [_memory, _i64, _i32, ctypes.POINTER(ctypes.c_double)]),
    "hvd_ext_test_algorithm_1": (
        ctypes.c_int,
        [_memory, _i64, _i64, _i32, ctypes.c_uint64, _memory, _memory, _memory, _i64s],
    ),
}


@libraries.once
def load() -> ctypes.CDLL:
    """Load the engine's library and check that it belongs to this package.

    Returns:
        The library with typed functions; calls release the interpreter's lock.

    Raises:
        NativeLibraryError: the library is missing, does not load, or is of another version; the message has the command
            that repairs it.
    """
    from hvd_ext.planning import ir

    library = open_library(LIBRARY, "the native engine")
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NativeLibraryError(
            f"the native engine ({LIBRARY}) is of another version: {error}; {REBUILD_HINT}"
        ) from None
    _check_version("C interface", library.hvd_ext_abi_version(), ABI_VERSION)
    _check_version("plan language", library.hvd_ext_plan_version(), ir.VERSION)
    return library


def call(name: str, *arguments: object) -> None:
    """Call a function of `SIGNATURES` that returns a status; raise the status' class with the engine's message."""
    library = load()
    code = getattr(library, name)(*arguments)
    if code:
        raise_for(code, (library.hvd_ext_error() or b"").decode(errors="replace"))


def int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Convert numbers to an argument of type `const int64_t*`."""
    return (ctypes.c_int64 * len(values))(*values)


def int32s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    """Convert numbers to an argument of type `const int32_t*`."""
    return (ctypes.c_int32 * len(values))(*values)


def open_library(path: Path, what: str) -> ctypes.CDLL:
    """Load a shared library; `NativeLibraryError`, with what to do, if it is missing or does not load."""
    if not path.exists():
        raise NativeLibraryError(
            f"{what} ({path}) is missing: it has not been built for this installation; {REBUILD_HINT}"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"{what} ({path}) does not load: {error}; a library that it was built with has moved or changed; "
            f"{REBUILD_HINT}"
        ) from None


def _check_version(what: str, seen: int, expected: int) -> None:
    if seen != expected:
        raise NativeLibraryError(
            f"the native engine ({LIBRARY}) is of another version: its {what} has version {seen}, "
            f"this package needs {expected}; {REBUILD_HINT}"
        )
