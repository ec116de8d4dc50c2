"""`hvd_ext.mstopk` and `hvd_ext.topk_error_feedback` against their NumPy reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext
from hvd_ext.compression import selectors
from hvd_ext.errors import InvalidError
from tests.unit.compression import reference

DTYPES = ("float32", "float64", "float16", "bfloat16")
HEADER = Path(__file__).resolve().parents[3] / "tf_ops" / "kernels" / "topk.h"


def bits(x) -> np.ndarray:
    """Gives the bits of an array, so that NaN and -0 are compared too."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def drawn(draw: np.random.Generator, elements: int, dtype: str) -> np.ndarray:
    """Draws an input of a random kind: smooth, with ties, with zeros, with what is not finite, or of random bits."""
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    kind = draw.integers(5)
    if kind == 4:
        return np.frombuffer(draw.bytes(elements * np.dtype(numpy_dtype).itemsize), numpy_dtype).copy()
    x = draw.standard_normal(elements)
    if kind == 1:
        x = draw.integers(-2, 3, elements).astype(np.float64)
    elif kind == 2:
        x[draw.random(elements) < 0.9] = 0
    elif kind == 3:
        x[draw.random(elements) < 0.2] = np.nan
        x[draw.random(elements) < 0.2] = -np.inf
    return x.astype(numpy_dtype)


