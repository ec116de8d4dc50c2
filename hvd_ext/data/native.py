"""Finds and loads the data cache's libraries: the store's C functions (tf_ops/cache/api.h) and the TensorFlow ops.

There are two libraries. The store (libhvd_ext_cache.so) needs nothing, so that commands use it without TensorFlow. The
ops (libhvd_ext_data.so) link the store and TensorFlow's C API. Neither needs MPI or the engine.

The ops are stateless for TensorFlow, since tf.data refuses to save iterators that run stateful ops. So TensorFlow may
leave an op out whose results are not used, merge two with equal inputs and attributes, and compute one early whose
inputs are all constant. In pipelines `numbers` is not constant, and `after` orders what must come one after the other.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_ext.engine import libraries, versions
from hvd_ext.errors import NativeLibraryError, raise_for

if TYPE_CHECKING:
    import tensorflow as tf

LIBRARY = libraries.LIBRARIES / libraries.CACHE_LIBRARY
OPS = libraries.LIBRARIES / libraries.DATA_LIBRARY

ABI_VERSION = 3  # HVD_EXT_CACHE_ABI_VERSION of api.h
REBUILD_HINT = "build it with: python -m hvd_ext build"
NAMES = ("HvdExt>CacheRead", "HvdExt>CacheLookup", "HvdExt>CacheInsert", "HvdExt>EpochStep", "HvdExt>ReadRange")


class Options(ctypes.Structure):
    """HvdExtCacheOptions."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("fingerprint", ctypes.c_uint64 * 2),
        ("samples", ctypes.c_int64),
        ("memory_bytes", ctypes.c_int64),
        ("keep", ctypes.c_char_p),
        ("disk", ctypes.c_char_p),
        ("disk_bytes", ctypes.c_int64),
        ("memory_root", ctypes.c_char_p),
        ("claim_s", ctypes.c_double),
    ]


class EpochSteps(NamedTuple):
    """The steps of one rank in each epoch; the fields of EpochSteps in tf_ops/cache/order.h."""

    number: int
    batch_size: int
    full: int
    samples: int
    parts: int
    rank: int
    size: int
    seed: int
    shuffle: int
    elements: int
    again_epoch: int = -1
    again_step: int = 0
    again_position: int = 0
    again_elements: int = 0


