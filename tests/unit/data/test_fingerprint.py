"""The fingerprint of a function: equal in every start, another one whenever its code or what it uses changes."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import fingerprint, stream
from hvd_ext.errors import InvalidError

SPEC = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
FACTOR = 3
SETTINGS = {"sizes": [1, {2}]}
OPTIONS = argparse.Namespace(size=2)

SCRIPT = '''
"""A load with everything that TensorFlow numbers: control flow, inner functions, tables, variables, Python."""

import sys

import numpy as np
import tensorflow as tf

from hvd_ext.data import fingerprint

table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["x", "y", "z"], [1, 2, 3]), -1)
variable = tf.Variable([1.0, 2.0])
constant = tf.constant(np.arange(1000, dtype=np.float32))


def helper(x):
    return x * 3


def slow(x):
    return np.float32(helper(float(x)) + ("a" in {"a", "b", "cc", "ddd"}))


@tf.function
def inner(x):
    return tf.reduce_sum(x) * constant[3]


def load(contents, label):
    image = tf.io.decode_jpeg(contents, channels=3)
    if label > 2:
        image = image + 1
    total = tf.constant(0)
    for index in tf.range(label):
        total += index
    image = tf.map_fn(lambda row: row * 2, tf.image.resize(tf.cast(image, tf.float32), (8, 8)))
    value = tf.numpy_function(slow, [label], tf.float32)
    other = tf.py_function(helper, [label], tf.int32)
    total += table.lookup(tf.constant("x")) + other
    return {"image": image, "total": total, "rest": value + variable[0] + inner(image[0, 0])}


for _ in range(int(sys.argv[1])):
    tf.function(lambda x: x + 1)(tf.zeros(3))
    tf.function(load).get_concrete_function(tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
traced = tf.function(load).get_concrete_function(tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
print(fingerprint.of_function(traced))
'''


def of(function: Callable[..., Any], version: str = "") -> str:
    return fingerprint.of_function(tf.function(function).get_concrete_function(*SPEC), version)


def through(function: Callable[..., Any], how: Callable[..., Any] = tf.numpy_function, version: str = "") -> str:
    """Give the fingerprint of a graph that calls Python code."""
    return of(lambda contents, label: how(function, [label], tf.int32), version)


@pytest.mark.slow
def test_another_start_with_other_hashes_gives_a_script_the_same_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    child = subprocess.run([sys.executable, path, "0"], env=environ, capture_output=True, text=True, timeout=120)
    assert len(child.stdout.strip()) == 64, child.stderr
    # this process has made many graphs, and so have other numbers
    monkeypatch.setattr(sys, "argv", [str(path), "2"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == child.stdout


def resized(size: int = 8, channels: int = 3, method: str = "bilinear") -> Callable[..., Any]:
    def load(contents: tf.Tensor, label: tf.Tensor) -> Any:
        image = tf.io.decode_jpeg(contents, channels=channels)
        return tf.image.resize(tf.cast(image, tf.float32), (size, size), method=method), label

    return load


def branch(more: int) -> Callable[..., Any]:
    return lambda contents, label: tf.cond(label > 2, lambda: label + more, lambda: label)


def loop(times: int) -> Callable[..., Any]:
    return lambda contents, label: tf.while_loop(lambda x: x < times, lambda x: [x + 1], [label])


def test_another_constant_attribute_op_result_branch_or_loop_is_another_function() -> None:
    loads = [resized(), resized(9), resized(channels=1), resized(method="nearest")]
    loads.append(lambda contents, label: resized()(contents, label)[::-1])
    loads.append(lambda contents, label: resized()(contents, label + 1))
    loads += [branch(1), branch(2), loop(3), loop(4)]
    assert len({of(load) for load in loads}) == 10
    assert of(resized()) == of(resized(8, 3, "bilinear"))
    assert of(branch(1)) == of(branch(1))


def test_what_a_function_captures_counts() -> None:
    variable = tf.Variable([1.0, 2.0])
    constant = tf.constant(np.arange(9))
    tables = [
        tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["x", "y"], values), -1)
        for values in ([1, 2], [1, 2], [1, 3])
    ]
    first = of(lambda contents, label: variable[0])
    assert of(lambda contents, label: variable[0]) == first
    variable.assign([1.0, 3.0])
    assert of(lambda contents, label: variable[0]) != first
    assert of(lambda contents, label: constant[0]) != of(lambda contents, label: (constant + 1)[0])
    same, again, other = (of(lambda contents, label, table=table: table.lookup(contents)) for table in tables)
    assert same == again != other


def uses_the_module(x: int) -> int:
    """A function whose meaning depends on what stands around it."""
    return helper(x) * FACTOR + len(SETTINGS) + OPTIONS.size  # type: ignore[no-any-return]


def helper(x: int) -> int:
    return x + 1


def recursive(x: int) -> int:
    """A function that calls itself."""
    return recursive(x - 1) if x else 0


class Decoder:
    """An object that can be called, and has a method that counts its calls."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0

    def __call__(self, x: int) -> int:
        return x + self.size

    def method(self, x: int) -> int:
        self.calls += 1
        return x - self.size


