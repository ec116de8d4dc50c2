"""The GPU in whose memory the buckets of this rank lie (docs/gpu.md, "Buckets on the GPU")."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_ext.engine import libraries
from hvd_ext.errors import NativeLibraryError

LIBRARY = libraries.LIBRARIES / libraries.GPU_LIBRARY
# the launchers' variables with a rank's place among those of its host
PLACES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
    "HOROVOD_LOCAL_RANK",
)


def number(environ: Mapping[str, str]) -> int:
    """Return the number of this rank's GPU among those that the process sees; `pin_gpu` gives it the same one.

    If the launcher has given the rank a single GPU (CUDA_VISIBLE_DEVICES), it is this one. Else it is the one whose
    number is the rank's place on its host; without a launcher it is the first.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) == 1:
        return 0
    return place_on_host(environ) or 0


def place_on_host(environ: Mapping[str, str]) -> int | None:
    """Return this rank's place among those of its host, as the launcher says it; None if it does not."""
    return next((int(environ[name]) for name in PLACES if environ.get(name, "").isdecimal()), None)


def library() -> str:
    """Return the path of the library; `NativeLibraryError` if it was not built."""
    if not LIBRARY.is_file():
        raise NativeLibraryError(
            f"buckets on the GPU: {LIBRARY} is missing: the build found no nvcc that works; install the CUDA toolkit "
            "and build again: python -m hvd_ext build"
        )
    return str(LIBRARY)
