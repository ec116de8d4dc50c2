"""The places of this package's native sources and libraries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES = PACKAGE / "lib"
ENGINE_LIBRARY = "libhvd_ext_engine.so"
OPS_LIBRARY = "libhvd_ext_ops.so"
CACHE_LIBRARY = "libhvd_ext_cache.so"
DATA_LIBRARY = "libhvd_ext_data.so"
DATA = (CACHE_LIBRARY, DATA_LIBRARY)  # these need neither MPI nor the engine
ALL = (ENGINE_LIBRARY, OPS_LIBRARY, *DATA)
RECORD = "build.json"
SUFFIXES = (".txt", ".cmake", ".cc", ".h", ".def", ".map")


def native_sources(package: Path = PACKAGE) -> Path | None:
    """Find the folder with the native CMakeLists.txt.

    Args:
        package: the folder of the Python package.

    Returns:
        `tf_ops` of the source tree, or the copy in an installed package; None if there is neither.
    """
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