class Cropper(Decoder):
    """A method that uses another one, a static one, a property and a value of its class."""

    MARGIN = 2

    def crop(self, x: int) -> int:
        return self.inner(x) + self.sized(x) + self.MARGIN + self.half

    def inner(self, x: int) -> int:
        return self.crop(x - 1) if x else 0

    @staticmethod
    def sized(x: int) -> int:
        return 2 * x

    @property
    def half(self) -> int:
        return self.size // 2


def adds(number: int) -> Callable[..., Any]:
    return lambda x: np.int32(x + number)


def scaled(factor: int) -> Callable[..., Any]:
    """A decorator with an argument."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(x: int) -> Any:
            return factor * function(x)

        return inner

    return decorate


@pytest.mark.parametrize(
    ("make", "value", "other"),
    [
        (adds, 1, 2),
        (lambda operate: lambda x: np.int32(operate(x)), lambda x: x * 2, lambda x: x - 2),
        (lambda number: functools.partial(np.add, number), 1, 2),
        (Decoder, 1, 2),
        (lambda size: Decoder(size).method, 1, 2),
        (lambda size: Cropper(size).crop, 1, 2),
        (lambda factor: scaled(factor)(helper), 2, 3),
        (lambda function: scaled(2)(function), helper, recursive),
    ],
)
def test_python_code_counts_with_what_it_holds_alone_and_inside_of_a_graph(make: Any, value: Any, other: Any) -> None:
    for digest in (fingerprint.of_python, through):
        assert digest(make(value)) == digest(make(value)) != digest(make(other))


def test_python_code_that_runs_eagerly_inside_counts_too() -> None:
    first, same, other = (through(adds(number), tf.py_function) for number in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    ("owner", "name", "value", "user"),
    [
        (globals(), "FACTOR", 4, uses_the_module),
        (globals(), "helper", recursive, uses_the_module),
        (SETTINGS, "sizes", [1, {3}], uses_the_module),
        (OPTIONS, "size", 3, uses_the_module),
        (Cropper, "inner", lambda self, x: x, Cropper(1).crop),
        (Cropper, "sized", staticmethod(lambda x: 3 * x), Cropper(1).crop),
        (Cropper, "half", property(lambda self: self.size // 3), Cropper(1).crop),
        (Cropper, "MARGIN", 3, Cropper(1).crop),
        (Decoder, "__call__", lambda self, x: x - self.size, Cropper(1)),
    ],
)
def test_what_python_code_uses_of_module_and_class_counts(
    owner: Any, name: str, value: Any, user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint.of_python(user)
    assert fingerprint.of_python(user) == first
    change: Any = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    change(owner, name, value)
    assert fingerprint.of_python(user) != first


def test_with_a_version_the_attributes_of_objects_do_not_count() -> None:
    called = Decoder(1)
    called.method(0)
    for version, different in (("", 3), ("a", 1)):
        objects = (Decoder(1), Decoder(2), called)
        assert len({through(decoder.method, version=version) for decoder in objects}) == different
    assert through(called.method, version="a") != through(called.method, version="b")
    assert fingerprint.of_python(Decoder(1), state=False) == fingerprint.of_python(Decoder(2), state=False)


def test_with_a_version_what_is_not_called_counts() -> None:
    def digest(settings: Any) -> str:
        return through(lambda x: x + settings.size, version="a")

    assert digest(SimpleNamespace(size=1)) == digest(SimpleNamespace(size=1)) != digest(SimpleNamespace(size=2))


def counts(first: int, last: int) -> Iterator[int]:
    yield from range(first, last)


class Reader:
    """An object whose method is a generator."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def samples(self) -> Iterator[int]:
        yield from self.files


@pytest.mark.parametrize(
    ("make", "value", "other"),
    [(lambda first: functools.partial(counts, first, 3), 1, 2), (lambda files: Reader(files).samples, [1], [2])],
)
def test_a_generator_counts_with_its_arguments_and_its_object(make: Any, value: Any, other: Any) -> None:
    def digest(generator: Callable[..., Any]) -> str:
        made = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec((), tf.int32))
        return fingerprint.of_graph(stream._graph_of(made))

    assert digest(make(value)) == digest(make(value)) != digest(make(other))


def test_what_cannot_be_known_needs_a_version() -> None:
    lookup = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)

    def sized(contents: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        return lookup.size() + tf.cast(label, tf.int64)

    with pytest.raises(InvalidError, match="its value cannot be known, so that a change would not be seen; give vers"):
        of(sized)
    assert of(sized, "1") != of(sized, "2")
