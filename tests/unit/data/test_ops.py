"""The ops of the data cache: order, lookup, insert, ranges of files; eager, in functions and in tf.data."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import loading, native
from hvd_ext.data.elements import Elements
from hvd_ext.engine import libraries
from hvd_ext.errors import InvalidError, NativeLibraryError

SAMPLES = 40
STEPS = native.EpochSteps(1, 1, 0, 1, 1, 0, 1, 0, 0, 1)
NOTHING = np.array([], np.int64)


@pytest.fixture
def cache() -> Iterator[int]:
    """A cache in memory, whose claims are old after a fifth of a second."""
    number = ctypes.c_int64()
    options = native.Options(name=b"ops", samples=SAMPLES, memory_bytes=1 << 27, claim_s=0.2)
    native.call("hvd_ext_cache_open", ctypes.byref(options), ctypes.byref(number))
    yield number.value
    native.call("hvd_ext_cache_close", number.value)


def numbers(*values: int) -> tf.Tensor:
    return tf.constant(values, tf.int64)


def images(at: tf.Tensor) -> tf.Tensor:
    """Samples of 12 bytes that show their number: [n, 12]."""
    return tf.cast(at[:, None] * 3 + tf.range(12, dtype=tf.int64), tf.uint8)


def variant() -> tf.Tensor:
    """A tensor that has no bytes: [1, 1]."""
    handle = tf.raw_ops.EmptyTensorList(element_shape=[0], max_num_elements=1, element_dtype=tf.float32)
    return tf.reshape(handle, [1, 1])


IMAGES = {"dtypes": [tf.uint8], "elements": [12]}


def test_the_same_ops_from_a_second_file_are_refused_in_words(monkeypatch, tmp_path):
    native.ops()
    for name in libraries.DATA:
        (tmp_path / name).write_bytes((libraries.LIBRARIES / name).read_bytes())
    monkeypatch.setattr(native, "OPS", tmp_path / libraries.DATA_LIBRARY)
    with pytest.raises(NativeLibraryError, match=r"already, from another file; keep one installation"):
        native.ops.__wrapped__()


def test_ops_that_are_missing_say_how_to_build_them(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "OPS", tmp_path / "absent.so")
    with pytest.raises(NativeLibraryError, match=r"absent\.so\) are missing: .*python -m hvd_ext build"):
        native.ops.__wrapped__()


def test_a_status_of_the_store_becomes_an_exception():
    with pytest.raises(InvalidError, match=r"cache \(987654\): must be the number of an open cache"):
        native.call("hvd_ext_cache_close", 987654)


def test_shapes_are_known_in_graphs():
    @tf.function(input_signature=[tf.TensorSpec([6], tf.int64), tf.TensorSpec([None], tf.int64)])
    def trace(at, some):
        order, seeds = native.epoch_step(at, 0, 6)
        batch, missing, pending = native.lookup(1, at, [tf.uint8, tf.string], [12, 1])
        of_some, _, _ = native.lookup(1, some, [tf.uint8], [12])
        stored, contents = native.insert(1, at, batch), native.read_range("x")
        results = (order, seeds, *batch, missing, pending, *of_some, stored, contents)
        shapes.extend(result.shape.as_list() for result in results)
        return order

    shapes: list[list[int | None]] = []
    trace.get_concrete_function()
    assert shapes == [[6], [6, 2], [6, 12], [6, 1], [None], [None], [None, 12], [], []]


@pytest.mark.parametrize(
    ("steps", "step", "words"),
    [
        ([[0]], 0, "vector|rank 1"),  # one word is of a graph's making, one of its run
        ([1, 2], 0, r"steps \(\[2\]\): must have 14 numbers or more"),
        (STEPS._replace(number=0), 0, r"number \(0\): must be at least 1"),
        (STEPS._replace(samples=0), 0, r"samples \(0\): must be at least 1"),
        (STEPS._replace(parts=0), 0, r"parts \(0\): must be at least 1"),
        (STEPS, [0], r"step \(shape \[1\]\): must be a single number"),
    ],
)
def test_steps_with_wrong_numbers_are_refused_in_words(steps, step, words):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=words):
        native.epoch_step(tf.constant([*steps], tf.int64), tf.constant(step, tf.int64))


def test_strings_that_are_not_there_are_empty_and_no_rows_are_no_rows(cache):
    batch, missing, _ = native.lookup(cache, numbers(1, 2), [tf.string, tf.int32], [2, 1])
    assert batch[0].numpy().tolist() == [[b"", b""]] * 2
    assert batch[1].numpy().tolist() == [[0], [0]]
    assert missing.numpy().tolist() == [0, 1]
    batch, missing, pending = native.lookup(cache, NOTHING, [tf.string, tf.int32], [2, 1])
    assert [one.shape.as_list() for one in (*batch, missing, pending)] == [[0, 2], [0, 1], [0], [0]]
    assert native.insert(cache, NOTHING, [tf.zeros([0, 3])]).numpy() == 0


def test_an_iterator_over_the_ops_can_be_saved(cache, tmp_path):
    data = tf.data.Dataset.range(20).batch(4).map(lambda at: (at, native.lookup(cache, at, **IMAGES)))
    iterator = iter(data)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "place"))
    second, _ = next(iterator), next(iterator)
    tf.train.Checkpoint(iterator=iterator).restore(path)
    assert next(iterator)[0].numpy().tolist() == second[0].numpy().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: native.lookup(c + 1000, numbers(1), **IMAGES), r"cache \(\d+\): must be the number of a cache"),
        (lambda c: native.insert(c + 1000, numbers(1), [images(numbers(1))]), r"cache \(\d+\): must be the number"),
        (lambda c: native.read(c + 1000, numbers(3), **IMAGES, parts=1), "must be the number of a cache that is open"),
        (lambda c: native.lookup(c, numbers(1, SAMPLES), **IMAGES), rf"\({SAMPLES}\)"),
        (lambda c: native.lookup(c, numbers(-1), **IMAGES), r"\(-1\)"),
        (lambda c: native.insert(c, numbers(SAMPLES), [images(numbers(1))]), rf"\({SAMPLES}\)"),
        (lambda c: native.lookup(c, numbers(1), [tf.uint8], [1, 2]), r"elements \(2 numbers\): must be one for each"),
        (lambda c: native.lookup(c, numbers(1), [tf.uint8], [-1]), r"elements \(-1\): must not be negative"),
        (lambda c: native.lookup(c, numbers(1), [tf.variant], [1]), r"tf\.io\.serialize_tensor"),
        (lambda c: native.lookup([c], numbers(1), **IMAGES), r"cache \(shape \[1\]\): must be a single number"),
        (lambda c: native.insert(c, numbers(1, 2), [images(numbers(1))]), r"\(0\) \(shape \[1, 12\]\): must have"),
        (lambda c: native.insert(c, numbers(1), [tf.zeros([1])]), r"component \(0\) \(shape \[1\]\): must have"),
        (lambda c: native.insert(c, numbers(1), [variant()]), r"component \(0\): dtype \(21\): must be of numbers"),
    ],
)
def test_wrong_arguments_are_refused_in_words(cache, call, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        call(cache)
    # and nobody waits for a claim of the call that failed
    _, missing, pending = native.lookup(cache, numbers(1, 2), **IMAGES)
    assert (missing.numpy().tolist(), pending.numpy().tolist()) == ([0, 1], [])


@pytest.mark.parametrize(
    ("dtypes", "elements"),
    [([tf.uint8], [11]), ([tf.uint8], [13]), ([tf.string], [1]), ([tf.uint8, tf.string], [9, 1])],
)
def test_a_record_of_another_form_is_an_error_and_its_lookup_claims_nothing(cache, dtypes, elements):
    native.insert(cache, numbers(1), [images(numbers(60))])
    words = r"sample \(1\): its record has 12 bytes, which are not"
    with pytest.raises(tf.errors.FailedPreconditionError, match=words):
        native.lookup(cache, numbers(1, 2), dtypes, elements)
    _, missing, _ = native.lookup(cache, numbers(2), **IMAGES)
    assert missing.numpy().tolist() == [0]


def test_ranges_of_files_are_read_eager_and_in_tf_data(tmp_path):
    path = tmp_path / "a file"
    content = bytes(range(256)) * 40
    path.write_bytes(content)
    assert native.read_range(str(path)).numpy() == content
    assert native.read_range(str(path), 300, 20).numpy() == content[300:320]
    assert native.read_range(str(path), 10_000, -5).numpy() == content[10_000:]
    assert native.read_range(str(path), len(content)).numpy() == b""
    assert native.read_range(str(path), 5, 0).numpy() == b""
    data = tf.data.Dataset.range(100).map(lambda at: native.read_range(str(path), at * 100, 100), num_parallel_calls=4)
    assert b"".join(data.as_numpy_iterator()) == content[:10_000]


@pytest.mark.parametrize(
    ("name", "offset", "nbytes", "error", "words"),
    [
        ("absent", 0, -1, tf.errors.NotFoundError, r"absent\): does not open: No such file"),
        ("file", 0, 11, tf.errors.DataLossError, "has 10 bytes, and 11 from byte 0 on are asked for"),
        ("file", 8, 3, tf.errors.DataLossError, "has 10 bytes, and 3 from byte 8 on"),
        ("file", 11, -1, tf.errors.DataLossError, "has 10 bytes, and all from byte 11 on"),
        ("file", 2**62, 2**62, tf.errors.DataLossError, "has 10 bytes"),
        ("file", -1, 3, tf.errors.InvalidArgumentError, r"offset \(-1\): must not be negative"),
        ("", 0, -1, tf.errors.InvalidArgumentError, "is a folder"),
        ("file/inside", 0, -1, tf.errors.NotFoundError, "Not a directory"),
        ("fi\0le", 0, -1, tf.errors.InvalidArgumentError, "has a byte 0"),
    ],
)
def test_a_range_that_is_not_there_is_an_error_in_words(tmp_path, name, offset, nbytes, error, words):
    (tmp_path / "file").write_bytes(b"0123456789")
    with pytest.raises(error, match=words):
        native.read_range(f"{tmp_path}/{name}", offset, nbytes)
    with pytest.raises(error, match=words):  # and does not end the data early
        list(tf.data.Dataset.range(2).map(lambda _: native.read_range(f"{tmp_path}/{name}", offset, nbytes)))


def test_memory_of_large_batches_is_used_again_but_never_while_somebody_holds_it(cache):
    count = 50_001  # no other test has batches of this size
    with tf.device("CPU:0"):
        native.insert(cache, numbers(0, 1), [tf.stack([tf.fill([count], tf.cast(one, tf.uint8)) for one in (3, 7)])])

        def batch(number: int) -> tf.Tensor:
            return native.lookup(cache, numbers(number, number), [tf.uint8], [count])[0][0]

        held = batch(0)
        part = tf.reshape(batch(1), [-1])  # shares its memory
        addresses = {batch(index % 2)._numpy().ctypes.data for index in range(20)}
    assert len(addresses) == 1  # each was dropped before the next one
    assert held._numpy().ctypes.data not in addresses
    assert part._numpy().ctypes.data not in addresses
    np.testing.assert_array_equal(held, np.full([2, count], 3))
    np.testing.assert_array_equal(part, np.full([2 * count], 7))


def test_records_made_in_python_are_those_that_the_ops_make(cache: int) -> None:
    forms = (([2], tf.bfloat16), ([], tf.string), ([0], tf.int32), ([3], tf.string), ([], tf.bool))
    spec = tuple(tf.TensorSpec(*form) for form in forms)
    for chosen in (spec, (spec[0], spec[2], spec[4]), (spec[0],)):
        elements = Elements(chosen, "test")
        number = 4
        rows = [
            tf.constant([[b"%d" % (row * column) * row for column in range(count)] for row in range(number)], dtype)
            if dtype == tf.string
            else tf.cast(tf.reshape(tf.range(number * count) % 3, [number, count]), dtype)
            for dtype, count in zip(elements.dtypes, elements.counts, strict=True)
        ]
        records, nbytes = elements.records([row.numpy() for row in rows])
        assert len(records) == nbytes.sum()
        begin = 0
        for place, size in enumerate(nbytes.tolist()):
            sample = place + 4 * len(chosen)  # a number is stored once
            native.call("hvd_ext_cache_insert", cache, sample, records[begin : begin + size], size, None)
            begin += size
        samples = tf.range(number, dtype=tf.int64) + 4 * len(chosen)
        for found in (
            native.lookup(cache, samples, elements.dtypes, elements.counts)[0],
            native.read(cache, samples, elements.dtypes, elements.counts, 1),
        ):
            for given, back in zip(rows, found, strict=True):
                assert np.array_equal(given.numpy(), back.numpy())


def test_a_batch_that_nobody_loads_fails_and_gives_its_claims_back(cache: int) -> None:
    with pytest.raises(tf.errors.OpError, match=rf"cache \({cache}\): (it is closed|no sample loader)"):
        native.read(cache, numbers(3, 5), **IMAGES, parts=1)
    _, missing, pending = native.lookup(cache, numbers(3, 5), **IMAGES)
    assert (missing.numpy().tolist(), pending.numpy().tolist()) == ([0, 1], [])


def test_a_load_that_does_not_answer_is_an_error(cache: int) -> None:
    ignores = native.LOAD(lambda *_: None)
    try:
        native.call("hvd_ext_cache_set_load", ignores)
        with pytest.raises(tf.errors.OpError, match="neither given all samples nor failed"):
            native.read(cache, numbers(1), **IMAGES, parts=1)
    finally:
        native.call("hvd_ext_cache_set_load", loading._listen())
