"""The places of this package's native sources and libraries, and loading them once."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES = PACKAGE / "lib"
ENGINE_LIBRARY = "libhvd_ext_engine.so"
OPS_LIBRARY = "libhvd_ext_ops.so"
CACHE_LIBRARY = "libhvd_ext_cache.so"
DATA_LIBRARY = "libhvd_ext_data.so"
GPU_LIBRARY = "libhvd_ext_gpu.so"  # only where the build found nvcc
DATA = (CACHE_LIBRARY, DATA_LIBRARY)  # these need neither MPI nor the engine
ALL = (ENGINE_LIBRARY, OPS_LIBRARY, *DATA)
RECORD = "build.json"
SUFFIXES = (".txt", ".cmake", ".cc", ".h", ".def", ".map")

Loader = TypeVar("Loader", bound=Callable[[], Any])


def once(load: Loader) -> Loader:
    """Have a function run once in this process, while other threads wait; `functools.cache` alone would run it in each.

    Args:
        load: the function. If it raises, the next call runs it again.

    Returns:
        A function that gives what the first call gave; its `cache_clear` is that of `functools.cache`.
    """
    lock, kept = threading.RLock(), functools.cache(load)

    @functools.cache  # which enters nothing once there is a result
    @functools.wraps(load)
    def loaded() -> Any:
        with lock:
            return kept()

    def cache_clear(clear: Callable[[], None] = loaded.cache_clear) -> None:
        kept.cache_clear()
        clear()

    loaded.cache_clear = cache_clear  # type: ignore[method-assign]
    loaded.__wrapped__ = load
    return loaded  # type: ignore[return-value]


def native_sources(package: Path = PACKAGE) -> Path | None:
    """Find the folder with the native CMakeLists.txt: `tf_ops`, else the copy in an installed package, else None."""
    for folder in (package.parent / "tf_ops", package / "_native"):
        if (folder / "CMakeLists.txt").is_file():
            return folder
    return None


def source_files(folder: Path) -> list[Path]:
    """List the native sources in a folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in SUFFIXES)


def sources_digest(folder: Path) -> str:
    """Return 16 hex digits that change whenever a native source changes."""
    digest = hashlib.sha256()
    for path in source_files(folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_record(libraries: Path = LIBRARIES) -> dict[str, str]:
    """Read the record of the last build (tensorflow, mpi, compiler, sources); empty if there is none."""
    try:
        record = json.loads((libraries / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in record.items()} if isinstance(record, dict) else {}