def test_the_numbers_of_selectors_are_those_of_the_native_code_and_options_take_what_it_has():
    listed = re.findall(r"^  k(\w+) = (\d+)", HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    native = {name.lower(): int(number) for name, number in listed}
    assert native == {s.name: s.number for s in selectors.SELECTORS if s.number is not None}
    for name in selectors.names(native=True):
        hvd_ext.TopK(selector=name, threshold=1.0 if name == "threshold" else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_is_the_reference_bit_for_bit(dtype):
    draw = np.random.default_rng(3)
    for _ in range(30):
        elements = int(draw.integers(1, 6000))
        x = drawn(draw, elements, dtype)
        k = int(draw.choice([0, 1, elements // 100, elements // 3, elements]))
        index_dtype = (tf.int32, tf.int64)[draw.integers(2)]
        values, indices = hvd_ext.mstopk(x, k, index_dtype=index_dtype)
        expected = reference.top_k(x, k)
        assert indices.dtype == index_dtype
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(bits(values), bits(x[expected]))


@pytest.mark.parametrize(
    ("lengths", "ks"),
    [([64, 0, 1, 5000, 7, 4097, 300], [1, 0, 1, 50, 0, 2000, 300]), ([1_300_001], [1300])],
    ids=["segments", "many lanes"],
)
def test_many_segments_and_an_input_of_many_lanes_have_the_same_answer(lengths, ks):
    x = drawn(np.random.default_rng(5), sum(lengths), "float32").reshape(1, -1)
    values, indices = hvd_ext.mstopk(x, ks, segments=lengths)
    expected = reference.top_k_of_segments(x.ravel(), ks, lengths)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(bits(values), bits(x.ravel()[expected]))


@pytest.mark.parametrize("name", selectors.names())
def test_every_selector_keeps_its_promise(name):
    draw = np.random.default_rng(11)
    selector = selectors.find(name)
    for kind_elements in (1, 70, 3000):
        x = drawn(draw, kind_elements, "float32")
        x[np.isnan(x)] = 1  # tf.math.top_k has an order of its own for NaN
        k = kind_elements // 10
        values, indices = hvd_ext.mstopk(x, k, mode=name, threshold=0.5, seed=3)
        index = np.asarray(indices)
        assert len(index) == k if selector.fills else len(index) <= k
        assert (np.diff(index) > 0).all()
        np.testing.assert_array_equal(bits(values), bits(x[index]))
        if name == "threshold":
            best = reference.top_k(x, k)
            np.testing.assert_array_equal(index, best[np.abs(x[best]) >= 0.5])
        elif selector.unique:
            np.testing.assert_array_equal(np.sort(np.abs(x[index])), np.sort(np.abs(x[reference.top_k(x, k)])))


def test_selectors_that_give_fewer_leave_no_holes_between_segments():
    x = np.array([0.1, 3, 0.2, 0.1, -4, 5], np.float32)
    values, indices = hvd_ext.mstopk(x, [2, 2], segments=[3, 3], mode="threshold", threshold=1.0)
    assert indices.numpy().tolist() == [1, 4, 5]
    assert values.numpy().tolist() == [3, -4, 5]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_the_seed_may_be_a_tensor(dtype: tf.DType, traced: bool):
    x = tf.random.stateless_normal([2000], [1, 2])
    step = tf.Variable(0, dtype=dtype)

    def draw(seed: Any = step) -> tf.Tensor:
        return hvd_ext.mstopk(x, 20, mode="random", seed=seed)[1]

    again = tf.function(draw, autograph=False) if traced else draw
    first = again().numpy().tolist()
    assert again().numpy().tolist() == first == draw(0).numpy().tolist() == draw(np.int32(0)).numpy().tolist()
    step.assign_add(1)
    assert again().numpy().tolist() != first


def test_the_gradient_goes_to_the_picks_also_where_they_are_fewer_than_k():
    x = tf.Variable([[1.0, -5.0, 2.0], [4.0, 0.5, -3.0]])
    with tf.GradientTape(persistent=True) as tape:
        values, _ = hvd_ext.mstopk(x, 3)
        loss = tf.reduce_sum(values * tf.constant([1.0, 10.0, 100.0]))
        few, _ = hvd_ext.mstopk(x, [2, 2], segments=[3, 3], mode="threshold", threshold=3.5)
        loss_of_few = tf.reduce_sum(few**2)
    assert tape.gradient(loss, x).numpy().tolist() == [[0, 1, 0], [10, 0, 100]]
    assert tape.gradient(loss_of_few, x).numpy().tolist() == [[0, -10, 0], [8, 0, 0]]


def test_functions_take_k_and_the_shape_when_they_run_and_know_shapes_while_tracing():
    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)])
    def select(x, k):
        return hvd_ext.mstopk(x, k)

    x = np.array([3, -1, 4, 1, -5], np.float32)
    assert select(x, 2)[1].numpy().tolist() == [2, 4]
    assert select(x[:3], 1)[0].numpy().tolist() == [4]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"k \(6\): .*segment 0 has 5"):
        select(x, 6)
    traced = tf.function(lambda x: hvd_ext.mstopk(x, [3, 4], segments=[10, 10]))
    values, indices = traced.get_concrete_function(tf.TensorSpec([4, 5])).structured_outputs
    assert values.shape == indices.shape == [7]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 6}, r"k \(6\): must be from 0 to the number of elements; segment 0 has 5"),
        ({"k": -1}, r"k \(-1\): must be from 0"),
        ({"k": 1.5}, r"k \(1.5\): must be whole numbers"),
        ({"k": [1, 2]}, r"k \(2 numbers\): must be one number where there are no segments"),
        ({"k": [1], "segments": [2, 3]}, r"k \(1 numbers\): must be one for each segment; there are 2"),
        ({"k": [1, 1], "segments": [2, 2]}, r"segments \(from 0 to 4\): must cover x; it has 5"),
        ({"k": [1, 1], "segments": [-1, 6]}, r"segment 0 \(-1 elements\)"),
        ({"k": 6, "mode": "tf"}, r"k \(\[6\]\): must be from 0 to the number of elements"),
        ({"k": [1, 1], "segments": [2, 2], "mode": "tf"}, "segments add up to x's"),
        ({"k": 1, "mode": "best"}, r"selector \('best'\): must be one of exact, mstopk"),
        ({"k": 1, "index_dtype": tf.int16}, r"index_dtype \(int16\): must be int32 or int64"),
        ({"k": 1, "samplings": -1}, r"samplings \(-1\): must be at least 0"),
        ({"k": 1, "threshold": -1.0}, r"threshold \(-1.0\): must be at least 0"),
        ({"k": 1, "threshold": float("nan")}, r"threshold \(nan\): must be at least 0"),
        ({"k": tf.constant(1.0)}, r"k \(float32\): must be whole numbers"),
        ({"k": 1, "x": np.arange(5)}, r"mstopk \(int64\): the dtype must be one of float32"),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(InvalidError, match=words):
        hvd_ext.mstopk(**{"x": np.zeros(5, np.float32), **arguments})
