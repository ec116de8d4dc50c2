"""Finds and loads the native libraries, and calls their C functions (tf_ops/engine/api.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.engine import libraries, spec
from hvd_ext.errors import NativeLibraryError, raise_for

if TYPE_CHECKING:
    import numpy.typing as npt

LIBRARY = libraries.LIBRARIES / libraries.ENGINE_LIBRARY
OPS = libraries.LIBRARIES / libraries.OPS_LIBRARY

ABI_VERSION = spec.ABI_VERSION
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
        for name, (result, arguments) in spec.SIGNATURES.items():
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
    """Call a function of api.h that returns a status; raise the status' class with the engine's message."""
    code = getattr(load(), name)(*arguments)
    if code:
        _raise(code)


def prepared(name: str, *arguments: Any, owners: object) -> Callable[[], None]:
    """Prepare a call that is repeated; see `call`. Its arguments are converted once, which saves 0.5 us of each call.

    Args:
        name: the function.
        arguments: instances of its C types.
        owners: what owns the memory to which they point; it lives as long as the returned function.
    """
    types = spec.SIGNATURES[name][1]
    converted = [kind.from_param(argument) for kind, argument in zip(types, arguments, strict=True)]
    function = load()[name]  # a new object, which does not convert them again
    function.restype = spec.SIGNATURES[name][0]

    def run(_owners: object = owners) -> None:
        code = function(*converted)
        if code:
            _raise(code)

    return run


def _raise(code: int) -> None:
    raise_for(code, (load().hvd_ext_error() or b"").decode(errors="replace"))


def int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Convert numbers to an argument of type `const int64_t*`."""
    return (ctypes.c_int64 * len(values))(*values)


def int32s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    """Convert numbers to an argument of type `const int32_t*`."""
    return (ctypes.c_int32 * len(values))(*values)


def pointer(array: npt.NDArray[np.generic]) -> Any:
    """Point to the memory of a contiguous array, in its dtype."""
    dtype: Any = array.dtype
    return array.ctypes.data_as(ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype)))


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
