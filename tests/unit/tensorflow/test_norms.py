"""Norms and the update of LARS as ops, against NumPy; how blocks are divided among ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.planning.models.convolutional import resnet50
from hvd_ext.tensorflow import norms, ops, sharing

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
    norms.apply_lars(w, v, [tf.constant(one) for one in gradients], scales, 0.5, 0.75, decays, nesterov)
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
        norms.apply_lars(weights, slots, [tf.ones([gradient])], [1.0] * scales, 0.5, 1.0, [0.0] * decays, False)

    library, zeros = ops.library(), np.zeros(2, np.float32)
    signs = np.zeros([64, 32], np.uint32)
    refused(r"blocks \(1\): must be from 0 and below 1", library.hvd_ext_block_squares, [tf.ones([5])], np.array([1]))
    refused(r"squares \(2\): must be one for each block; there are 3", library.hvd_ext_add_blocks, np.zeros(2), [1, 2])
    refused(r"block_signs \(0 words\): must be", library.hvd_ext_sketches, [tf.ones([65536])], signs, signs[:0])
    refused(r"decays \(2\): must be one for each variable", update, zeros, decays=2)
    refused(r"scales \(2\): must be one for each variable", update, zeros, scales=2)
    refused(r"velocity 0 \(double, shape \[2\]\): must be float32", update, np.zeros(2))
    refused(r"weights 0 .* must be .* of its gradient's shape, \[3\]", update, zeros, gradient=3)


def test_variables_of_a_gpu_or_under_xla_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = tf.Variable([1.0])
    assert norms.usable([variable])
    assert not norms.usable([tf.Variable([1])])
    seen = []

    @tf.function(jit_compile=True)
    def compiled() -> tf.Tensor:
        seen.append(norms.usable([variable]))
        return variable + 1

    compiled()
    assert seen == [False]
    monkeypatch.setattr(norms, "_is_there", lambda: False)
    assert not norms.usable([variable])


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
    step = tf.function(lambda: trial.run([tf.ones([])], lambda: way("alone"), lambda: way("together"), tf.identity))
    for _ in range(11):
        step()
    assert int(trial.chosen) == (slower == "alone")
    assert calls == [*["alone", "together"] * 5, "together" if slower == "alone" else "alone"]
