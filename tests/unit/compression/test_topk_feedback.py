"""`hvd_ext.topk_error_feedback` against the reference, on variables and tensors; the reference against a sort."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext
from hvd_ext.errors import InvalidError
from tests.unit.compression import reference


def random(elements: int, seed: int) -> np.ndarray:
    """Draws float32 numbers."""
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_a_variable_is_updated_over_many_steps_and_what_was_read_before_a_step_stays(make):
    residual, expected = make(random(5000, 1)), random(5000, 1)
    for step in range(4):
        gradient = random(5000, 10 + step)
        before = tf.convert_to_tensor(residual)
        values, indices = hvd_ext.topk_error_feedback(residual, gradient, 50 * step)
        np.testing.assert_array_equal(before, expected)
        picked, places, expected, _ = reference.error_feedback(expected, gradient, 50 * step)
        np.testing.assert_array_equal(indices, places)
        np.testing.assert_array_equal(values, picked)
        np.testing.assert_array_equal(np.asarray(residual), expected)


def test_a_tensor_is_left_as_it_is_and_segments_keep_apart():
    residual, gradient = random(300, 1).reshape(3, 100), random(300, 2).reshape(3, 100)
    kept = tf.constant(residual)
    values, indices, left = hvd_ext.topk_error_feedback(
        kept, gradient, [3, 5], segments=[100, 200], index_dtype=tf.int64
    )
    total = (residual + gradient).ravel()
    places = reference.top_k_of_segments(total, [3, 5], [100, 200])
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(values, total[places])
    np.testing.assert_array_equal(kept, residual)
    total[places] = 0
    np.testing.assert_array_equal(left, total.reshape(3, 100))


def test_in_a_function_steps_follow_each_other():
    residual = tf.Variable(np.zeros(64, np.float32))
    gradient = np.arange(64, dtype=np.float32)

    @tf.function
    def two_steps():
        first, _ = hvd_ext.topk_error_feedback(residual, gradient, 1)
        second, _ = hvd_ext.topk_error_feedback(residual, gradient, 1)
        return first, second

    first, second = two_steps()
    assert first.numpy().tolist() == [63]
    assert second.numpy().tolist() == [124]  # twice 62


def of_denormals(multiples: np.ndarray) -> np.ndarray:
    """Gives float32, multiples of the least denormal; made of bits, so that nobody's arithmetic can flush them."""
    return (np.abs(multiples) | (multiples < 0).astype(np.int64) << 31).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("make", [tf.constant, tf.Variable], ids=["tensor", "variable"])
@pytest.mark.parametrize("elements", [3, 5000, 1 << 21], ids=["three", "one thread", "several threads"])
def test_denormals_are_not_lost(elements, make, traced):
    waiting, added = np.random.default_rng(elements).integers(1 - (1 << 23), 1 << 23, [2, elements])
    waiting[0], added[0] = 71362, 0  # 1e-40
    waiting[1], added[1] = 5, -4
    waiting[2], added[2] = 1 - (1 << 23), 1 - (1 << 23)  # the sum is not denormal
    residual = make(of_denormals(waiting))
    step = tf.function(hvd_ext.topk_error_feedback) if traced else hvd_ext.topk_error_feedback
    values, indices, *left = step(residual, tf.constant(of_denormals(added)), elements // 100)
    total = of_denormals(waiting + added)
    places = reference.top_k(total, elements // 100)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(values.numpy().view(np.uint32), total[places].view(np.uint32))
    total[places] = 0
    after = left[0] if left else residual
    np.testing.assert_array_equal(after.numpy().view(np.uint32), total.view(np.uint32))


ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("residual", "gradient", "k", "words"),
    [
        (tf.Variable(ONES), np.zeros(3, np.float32), 1, r"residual \(shape \[2\]\): must have the gradient's"),
        (tf.Variable(ONES), ONES, 3, r"k \(3\): .*segment 0 has 2"),
        (tf.Variable(np.ones(2)), ONES, 1, r"residual \(double\): must be float32"),
        (np.ones(2), ONES, 1, r"topk_error_feedback \(float64\): the dtype must be one of float32"),
        (ONES, np.ones(2), 1, r"topk_error_feedback \(float64\): the dtype must be one of float32"),
    ],
)
def test_what_is_refused(residual, gradient, k, words):
    with pytest.raises(InvalidError, match=words):
        hvd_ext.topk_error_feedback(residual, gradient, k)


def test_it_has_no_gradient():
    gradient = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        values, _, _ = hvd_ext.topk_error_feedback(tf.zeros(2), gradient, 1)
    with pytest.raises(InvalidError, match="differentiate hvd_ext.mstopk"):
        tape.gradient(values, gradient)


def test_the_reference_orders_by_magnitude_and_then_by_index():
    x = np.array([1, -0.0, np.nan, -np.inf, 2, -2, 0, 1e-45], np.float32)
    order = [2, 3, 4, 5, 0, 7, 1, 6]
    for k in range(len(x) + 1):
        assert reference.top_k(x, k).tolist() == sorted(order[:k])


def test_the_reference_masks_the_velocity_and_looks_ahead():
    residual, gradient = np.array([0, 1], np.float32), np.array([4, 1], np.float32)
    velocity = np.array([2, 2], np.float32)
    values, indices, left, moved = reference.error_feedback(residual, gradient, 1, velocity, 0.5)
    assert (values.tolist(), indices.tolist()) == ([5], [0])
    assert (left.tolist(), moved.tolist()) == ([0, 3], [0, 2])
    values, _, left, moved = reference.error_feedback(residual, gradient, 1, velocity, 0.5, True, False)
    assert (values.tolist(), left.tolist(), moved.tolist()) == ([6.5], [0, 3], [5, 2])
