"""Norms and the updates of LARS and LAMB as ops, against NumPy; how blocks are divided among ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.engine import gpus
from hvd_ext.planning.models.convolutional import resnet50
from hvd_ext.tensorflow import norms, ops, sharing, updates

LENGTHS = [0, 1, 31, 32, 33, 1000, 65535, 65536, 65537, 3 * 65536 + 5]


@pytest.mark.parametrize("dtype", norms.DTYPES)
def test_a_norm_is_that_of_numpy_and_has_the_same_bits_in_functions(dtype: str) -> None:
    # tests/native/test_lars.cc compares the bits with the definition
    random = np.random.default_rng(3)
    tensors = [tf.cast(random.standard_normal(length), dtype) for length in LENGTHS]
    found = norms.squares(tensors)
    np.testing.assert_allclose(found, [np.sum(one.numpy().astype(np.float64) ** 2) for one in tensors], rtol=1e-13)
    np.testing.assert_array_equal(found, tf.function(norms.squares, autograph=False)(tensors))


def test_tensors_of_several_dtypes_keep_their_order() -> None:
    tensors = [tf.fill([3], tf.cast(value, dtype)) for value, dtype in ((1, "float32"), (2, "half"), (3, "float32"))]
    np.testing.assert_array_equal(norms.squares(tensors), [3, 12, 27])


def test_blocks_in_any_order_add_up_to_the_same_bits() -> None:
    random = np.random.default_rng(4)
    tensors = [tf.constant(random.standard_normal(length), tf.float32) for length in LENGTHS]
    parts, counts = norms.division([LENGTHS], 3)
    assert sum(counts) == sum(map(len, parts))
    sums = np.zeros(sum(counts))
    for part in parts:
        sums[part] = ops.library().hvd_ext_block_squares(tensors, tf.constant(part, tf.int64))
    found = ops.library().hvd_ext_add_blocks(sums, counts=counts)
    np.testing.assert_array_equal(found, norms.squares(tensors))


@pytest.mark.parametrize("ranks", [2, 3, 16, 48, 64])
def test_the_largest_share_of_resnet_50_is_near_the_mean(ranks: int) -> None:
    sizes = [elements for layer in resnet50() for _, elements in layer.tensors] * 2
    parts, counts = norms.division([sizes], ranks)
    assert sorted(block for part in parts for block in part) == list(range(sum(counts)))
    costs = [min(norms.BLOCK, size - begin) for size in sizes for begin in range(0, size, norms.BLOCK)]
    loads = [sum(costs[block] for block in part) for part in parts]
    assert max(loads) <= 1.05 * sum(loads) / ranks


def test_shares_are_of_whole_pieces_and_even() -> None:
    assert sharing.shares([], 3) == [[], [], []]
    assert sharing.shares([5], 3) == [[0], [], []]
    assert sharing.shares([1, 1, 5, 3, 1, 1], 2) == [[2, 4], [0, 1, 3, 5]]
    random = np.random.default_rng(1)
    for ranks in (1, 2, 7):
        costs = random.integers(0, 100, 50).tolist()
        parts = sharing.shares(costs, ranks)
        assert sorted(piece for part in parts for piece in part) == list(range(50))
        loads = [sum(costs[piece] for piece in part) for part in parts]
        assert max(loads) - min(loads) <= max(costs)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_an_update_has_the_bits_of_float32_operations(nesterov: bool, read: bool) -> None:
    random = np.random.default_rng(5)
    make = lambda: [random.standard_normal(length).astype(np.float32) for length in LENGTHS]  # noqa: E731
    weights, velocities, gradients = make(), make(), make()
    scales, decays = np.linspace(0.1, 1, len(LENGTHS), dtype=np.float32), [0.0, 0.25] * (len(LENGTHS) // 2)
    w, v = [tf.Variable(one) for one in weights], [tf.Variable(one) for one in velocities]
    kept = [one.value() for one in w] if read else []  # what was read before keeps its values
    updates.apply_lars(w, v, [tf.constant(one) for one in gradients], scales, 0.5, 0.75, decays, nesterov, ops.HOST)
    for i in range(len(LENGTHS)):
        update = scales[i] * (gradients[i] + np.float32(decays[i]) * weights[i])
        velocity = np.float32(0.5) * velocities[i] + update
        moved = np.float32(0.5) * velocity + update if nesterov else velocity
        np.testing.assert_array_equal(v[i], velocity)
        np.testing.assert_array_equal(w[i], weights[i] - np.float32(0.75) * moved)
    for one, before in zip(kept, weights, strict=False):
        np.testing.assert_array_equal(one, before)


def test_wrong_inputs_of_the_ops_are_refused() -> None:
    def refused(words: str, op: Callable[..., Any], *inputs: Any, **attributes: Any) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            op(*inputs, **attributes)

    def update(velocity: Any, gradient: int = 2, scales: int = 1, decays: int = 1) -> None:
        weights, slots = [tf.Variable([1.0, 2.0])], [tf.Variable(velocity)]
        gradients = [tf.ones([gradient])]
        updates.apply_lars(weights, slots, gradients, [1.0] * scales, 0.5, 1.0, [0.0] * decays, False, ops.HOST)

    library, zeros = ops.library(), np.zeros(2, np.float32)
    signs = np.zeros([64, 32], np.uint32)
    refused(r"blocks \(1\): must be from 0 and below 1", library.hvd_ext_block_squares, [tf.ones([5])], np.array([1]))
    refused(r"squares \(2\): must be one for each block; there are 3", library.hvd_ext_add_blocks, np.zeros(2), [1, 2])
    refused(r"block_signs \(0 words\): must be", library.hvd_ext_sketches, [tf.ones([65536])], signs, signs[:0])
    refused(r"decays \(2\): must be one for each variable", update, zeros, decays=2)
    refused(r"scales \(2\): must be one for each variable", update, zeros, scales=2)
    refused(r"velocity 0 \(double, shape \[2\]\): must be float32", update, np.zeros(2))
    refused(r"weights 0 .* must be .* of its gradient's shape, \[3\]", update, zeros, gradient=3)
    w, g = [tf.Variable([1.0])], [tf.ones([1])]
    lamb = functools.partial(updates.lamb_updates, w, betas=(0.5, 0.5), epsilon=0.1, decays=[0.0], device=ops.HOST)
    refused(r"unbias \(1\): must be two numbers", lamb, (w, w), g, [1.0])
    refused(r"momentum 0 \(float, shape \[2\]\): must", lamb, ([tf.Variable([1.0, 2.0])], w), g, [1.0, 1.0])
    refused(r"rates \(2\): must be one for each variable", updates.subtract, w, g, [1.0, 1.0], ops.HOST)


@pytest.mark.parametrize("read", [False, True])
def test_lamb_has_the_bits_of_float32_operations(read: bool) -> None:
    random = np.random.default_rng(6)
    make = lambda: [random.standard_normal(length).astype(np.float32) for length in LENGTHS]  # noqa: E731
    weights, momentums, velocities, gradients = make(), make(), [one**2 for one in make()], make()
    decays = [0.0, 0.25] * (len(LENGTHS) // 2)
    w, m, v = ([tf.Variable(one) for one in ones] for ones in (weights, momentums, velocities))
    kept = [one.value() for one in (*w, *m, *v)] if read else []  # what was read before keeps its values
    g = [tf.constant(one) for one in gradients]
    unbias, one_less = np.array([1.25, 1.5], np.float32), np.array([0.25, 0.125], np.float32)
    found = updates.lamb_updates(w, (m, v), g, unbias, (0.75, 0.875), 0.5, decays, ops.HOST)
    rates = np.linspace(0.1, 1, len(LENGTHS), dtype=np.float32)
    updates.subtract(w, found, rates, ops.HOST)
    for i, decay in enumerate(np.array(decays, np.float32)):
        momentum = momentums[i] + (gradients[i] - momentums[i]) * one_less[0]
        velocity = velocities[i] + (gradients[i] ** 2 - velocities[i]) * one_less[1]
        update = momentum * unbias[0] / (np.sqrt(velocity * unbias[1]) + np.float32(0.5))
        update = update + decay * weights[i] if decay else update
        np.testing.assert_array_equal(m[i], momentum)
        np.testing.assert_array_equal(v[i], velocity)
        np.testing.assert_array_equal(found[i], update)
        np.testing.assert_array_equal(w[i], weights[i] - rates[i] * update)
    for one, before in zip(kept, (*weights, *momentums, *velocities), strict=False):
        np.testing.assert_array_equal(one, before)


class OnGpu:
    """A variable of a GPU, for what only asks where it is."""

    dtype = "float32"

    def __init__(self, number: int) -> None:
        self.device = f"/job:localhost/replica:0/task:0/device:GPU:{number}"


def test_ops_work_where_the_variables_are_and_not_under_xla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable = tf.Variable([1.0])
    assert norms.device_of([variable]) == ops.HOST
    assert norms.device_of([tf.Variable([1])]) is None
    seen = []

    @tf.function(jit_compile=True)
    def compiled() -> tf.Tensor:
        seen.append(norms.device_of([variable]))
        return variable + 1

    compiled()
    assert seen == [None]
    monkeypatch.setattr(gpus, "LIBRARY", tmp_path / "libhvd_ext_gpu.so")
    first, second = OnGpu(0), OnGpu(1)
    assert norms.device_of([first, first]) is None
    (tmp_path / "libhvd_ext_gpu.so").touch()
    assert norms.device_of([first, first]) == first.device
    assert norms.device_of([first, second]) is None
    assert norms.device_of([first, variable]) is None
    monkeypatch.setattr(norms, "_is_there", lambda: False)
    assert norms.device_of([variable]) is None


def test_what_has_a_kernel_for_gpus_is_placed_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TensorFlow with a GPU is here: that graphs ask for it is all that can be seen."""
    monkeypatch.setattr(gpus, "LIBRARY", tmp_path / "libhvd_ext_gpu.so")
    weights, slots, gradients = [tf.Variable([1.0])], [tf.Variable([1.0])], [tf.ones([1])]
    gpu = OnGpu(0).device

    def placed(there: bool) -> dict[str, str]:
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.device(gpu):
                values, _ = hvd.mstopk(x, 1)
                others, _ = hvd.mstopk(x, 1, mode="random")
            found = updates.lamb_updates(weights, (slots, slots), gradients, [1.0, 1.0], (0.5, 0.5), 0.1, [0.0], gpu)
            updates.subtract(weights, found, [1.0], gpu)
            updates.apply_lars(weights, slots, gradients, [1.0], 0.5, 1.0, [0.0], False, gpu)
            return norms.squares([x], gpu) + tf.cast(tf.reduce_sum(values) + tf.reduce_sum(others), tf.float64)

        if there:
            gpus.LIBRARY.touch()
        graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([5])).graph
        return {op.name: op.device for op in graph.get_operations() if op.type.startswith("HvdExt>")}

    without, with_library = placed(False), placed(True)
    assert [name for name in without if not without[name].endswith("GPU:0")] == ["HvdExt>TopK", "HvdExt>TopK_1"]
    assert [name for name in with_library if not with_library[name].endswith("GPU:0")] == ["HvdExt>TopK_1"]
    assert len(with_library) == 6


