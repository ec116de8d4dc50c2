"""The fingerprint of a function: equal in every start, another one whenever its code or what it uses changes."""

from __future__ import annotations

import argparse
import functools
import os
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


@pytest.mark.slow
def test_two_starts_of_one_script_have_one_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, str(path), str(index)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(index)},
        )
        for index in (0, 2)
    ]
    seen = [process.communicate(timeout=120)[0].strip() for process in started]
    assert len(seen[0]) == 64
    assert seen[0] == seen[1]


def resized(size: int = 8, channels: int = 3, method: str = "bilinear") -> Callable[..., Any]:
    def load(contents: tf.Tensor, label: tf.Tensor) -> Any:
        image = tf.io.decode_jpeg(contents, channels=channels)
        return tf.image.resize(tf.cast(image, tf.float32), (size, size), method=method), label

    return load


def test_another_constant_attribute_op_or_result_is_another_function() -> None:
    loads = [resized(), resized(9), resized(channels=1), resized(method="nearest")]
    loads.append(lambda contents, label: resized()(contents, label)[::-1])
    loads.append(lambda contents, label: resized()(contents, label + 1))
    assert len({of(load) for load in loads}) == 6
    assert of(resized()) == of(resized(8, 3, "bilinear"))


def test_branches_and_loops_count() -> None:
    def branch(more: int) -> Callable[..., Any]:
        return lambda contents, label: tf.cond(label > 2, lambda: label + more, lambda: label)

    def loop(times: int) -> Callable[..., Any]:
        return lambda contents, label: tf.while_loop(lambda x: x < times, lambda x: [x + 1], [label])

    assert len({of(one) for one in (branch(1), branch(2), loop(3), loop(4))}) == 4
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


def test_python_functions_inside_count_by_their_code() -> None:
    def through(function: Callable[..., Any], how: Callable[..., Any]) -> str:
        return of(lambda contents, label: how(function, [label], tf.int32))

    def add(number: int) -> Callable[..., Any]:
        return lambda x: np.int32(x + number)

    for how in (tf.numpy_function, tf.py_function):
        assert through(add(1), how) == through(add(1), how)
        assert through(add(1), how) != through(add(2), how)
        assert through(lambda x: np.int32(x * 2), how) != through(lambda x: np.int32(x - 2), how)
        assert through(functools.partial(np.add, 1), how) != through(functools.partial(np.add, 2), how)


def test_values_and_functions_of_the_module_that_python_code_uses_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint.of_python(uses_the_module)
    assert fingerprint.of_python(uses_the_module) == first
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 4)
        assert fingerprint.of_python(uses_the_module) != first
    monkeypatch.setitem(SETTINGS, "sizes", [1, {3}])
    changed = fingerprint.of_python(uses_the_module)
    assert changed != first
    monkeypatch.setitem(globals(), "helper", recursive)
    assert fingerprint.of_python(uses_the_module) != changed


def uses_the_module(x: int) -> int:
    """A function whose meaning depends on what stands around it."""
    return helper(x) * FACTOR + len(SETTINGS)


def helper(x: int) -> int:
    """Part of the function above."""
    return x + 1


def recursive(x: int) -> int:
    """A function that calls itself."""
    return recursive(x - 1) if x else 0


class Decoder:
    """An object that can be called, and has a method."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: int) -> int:
        return x + self.size

    def method(self, x: int) -> int:
        """A method."""
        return x - self.size


def test_methods_and_objects_count_with_their_state() -> None:
    assert fingerprint.of_python(Decoder(1)) == fingerprint.of_python(Decoder(1)) != fingerprint.of_python(Decoder(2))
    assert fingerprint.of_python(Decoder(1).method) != fingerprint.of_python(Decoder(2).method)


class Cropper(Decoder):
    """A method that uses another one, a static one, a property and a value of its class."""

    MARGIN = 2

    def crop(self, x: int) -> int:
        """A method."""
        return self.inner(x) + self.sized(x) + self.MARGIN + self.half

    def inner(self, x: int) -> int:
        """What it uses."""
        return self.crop(x - 1) if x else 0

    @staticmethod
    def sized(x: int) -> int:
        """What it uses."""
        return 2 * x

    @property
    def half(self) -> int:
        """What it uses."""
        return self.size // 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner", lambda self, x: x),
        ("sized", staticmethod(lambda x: 3 * x)),
        ("half", property(lambda self: self.size // 3)),
        ("MARGIN", 3),
    ],
)
def test_what_a_method_uses_of_its_class_counts(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint.of_python(Cropper(1).crop)
    assert fingerprint.of_python(Cropper(1).crop) == first != fingerprint.of_python(Cropper(2).crop)
    monkeypatch.setattr(Cropper, name, value)
    assert fingerprint.of_python(Cropper(1).crop) != first


class Counter(Decoder):
    """A method that counts its calls."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls = 0

    def read(self, x: int) -> int:
        """A method."""
        self.calls += 1
        return x + self.size