class Address(ctypes.Structure):
    """HvdExtCacheAddress."""

    _fields_ = [
        ("pid", ctypes.c_int64),
        ("fd", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("token", ctypes.c_uint64 * 2),
    ]


class Statistics(ctypes.Structure):
    """HvdExtCacheStatistics."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("memory_hits", "memory_hit_bytes", "disk_hits", "disk_hit_bytes", "misses"),
            *("memory_inserted", "memory_inserted_bytes", "disk_inserted", "disk_inserted_bytes"),
            *("passed_through", "damaged", "taken_over", "waits", "waited_ns"),
            *("memory_ns", "disk_ns"),
            *("memory_open", "disk_open", "memory_records", "disk_records"),
        )
    ]


class About(ctypes.Structure):
    """HvdExtCacheAbout."""

    _fields_ = [
        ("fingerprint", ctypes.c_uint64 * 2),
        ("samples", ctypes.c_int64),
        ("records", ctypes.c_int64),
        ("record_bytes", ctypes.c_int64),
    ]


_i32, _i64, _text, _memory = ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
_i32s, _i64s = ctypes.POINTER(_i32), ctypes.POINTER(_i64)
# HvdExtCacheLoad: cache, numbers, how many are missing and how many pending, parts, the number of the load
LOAD = ctypes.CFUNCTYPE(None, _i64, _i64s, _i64, _i64, _i64, _i64)

# name -> (result, arguments)
SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "hvd_ext_cache_abi_version": (_i64, []),
    "hvd_ext_cache_error": (_text, []),
    "hvd_ext_cache_open": (ctypes.c_int, [ctypes.POINTER(Options), _i64s]),
    "hvd_ext_cache_close": (ctypes.c_int, [_i64]),
    "hvd_ext_cache_memory_address": (ctypes.c_int, [_i64, ctypes.POINTER(Address)]),
    "hvd_ext_cache_share": (ctypes.c_int, [_i64, ctypes.POINTER(Address), _i64, _i64s]),
    "hvd_ext_cache_lookup": (ctypes.c_int, [_i64, _i64s, _i64, _i32, ctypes.POINTER(_memory), _i64s, _i64s]),
    "hvd_ext_cache_insert": (ctypes.c_int, [_i64, _i64, _memory, _i64, _i32s]),
    "hvd_ext_cache_release": (ctypes.c_int, [_i64, _i64s, _i64]),
    "hvd_ext_cache_set_load": (ctypes.c_int, [LOAD]),
    "hvd_ext_cache_give": (ctypes.c_int, [_i64, _i64s, _i64, _memory, _i64s]),
    "hvd_ext_cache_fail": (ctypes.c_int, [_i64, _i32, _text]),
    "hvd_ext_cache_statistics": (ctypes.c_int, [_i64, ctypes.POINTER(Statistics)]),
    "hvd_ext_cache_warning": (_text, [_i64]),
    "hvd_ext_cache_verify": (ctypes.c_int, [_i64, _memory, _i64s]),
    "hvd_ext_cache_about": (ctypes.c_int, [_text, ctypes.POINTER(About)]),
    "hvd_ext_cache_free_memory": (ctypes.c_int, [_text, _i64s]),
    "hvd_ext_cache_crc32c": (ctypes.c_uint32, [ctypes.c_uint32, _memory, _i64]),
}


@libraries.once
def load() -> ctypes.CDLL:
    """Load the store's library and check that it belongs to this package.

    Returns:
        The library with typed functions; calls release the interpreter's lock.

    Raises:
        NativeLibraryError: the library is missing, does not load, or is of another version; the message has the command
            that repairs it.
    """
    if not LIBRARY.exists():
        raise NativeLibraryError(
            f"the data cache's library ({LIBRARY}) is missing: it has not been built for this installation; "
            f"{REBUILD_HINT}"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeLibraryError(
            f"the data cache's library ({LIBRARY}) does not load: {error}; {REBUILD_HINT}"
        ) from None
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NativeLibraryError(
            f"the data cache's library ({LIBRARY}) is of another version: {error}; {REBUILD_HINT}"
        ) from None
    seen = library.hvd_ext_cache_abi_version()
    if seen != ABI_VERSION:
        raise NativeLibraryError(
            f"the data cache's library ({LIBRARY}) is of another version: its C interface has version {seen}, "
            f"this package needs {ABI_VERSION}; {REBUILD_HINT}"
        )
    return library


def call(name: str, *arguments: object) -> None:
    """Call a function of the store's library.

    Args:
        name: a key of `SIGNATURES` whose result is a status.
        *arguments: as its signature says.

    Raises:
        HvdExtError: the call failed; the status decides the class, and the message is the store's.
    """
    library = load()
    code = getattr(library, name)(*arguments)
    if code:
        raise_for(code, (library.hvd_ext_cache_error() or b"").decode(errors="replace"))


def about(path: str | os.PathLike[str]) -> About:
    """Look at what a cache has left, without opening it.

    Args:
        path: the file `index` in a cache's folder, or the file of memory that stays.

    Returns:
        Its fingerprint and numbers.

    Raises:
        InvalidError: it is no such file, or of another version.
    """
    seen = About()
    call("hvd_ext_cache_about", os.fsencode(path), ctypes.byref(seen))
    return seen


@libraries.once
def ops() -> Any:
    """Load the TensorFlow ops, once.

    Returns:
        TensorFlow's module of the ops.

    Raises:
        NativeLibraryError: the library is missing, does not load, or its ops are there already from another file.
    """
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry

    versions.check("tensorflow", tf.__version__)
    load()
    if not OPS.exists():
        raise NativeLibraryError(
            f"the data cache's TensorFlow ops ({OPS}) are missing: they were not built, or without TensorFlow; "
            f"{REBUILD_HINT}"
        )
    there = [name for name in NAMES if op_def_registry.get(name) is not None]
    if there:  # TensorFlow would end the process
        raise NativeLibraryError(
            f"the data cache's TensorFlow ops ({OPS}): this process has {there[0]} already, from another file; "
            "keep one installation of hvd_ext on sys.path"
        )
    try:
        return tf.load_op_library(str(OPS))
    except (tf.errors.OpError, OSError) as error:
        raise NativeLibraryError(
            f"the data cache's TensorFlow ops ({OPS}) do not load into TensorFlow {tf.__version__}: {error}; "
            f"{REBUILD_HINT}"
        ) from None


def epoch_step(steps: tf.Tensor, step: tf.Tensor | int, rows: int | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Say which samples one rank takes in a step of an epoch; tf_ops/cache/order.h has the rule.

    Args:
        steps: the numbers of an `EpochSteps`, int64; others may follow.
        step: counted through all epochs, int64 [].
        rows: the number of samples in each step; None where it varies.

    Returns:
        The samples' numbers, int64 [n]; and their seeds for random transformations, int32 [n, 2], which depend on seed,
        epoch and number alone.

    Raises:
        tf.errors.InvalidArgumentError: a number is out of its range.
    """
    import tensorflow as tf

    numbers, seeds = ops().hvd_ext_epoch_step(steps, step)
    if not tf.executing_eagerly():
        numbers.set_shape([rows])
        seeds.set_shape([rows, 2])
    return numbers, seeds


def lookup(
    cache: tf.Tensor | int,
    numbers: tf.Tensor,
    dtypes: Sequence[tf.DType],
    elements: Sequence[int],
    *,
    wait: bool = False,
    after: tf.Tensor | int = 0,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Look a batch of samples up; tf_ops/cache/store.h has the rules of claims.

    Args:
        cache: the number that `hvd_ext_cache_open` gave.
        numbers: the samples' numbers, int64 [n].
        dtypes: of each component: numbers or strings.
        elements: how many elements of each component one sample has.
        wait: wait for what others are loading, and take their claim over where they do not end; who waits must hold no
            claims, so whatever was missing before must be inserted before.
        after: any int64; a lookup with the result of `insert` comes after it.

    Returns:
        The components, each [n, elements], with zeros and empty strings in rows that are not there; the places in
        `numbers` that are missing, int64 [m], which the caller loads and inserts; and the places that are pending,
        int64 [k], since others are loading them.

    Raises:
        tf.errors.InvalidArgumentError: the cache is not open in this process, a number is not one of its samples, or
            dtypes and elements do not fit.
        tf.errors.FailedPreconditionError: a record has another form than dtypes and elements say.
    """
    import tensorflow as tf

    numbers = tf.convert_to_tensor(numbers, tf.int64)
    batch, missing, pending = ops().hvd_ext_cache_lookup(
        numbers,
        tf.cast(cache, tf.int64),
        tf.cast(after, tf.int64),
        wait=wait,
        dtypes=list(dtypes),
        elements=[int(number) for number in elements],
    )
    if not tf.executing_eagerly():
        missing.set_shape([None])
        pending.set_shape([None])
    return _shaped(batch, numbers, elements), missing, pending


def read(
    cache: tf.Tensor | int,
    numbers: tf.Tensor,
    dtypes: Sequence[tf.DType],
    elements: Sequence[int],
    parts: tf.Tensor | int,
) -> list[tf.Tensor]:
    """Give a batch of samples; those that no place has are loaded (`hvd_ext.data.loading`).

    Args:
        cache: the number that `hvd_ext_cache_open` gave.
        numbers: the samples' numbers, int64 [n].
        dtypes: of each component: numbers or strings.
        elements: how many elements of each component one sample has.
        parts: of the order that the batch is of, int64.

    Returns:
        The components, each [n, elements].

    Raises:
        tf.errors.InvalidArgumentError: as `lookup`; or a sample cannot be loaded.
        tf.errors.FailedPreconditionError: as `lookup`.
    """
    import tensorflow as tf

    numbers = tf.convert_to_tensor(numbers, tf.int64)
    batch = ops().hvd_ext_cache_read(
        numbers,
        tf.cast(cache, tf.int64),
        tf.cast(parts, tf.int64),
        dtypes=list(dtypes),
        elements=[int(number) for number in elements],
    )
    return _shaped(batch, numbers, elements)


def _shaped(batch: Sequence[tf.Tensor], numbers: tf.Tensor, elements: Sequence[int]) -> list[tf.Tensor]:
    """Give the components of a batch with the shapes that are known, which the graph of the op does not know."""
    import tensorflow as tf

    if not tf.executing_eagerly():
        rows = numbers.shape[0] if numbers.shape.rank else None
        for component, number in zip(batch, elements, strict=True):
            component.set_shape([rows, int(number)])
    return list(batch)


def insert(
    cache: tf.Tensor | int,
    numbers: tf.Tensor,
    values: Sequence[tf.Tensor],
    load: tf.Tensor | int = 0,
    place: tf.Tensor | int = 0,
) -> tf.Tensor:
    """Insert samples, and end the claims on them; a sample that finds no room is no error.

    Args:
        cache: the number that `hvd_ext_cache_open` gave.
        numbers: the samples' numbers, int64 [m].
        values: the components, each [m, elements], of numbers or strings.
        load: the number of a load that is under way, which the samples are given to as well; 0: none.
        place: of the first of them in the load's numbers; the others follow it.

    Returns:
        How many of them a place of the cache now has, int64 []; hand it to the `lookup` that must come after this.

    Raises:
        tf.errors.InvalidArgumentError: the cache is not open in this process, a number is not one of its samples, or
            the values or the place do not fit. The claims on all the numbers are given back.
    """
    import tensorflow as tf

    numbers = tf.convert_to_tensor(numbers, tf.int64)
    return ops().hvd_ext_cache_insert(
        numbers, *(tf.cast(value, tf.int64) for value in (cache, load, place)), list(values)
    )


def read_range(
    path: tf.Tensor | str, offset: tf.Tensor | int = 0, nbytes: tf.Tensor | int = -1, *, checked: bool = False
) -> tf.Tensor:
    """Read a range of a file of this machine.

    Args:
        path: string [].
        offset: the first byte, int64 [].
        nbytes: how many bytes, int64 []; a negative number: all to the end.
        checked: compare the bytes with the masked CRC-32C that lies behind them, as in TFRecord files.

    Returns:
        The bytes, string [].

    Raises:
        tf.errors.NotFoundError: there is no such file.
        tf.errors.DataLossError: the file is shorter than that, or the checksum is wrong.
        tf.errors.OpError: the file does not read; the class is that of the system's error.
    """
    import tensorflow as tf

    return ops().hvd_ext_read_range(
        tf.convert_to_tensor(path), tf.cast(offset, tf.int64), tf.cast(nbytes, tf.int64), checked=checked
    )
