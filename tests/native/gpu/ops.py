"""Runs the ops that have kernels for GPUs on a GPU and on the host, and compares their bits:
`python -m tests.native.gpu.ops [DEVICE]`. Ends with 2 where TensorFlow has no such device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.engine import gpus
from hvd_ext.tensorflow import norms, ops, updates

NO_GPU = 2
LENGTHS = [0, 1, 31, 4097, 65537, 300_001]


def values(dtype: str, length: int, seed: int = 1) -> tf.Tensor:
    return tf.cast(np.random.default_rng(seed).standard_normal(length), dtype)


def selections(dtype: str) -> list[Any]:
    x = values(dtype, 500_001)
    segments = [0, 1, 70_000, 430_000]
    found = [*hvd.mstopk(x, 5000), *hvd.mstopk(x, [0, 1, 7, 4300], segments=segments, index_dtype=tf.int64)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        picked = tf.reduce_sum(tf.cast(hvd.mstopk(x, 9)[0], tf.float32))
    return [*found, tape.gradient(picked, x)]


def squares(device: str, dtype: str) -> list[Any]:
    tensors = [values(dtype, length) for length in LENGTHS]
    with tf.device(ops.HOST):
        wanted = tf.constant([0, 3, 2, 7], tf.int64)
    with tf.device(device):
        blocks = ops.library().hvd_ext_block_squares(tensors, wanted)
    return [norms.squares(tensors, device), blocks]


def update(device: str) -> list[Any]:
    make = lambda seed: [tf.Variable(values("float32", length, seed)) for length in LENGTHS]  # noqa: E731
    weights, momentums, velocities = make(1), make(2), [tf.Variable(tf.square(one)) for one in make(3)]
    gradients, decays = [values("float32", length, 4) for length in LENGTHS], [0.0, 0.01] * 3
    rates = tf.linspace(0.1, 0.2, len(LENGTHS))
    read = [one.value() for one in weights]
    updates.apply_lars(weights, momentums, gradients, rates, tf.constant(0.9), tf.constant(1.0), decays, True, device)
    averages = momentums, velocities
    unbias = tf.constant([1.5, 30.0])
    found = updates.lamb_updates(weights, averages, gradients, unbias, (0.9, 0.999), 1e-7, decays, device)
    updates.subtract(weights, found, rates, device)
    return [*read, *weights, *momentums, *velocities, *found]


def trained(make: Callable[[], Any]) -> list[Any]:
    """Gives weights after steps of an optimizer in a graph."""
    weights = [keras.Variable(np.ones(length, np.float32), name=f"kernel{length}") for length in LENGTHS]
    optimizer = make()
    optimizer.build(weights)

    @tf.function(autograph=False)
    def apply(gradients: list[tf.Tensor]) -> None:
        optimizer.apply(gradients, weights)

    for step in range(5):
        apply([values("float32", length, step) for length in LENGTHS])
    return [*map(tf.convert_to_tensor, weights)]


def main(name: str) -> int:
    devices = [device.name for device in tf.config.list_logical_devices() if name in device.name]
    if not devices or (":GPU:" in devices[0] and not gpus.LIBRARY.is_file()):
        print(f"{name}: TensorFlow has no such device, or the build found no nvcc", file=sys.stderr)
        return NO_GPU
    dtypes = ("float32", "float64", "float16", "bfloat16")
    cases: dict[str, tuple[Callable[[str], list[Any]], float]] = {
        **{f"mstopk of {dtype}": (lambda _, dtype=dtype: selections(dtype), 0) for dtype in dtypes},
        **{f"norms of {dtype}": (lambda device, dtype=dtype: squares(device, dtype), 0) for dtype in dtypes},
        "updates": (update, 0),
        "LARS": (lambda _: trained(lambda: hvd.optimizers.LARS(0.1, weight_decay=0.01)), 0),
        # beta^t is a power, which a GPU rounds otherwise
        "LAMB": (lambda _: trained(lambda: hvd.optimizers.LAMB(0.1, weight_decay=0.01)), 1e-6),
    }
    for case, (run, tolerance) in cases.items():
        results = []
        for device in (ops.HOST, devices[0]):
            with tf.device(device):
                results.append([np.array(one) for one in run(device)])
        for host, other in zip(*results, strict=True):
            np.testing.assert_allclose(other, host, rtol=tolerance, atol=0, err_msg=f"{case} on {devices[0]}")
    print(f'{{"checked": {len(cases)}, "of": {len(cases)}}}')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ":GPU:0"))
