"""Times the GPU kernels beside torch.topk and a copy of x in device memory, and compares the answers.

    python tests/native/gpu/compare_torch.py [--library PATH] [--elements N ...] [--density D ...]

Prints one line of JSON per size. Ends with 2 where torch, a GPU or the library is missing, with 1 where answers differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).resolve().parents[3] / "hvd_ext" / "lib" / "libhvd_ext_gpu.so"
REPEATS = 20
WARM_UP = 3


class Segment(ctypes.Structure):
    """HvdExtTopKSegment of topk_gpu.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("begin", "elements", "k")]


def load(path: Path) -> ctypes.CDLL:
    """Loads the library and declares its functions.

    Args:
        path: libhvd_ext_gpu.so.

    Returns:
        The library.
    """
    library = ctypes.CDLL(str(path))
    segments = ctypes.POINTER(Segment)
    library.hvd_ext_topk_gpu_workspace.argtypes = [ctypes.c_int32, segments, ctypes.c_int64]
    library.hvd_ext_topk_gpu_workspace.restype = ctypes.c_int64
    pointer = ctypes.c_void_p
    library.hvd_ext_topk_gpu.argtypes = [
        *(ctypes.c_int32, pointer, segments, ctypes.c_int64, pointer, ctypes.c_int32),
        *(pointer, pointer, pointer, ctypes.c_int64, pointer),
    ]
    library.hvd_ext_topk_gpu_error.restype = ctypes.c_char_p
    return library


def milliseconds(torch: Any, body: Any) -> list[float]:
    """Gives the times of calls, each between two events of the current stream."""
    times = []
    for repeat in range(WARM_UP + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            times.append(begin.elapsed_time(end))
    return times


def compare(torch: Any, library: ctypes.CDLL, elements: int, k: int) -> dict[str, Any]:
    """Selects from Gaussian numbers with both.

    Args:
        torch: the module.
        library: from `load`.
        elements: of x, float32.
        k: how many to select.

    Returns:
        Times in ms, and whether the magnitudes that were selected are the same (of tied elements torch takes any).
    """
    x = torch.randn(elements, device="cuda", generator=torch.Generator("cuda").manual_seed(elements))
    segment = Segment(0, elements, k)
    nbytes = library.hvd_ext_topk_gpu_workspace(0, ctypes.byref(segment), 1)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    indices = torch.empty(k, dtype=torch.int32, device="cuda")
    values = torch.empty(k, device="cuda")
    other = torch.empty_like(x)
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> None:
        code = library.hvd_ext_topk_gpu(
            *(0, x.data_ptr(), ctypes.byref(segment), 1, indices.data_ptr(), 0, values.data_ptr(), None),
            *(workspace.data_ptr(), nbytes, stream),
        )
        if code:
            raise RuntimeError(library.hvd_ext_topk_gpu_error().decode())

    row: dict[str, Any] = {"elements": elements, "k": k}
    called = {"topk": ours, "copy": lambda: other.copy_(x), "torch": lambda: torch.topk(x.abs(), k, sorted=False)}
    for name, body in called.items():
        times = milliseconds(torch, body)
        row.update({f"{name}_ms": statistics.median(times), f"{name}_samples_ms": times})
    expected = torch.topk(x.abs(), k).values
    same_values = torch.equal(values.abs().sort(descending=True).values, expected)
    ascending = bool((indices[1:] > indices[:-1]).all())
    row["same"] = same_values and ascending and torch.equal(x[indices.long()], values)
    return row


def main() -> int:
    """Runs the comparison; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 20, 25_000_000, 110_000_000])
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01])
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("torch (not installed): the comparison needs a build for CUDA", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("GPU (none): torch must see one, it does not; nothing was compared", file=sys.stderr)
        return 2
    if not arguments.library.is_file():
        print(f"library ({arguments.library}): must be there; build it where nvcc is found", file=sys.stderr)
        return 2
    library = load(arguments.library)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    same = True
    for elements in arguments.elements:
        for density in arguments.density:
            row = compare(torch, library, elements, max(1, int(density * elements)))
            print(json.dumps(row), flush=True)
            same = same and row["same"]
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
