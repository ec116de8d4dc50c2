"""Our functions take Horovod's arguments under its names and in its order."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args

import keras
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import options
from hvd_ext.compression import selectors
from hvd_ext.options import faces
from hvd_ext.options.reduction import ReductionOptions
from hvd_ext.planning import registry
from tests.unit.horovod import horovod_api

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# Parameters that stand for any keyword, with the reason.
OPEN = {
    "SyncBatchNormalization(options)": "those of keras.layers.BatchNormalization, which differ with Keras' version",
    "Options.replace(changes)": "the fields of the class",
    "LARS(options)": "those of every optimizer of Keras, which differ with Keras' version",
    "LAMB(options)": "see LARS",
}

# Our functions that take the options of a reduction, and what they are called with.
FACES: dict[str, Callable[[], list[Any]]] = {
    "DistributedOptimizer": lambda: [keras.optimizers.SGD()],
    "PartialDistributedOptimizer": lambda: [keras.optimizers.SGD()],
    "DistributedGradientTape": lambda: [tf.GradientTape()],
    "PartialDistributedGradientTape": lambda: [tf.GradientTape()],
    "load_model": lambda: ["model.keras"],
}
# Name -> Horovod's parameters in order, of functions that take them as Horovod's do; Keras' faces say value for tensor.
HOROVOD = {
    name: [argument for argument in arguments if argument != "value"]
    for name, arguments in horovod_api.frozen()[0].items()
    if inspect.isfunction(getattr(hvd, name, None)) and name not in {*FACES, "init"}
}
# What a tape cannot do, and refuses in words.
NOT_OF_TAPES = {"backward_passes_per_step", "average_aggregated_gradients", "check_every", "local_steps"}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields our public functions and classes, and the public methods of the classes."""
    modules = (hvd, hvd.callbacks, hvd.optimizers, hvd.state, hvd.keras)
    for module in modules:
        for name in dir(module):
            value = getattr(module, name)
            if not getattr(value, "__module__", "").startswith("hvd_ext") or not callable(value):
                continue
            if isinstance(value, type) and issubclass(value, hvd.Compression | Exception):
                continue  # an enumeration or an error: its call is Python's
            yield name, value
            for method, function in vars(value).items() if isinstance(value, type) else ():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def parameters(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", HOROVOD)
def test_ours_has_horovods_parameters_in_its_order(name: str) -> None:
    ours = parameters(getattr(hvd, name))
    positional = [key for key, one in ours.items() if one.kind in POSITIONAL]
    expected = HOROVOD[name]
    assert positional[: len(expected)] == expected
    for key in list(ours)[len(expected) :]:
        assert ours[key].default is not inspect.Parameter.empty


def test_every_parameter_of_a_public_name_has_a_type_and_a_name() -> None:
    untyped, unnamed = [], set()
    for name, function in public():
        signature = inspect.signature(function)
        for key, one in signature.parameters.items():
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                unnamed.add(f"{name}({key})")
            if one.annotation is one.empty and key != "self":
                untyped.append(f"{name}({key})")
        if signature.return_annotation is signature.empty and not inspect.isclass(function):
            untyped.append(f"{name} -> ")
    assert untyped == []
    assert unnamed == set(OPEN)


def test_the_names_that_an_editor_offers_are_those_that_there_are() -> None:
    assert sorted(get_args(options.Algorithm)) == sorted(("auto", *registry.names()))
    assert sorted(get_args(options.SparseAlgorithm)) == sorted(registry.sparse_names())
    assert get_args(selectors.Native) == selectors.names(native=True)
    assert get_args(selectors.Mode) == selectors.names(native=False)


@pytest.mark.parametrize("face", FACES)
def test_every_option_of_a_reduction_is_a_keyword_of_its_own_and_arrives(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positional, function = FACES[face], getattr(hvd, face)
    wanted = {field.name: field for field in dataclasses.fields(ReductionOptions)}
    ours = parameters(function)
    lacking = NOT_OF_TAPES if "Tape" in face else set()
    for name, field in wanted.items():
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default == field.default, name
        assert name in lacking or ours[name].annotation == field.type, name
    for name in ("device_dense", "device_sparse", "num_groups"):
        assert name in ours

    class Arrived(Exception):
        pass

    def record(**given: object) -> None:
        raise Arrived(given)

    monkeypatch.setattr(faces, "GradientOptions", record)
    values = {name: object() for name in wanted if name not in lacking}
    defaults = {name: wanted[name].default for name in lacking}
    with pytest.raises(Arrived) as caught:
        function(*positional(), **values, device_dense="/gpu:0", device_sparse="/gpu:0")
    assert caught.value.args[0] == values | defaults
    with pytest.warns(DeprecationWarning, match="num_groups") as seen, pytest.raises(Arrived) as caught:
        function(*positional(), num_groups=3)
    assert caught.value.args[0]["groups"] == 3
    assert __file__ in {one.filename for one in seen}
    with pytest.raises(TypeError, match=rf"{face}\(\) got an unexpected keyword argument 'compresion'"):
        function(*positional(), compresion=None)


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod: see docs/migration.md")
def test_no_more_parameters_are_needed_than_in_the_installed_horovod() -> None:
    import horovod.tensorflow as horovod

    for name in HOROVOD:
        found, ours = parameters(getattr(horovod, name)), parameters(getattr(hvd, name))
        needed = {key for key, one in found.items() if one.default is inspect.Parameter.empty}
        assert {key for key, one in ours.items() if one.default is inspect.Parameter.empty} <= needed, name
