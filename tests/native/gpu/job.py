"""A rank of a job that trains with buckets in the host's memory and with buckets on the GPU, and compares the weights:
`python -m tests.native.gpu.job LIBRARY [STEPS]`, the library being that of the stand-in for CUDA, or libhvd_ext_gpu.so.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvd_ext as hvd
from hvd_ext.engine import gpus

CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "small buckets": {"bucket_nbytes": 20_000},
    "fp16": {"compression": hvd.Compression.fp16},
    "top-k": {"compression": hvd.TopK(0.05)},
    "4 bits": {"compression": hvd.Quantized(bits=4)},
    "low rank": {"compression": hvd.LowRank(rank=2)},
    "a step late": {"delay": 1},
    "local steps": {"local_steps": hvd.LocalSteps(every=3, overlap=1), "compression": hvd.Quantized(bits=8)},
}


def trained(steps: int, **options: Any) -> np.ndarray:
    """Trains a model and gives its weights."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(80, "relu") for _ in range(3)]
    model = keras.Sequential([keras.layers.Input((32,)), *layers, keras.layers.Dense(8)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **options), "mse")
    x = np.random.default_rng(hvd.rank()).normal(size=(16 * steps, 32)).astype("float32")
    model.fit(x, x[:, :8], batch_size=16, epochs=1, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def called() -> list[Any]:
    """Calls collectives of the job and of a process set."""
    values = np.arange(1001) * (hvd.rank() + 1)
    pair = hvd.add_process_set([0, 1])
    results = [hvd.allreduce(values.astype(dtype), op=hvd.Sum) for dtype in ("float32", "float64", "int64", "float16")]
    results += [hvd.allgather(values[: hvd.rank() + 1]), hvd.broadcast(values, 1)]
    if hvd.rank() < 2:
        results.append(hvd.allreduce(values.astype("float32"), op=hvd.Average, process_set=pair))
    return [np.array(result) for result in results]


def left(library: Path) -> Counter[str] | None:
    """Counts what exists on the GPU that the stand-in is; None for a real GPU."""
    function = getattr(ctypes.CDLL(str(library)), "hvd_ext_stand_in_left", None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    words = function().decode().split()
    return Counter({what.rstrip("s"): int(count) for count, what in zip(words[::2], words[1::2], strict=True)})


def main(library: Path, steps: int) -> None:
    """Runs all cases; a difference ends the job with an error."""
    gpus.LIBRARY = library
    # a plan by measured times, which differ, would add up in another order
    options = hvd.options.from_environment().replace(quiet=True, replan_every=0)
    weights: list[list[np.ndarray]] = []
    for gpu_buckets in (False, True):
        hvd.init(options.replace(gpu_buckets=gpu_buckets))
        weights.append([*called(), *(trained(steps, **case) for case in CASES.values())])
        seen, shares = left(library), hvd.local_size() > 1
        hvd.shutdown()
        after = left(library)
        if seen is None or after is None:
            continue
        assert all(seen[what] > 0 for what in ("block", "range", "stream", "event")) == gpu_buckets, seen
        assert (seen["opening"] > 0) == (gpu_buckets and shares), seen
        assert not after["opening"], after
    names = [*(f"call {number}" for number in range(len(weights[0]) - len(CASES))), *CASES]
    for name, host, gpu in zip(names, *weights, strict=True):
        assert host.dtype == gpu.dtype and host.tobytes() == gpu.tobytes(), f"{name}: the bits differ"
    print("equal bits", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16)