def test_with_a_version_the_attributes_of_objects_do_not_count() -> None:
    def digest(counter: Counter, version: str) -> str:
        return of(lambda name, label: tf.numpy_function(counter.read, [label], tf.int32), version)

    called = Counter(1)
    called.read(0)
    assert len({digest(Counter(1), ""), digest(Counter(2), ""), digest(called, "")}) == 3
    assert len({digest(Counter(1), "a"), digest(Counter(2), "a"), digest(called, "a")}) == 1
    assert digest(called, "a") != digest(called, "b")
    assert fingerprint.of_python(Decoder(1), state=False) == fingerprint.of_python(Decoder(2), state=False)


def test_with_a_version_what_is_not_called_counts() -> None:
    def digest(settings: Any) -> str:
        return of(lambda name, label: tf.numpy_function(lambda x: x + settings.size, [label], tf.int32), "a")

    assert digest(SimpleNamespace(size=1)) == digest(SimpleNamespace(size=1)) != digest(SimpleNamespace(size=2))


def test_an_inherited_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint.of_python(Cropper(1))
    monkeypatch.setattr(Decoder, "__call__", lambda self, x: x - self.size)
    assert fingerprint.of_python(Cropper(1)) != first


def scaled(factor: int) -> Callable[..., Any]:
    """A decorator with an argument."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(x: int) -> Any:
            return factor * function(x)

        return inner

    return decorate


def test_methods_and_decorators_count_through_tensorflow() -> None:
    def through(function: Callable[..., Any]) -> str:
        return of(lambda contents, label: tf.numpy_function(function, [label], tf.int32))

    assert through(Decoder(1).method) == through(Decoder(1).method) != through(Decoder(2).method)
    assert through(Decoder(1)) == through(Decoder(1)) != through(Decoder(2))
    assert through(scaled(2)(helper)) == through(scaled(2)(helper)) != through(scaled(3)(helper))
    assert through(scaled(2)(helper)) != through(scaled(2)(recursive))


OPTIONS = argparse.Namespace(size=2)


def test_a_global_namespace_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(x: int) -> int:
        return x * OPTIONS.size  # type: ignore[no-any-return]

    first = fingerprint.of_python(sized)
    monkeypatch.setattr(OPTIONS, "size", 3)
    assert fingerprint.of_python(sized) != first


def counts(first: int, last: int) -> Iterator[int]:
    """A generator."""
    yield from range(first, last)


class Reader:
    """An object whose method is a generator."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def samples(self) -> Iterator[int]:
        """A generator."""
        yield from self.files


def test_a_generator_counts_with_its_arguments_and_its_object() -> None:
    def of_generator(generator: Callable[..., Any]) -> str:
        made = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec((), tf.int32))
        return fingerprint.of_graph(stream._graph_of(made))

    assert of_generator(functools.partial(counts, 1, 3)) == of_generator(functools.partial(counts, 1, 3))
    assert of_generator(functools.partial(counts, 1, 3)) != of_generator(functools.partial(counts, 2, 3))
    assert of_generator(Reader([1]).samples) == of_generator(Reader([1]).samples) != of_generator(Reader([2]).samples)


def test_what_cannot_be_known_needs_a_version() -> None:
    lookup = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)

    def sized(contents: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        return lookup.size() + tf.cast(label, tf.int64)

    with pytest.raises(InvalidError, match="its value cannot be known, so that a change would not be seen; give vers"):
        of(sized)
    assert of(sized, "1") != of(sized, "2")