@pytest.mark.parametrize("length", [0, 1, 256, 257, 65535, 65536, 65537, 3 * 65536 + 5])
@pytest.mark.parametrize("kind", ["normal", "equal", "of low rank"])
def test_a_sketch_is_linear_and_has_about_the_norm(length: int, kind: str) -> None:
    random = np.random.default_rng(length)
    x, y = random.standard_normal((2, length)).astype(np.float32)
    if kind == "equal":
        x = np.ones(length, np.float32)
    if kind == "of low rank":
        x = np.outer(x, [1.0, 3.0, -2.0, 0.5]).astype(np.float32).reshape(-1)[:length]
    one, other, both = norms.sketches([tf.constant(part) for part in (x, y, x + y)]).numpy()
    np.testing.assert_allclose(one + other, both, rtol=0, atol=1e-3)
    # four times the deviation that is promised; a short one loses nothing
    tolerance = 4 / np.sqrt(2 * norms.SKETCH) if length > norms.SKETCH else 1e-6
    np.testing.assert_allclose(np.linalg.norm(one), np.linalg.norm(x), rtol=tolerance)


@pytest.mark.parametrize("slower", ["alone", "together"])
def test_the_way_that_takes_less_time_is_chosen(slower: str) -> None:
    calls = []

    def way(name: str) -> tf.Tensor:
        def work() -> np.float32:
            calls.append(name)
            time.sleep(0.1 if name == slower else 0.0)
            return np.float32(1)

        return tf.ensure_shape(tf.numpy_function(work, [], tf.float32), [])

    trial = sharing.Trial()

    def work(together: tf.Tensor) -> tf.Tensor:
        return tf.cond(together, lambda: way("together"), lambda: way("alone"))

    step = tf.function(lambda: trial.run([tf.ones([])], work, tf.identity))
    for _ in range(11):
        step()
    assert int(trial.chosen) == (slower == "alone")
    assert calls == [*["alone", "together"] * 5, "together" if slower == "alone" else "alone"]
