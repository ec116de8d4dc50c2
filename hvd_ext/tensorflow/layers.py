"""What layers of Keras have besides their variables: vocabularies, bin boundaries, constants computed from variables.

A layer with `adapt` may compute with values that no broadcast of variables reaches: `Normalization` computes constants
from its variables once, lookup layers keep a vocabulary in a table, `Discretization` keeps its boundaries in a list.
Keras copies such a state by `save_own_variables` and `save_assets`, and sets it by their counterparts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import CheckpointError, HvdExtError, MismatchError
from hvd_ext.job import consensus, process_sets
from hvd_ext.tensorflow.collectives import objects
from hvd_ext.tensorflow.gradients import kinds

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet

State = dict[str, np.ndarray]
# Name and checksum of each layer.
Checksums = list[tuple[str, int]]

# The parts of a state: variables and files as Keras saves them, the configuration of `build`, and attributes.
_VARIABLE, _FILE, _BUILD, _ATTRIBUTE = "variable/", "file/", "build", "attribute/"
# `Discretization` has these in its configuration, and Keras sets them as an attribute.
_IN_CONFIGURATION = ("bin_boundaries",)
# Parts of a configuration that may differ between ranks: Keras numbers names, ranks may have batches of unequal size,
# and a vocabulary may be the path of a file, whose words are compared instead.
_MAY_DIFFER = ("name", "dtype", "vocabulary", "vocabulary_size", "batch_input_shape", "batch_shape")
_SCALARS = (str, bytes, int, float, type(None))


def is_layer(value: Any) -> bool:
    """Tell whether a value is a layer or a model, of Keras 3 or Keras 2."""
    return isinstance(value, tuple(library.layers.Layer for library in _libraries()))


def walk(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a model holds: its attributes, those of its layers, losses and metrics, and members of containers.

    Yields:
        The model, layer, loss or metric that holds an object, and the object. Each object comes once, in an order that
        depends only on how the model was made.
    """
    holders = tuple(
        kind for library in _libraries() for kind in (library.layers.Layer, library.losses.Loss, library.metrics.Metric)
    )
    seen: set[int] = set()

    def inside(holder: Any, value: Any) -> Iterator[tuple[Any, Any]]:
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple)):
            parts = value.values() if isinstance(value, dict) else value
        else:
            if value is not root:
                yield holder, value
            holder, parts = value, vars(value).values() if isinstance(value, holders) else ()
        for part in list(parts):
            if not isinstance(part, (*_SCALARS, type)) and id(part) not in seen:
                yield from inside(holder, part)

    return inside(root, root)


def weights(model: Any) -> list[Any]:
    """List the variables among a model's weights; lookup layers of Keras 2 have their vocabulary there, too."""
    return [weight for weight in model.weights if hasattr(weight, "assign")]


def stateful(model: Any, local_layers: Sequence[Any] = (), local_keys: Collection[Any] = ()) -> list[Any]:
    """List the layers of a model that have a state besides their variables.

    Args:
        local_layers: layers that are left out, with all that is in them.
        local_keys: keys of variables (`kinds.key`); a layer that has no others is left out.

    Returns:
        The layers that have `adapt`, `finalize_state` or `save_assets`, in the order of `walk`.
    """
    local = {id(layer) for top in local_layers for layer in (top, *(value for _, value in walk(top)))}
    layers = [value for value in (model, *(value for _, value in walk(model))) if is_layer(value)]
    return [
        layer for layer in layers if _has_state(layer) and id(layer) not in local and not _is_local(layer, local_keys)
    ]


def refresh(model: Any) -> None:
    """Have layers compute again what they cache of their variables, after variables were assigned.

    A layer of the user's own takes part by a method `finalize_state`. Functions that a model has traced with other
    constants are traced again.
    """
    layers = stateful(model)
    before = [_constants(layer) for layer in layers]
    for layer in layers:
        _finalize(layer)
    if before != [_constants(layer) for layer in layers]:
        _trace_again(model)


def checksums(layers: Sequence[Any]) -> Checksums:
    """Return a checksum of each layer's vocabulary or files, configuration and constants, with the layer's name."""
    return [(layer.name, zlib.crc32(_described(layer))) for layer in layers]


def refuse(where: str, layers: Sequence[Checksums], ranks: Sequence[int], when: str = "", first: int = 0) -> None:
    """Refuse layers whose state differs between ranks.

    Args:
        when: when the states must be equal, for the message; begins with a space.
        first: the place of the rank that the others are compared with.

    Raises:
        MismatchError: the message names the layer.
    """
    expected = layers[first]
    for rank, present in zip(ranks, layers, strict=True):
        if len(present) != len(expected):
            raise MismatchError(
                f"{where}: all ranks must have the same layers with a vocabulary or constants of their own; rank "
                f"{rank} has {[name for name, _ in present]}, rank {ranks[first]} has {[name for name, _ in expected]}"
            )
        for (_, checksum), (name, expected_checksum) in zip(present, expected, strict=True):
            if checksum != expected_checksum:
                raise MismatchError(
                    f"{where}: layer {name!r} must have the same vocabulary, bin boundaries, constants and "
                    f"configuration on all ranks{when}; those of rank {rank} and rank {ranks[first]} differ; call "
                    "adapt with the same data on all ranks, or on one rank and broadcast the model: "
                    "hvd_ext.callbacks.synchronized(...) among the callbacks of fit, or "
                    "hvd_ext.broadcast_variables(model, root_rank=0); a layer of your own that computes constants from "
                    "its variables does so in a method finalize_state()"
                )


def copy(layer: Any) -> State:
    """Copy a layer's state, also its own variables; `HvdExtError` with its name if its methods fail."""
    with _naming(layer):
        variables: dict[str, Any] = {}
        layer.save_own_variables(variables)
        state = {
            _VARIABLE + key: np.asarray(getattr(value, "numpy", lambda value=value: value)())
            for key, value in variables.items()
        }
        state |= {_FILE + name: np.frombuffer(content, np.uint8) for name, content in _files(layer).items()}
        if layer.built:
            state[_BUILD] = np.frombuffer(json.dumps(layer.get_build_config()).encode(), np.uint8)
        for name in _IN_CONFIGURATION:
            if getattr(layer, name, None) is not None:
                state[_ATTRIBUTE + name] = np.asarray(getattr(layer, name), np.float64)
        return state


def give(layer: Any, state: Mapping[str, np.ndarray]) -> None:
    """Give a layer what `copy` has copied; `HvdExtError` with its name if its methods fail."""

    def parts(prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    with _naming(layer):
        if _BUILD in state and not layer.built:
            layer.build_from_config(json.loads(state[_BUILD].tobytes()))
        if variables := parts(_VARIABLE):
            layer.load_own_variables(variables)
        if files := parts(_FILE):
            with tempfile.TemporaryDirectory(prefix="hvd_ext-") as folder:
                for name, content in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.tobytes())
                layer.load_assets(folder)
        for name, value in parts(_ATTRIBUTE).items():
            setattr(layer, name, value.tolist())
        _finalize(layer)


def collect(model: Any, places: Iterable[int] | None = None) -> State:
    """Copy the states of the layers at places of `stateful`, or of all; names begin with the layers' places."""
    layers = stateful(model)
    chosen = range(len(layers)) if places is None else places
    return {f"{place}/{key}": value for place in chosen for key, value in copy(layers[place]).items()}


def restore(model: Any, saved: Mapping[str, np.ndarray]) -> None:
    """Give layers what `collect` has copied; `CheckpointError`, `HvdExtError` if a layer is missing or refuses."""
    layers = stateful(model)
    before = checksums(layers)
    states: dict[int, State] = {}
    for name, value in saved.items():
        place, _, key = name.partition("/")
        states.setdefault(int(place), {})[key] = value
    for place, state in states.items():
        if place >= len(layers):
            raise CheckpointError(
                f"model {model.name!r}: it has {len(layers)} layers with a vocabulary or constants of their own, but "
                f"the checkpoint has a state of layer {place}; use the same model, or another directory"
            )
        present = copy(layers[place])
        if present.keys() != state.keys() or not all(
            np.array_equal(present[key], value) for key, value in state.items()
        ):
            give(layers[place], state)
    for layer in layers:
        _finalize(layer)
    if checksums(layers) != before:
        _trace_again(model)


def send(
    where: str,
    model: Any,
    root_rank: int,
    process_set: ProcessSet | None = None,
    local_keys: Collection[Any] = (),
) -> None:
    """Give all ranks the state that the layers of a model have on one rank; all ranks call it.

    Args:
        root_rank: the rank whose state all ranks get, counted in the job.

    Raises:
        MismatchError: the ranks have different layers, or a layer does not take the root's state; on all ranks.
        InvalidError: the root is not one of the ranks.
    """
    job = process_sets.member(process_set, where)
    engine, layers = job.engine, stateful(model, local_keys=local_keys)
    root = consensus.place_of_root(engine, root_rank)
    ranks = consensus.exchange(engine, f"{where}: layers", lambda: checksums(layers))
    different = [
        place
        for place, checksum in enumerate(ranks[root])
        if any(of_rank[place : place + 1] != [checksum] for of_rank in ranks)
    ]
    if any(len(of_rank) != len(layers) for of_rank in ranks):
        refuse(where, ranks, engine.ranks, first=root)
    if not different:
        return
    states: list[State] = []

    def copied() -> None:
        if engine.rank == root:
            states.extend(copy(layers[place]) for place in different)

    consensus.exchange(engine, f"{where}: states of layers", copied)
    sent = objects.broadcast_object(states, root_rank, name=f"{where}: states of layers", process_set=process_set)

    def restored() -> Checksums:
        for place, state in zip(different, sent, strict=True):
            if engine.rank != root:
                give(layers[place], state)
        return checksums(layers)

    refuse(where, consensus.exchange(engine, f"{where}: layers have their states", restored), engine.ranks, first=root)
    _trace_again(model)


def _libraries() -> list[ModuleType]:
    """List the Kerases that are loaded."""
    modules = (sys.modules.get(name) for name in ("keras", "tf_keras"))
    return [module for module in modules if hasattr(module, "layers") and hasattr(module, "metrics")]


def _has_state(layer: Any) -> bool:
    base = next(library.layers.Layer for library in _libraries() if isinstance(layer, library.layers.Layer))
    names = ("adapt", "finalize_state", "save_assets")
    return any(getattr(type(layer), name, None) is not getattr(base, name, None) for name in names)


def _is_local(layer: Any, local_keys: Collection[Any]) -> bool:
    keys = {kinds.key(variable) for variable in layer.variables} if layer.built and local_keys else set()
    return bool(keys) and keys.issubset(local_keys)


def _finalize(layer: Any) -> None:
    # without variables there is nothing to compute from: `Discretization` of Keras 3 would lose its boundaries
    if hasattr(layer, "finalize_state") and layer.built and layer.variables:
        layer.finalize_state()


def _trace_again(model: Any) -> None:
    """Drop the functions that a model and the models in it have traced: they have captured constants."""
    for value in (model, *(value for _, value in walk(model))):
        if not hasattr(value, "make_train_function"):
            continue
        value.test_function = value.predict_function = None
        if getattr(value, "train_function", None) is not None:
            value.make_train_function(force=True)


def _described(layer: Any) -> bytes:
    """Describe what a layer computes with besides its variables."""
    try:
        config = layer.get_config()
    except NotImplementedError:  # a class of the user's own
        config = {}
    config = {key: value for key, value in config.items() if key not in _MAY_DIFFER and not isinstance(value, Mapping)}
    config |= {name: getattr(layer, name, None) for name in _IN_CONFIGURATION}
    if hasattr(layer, "get_vocabulary"):
        config["vocabulary"] = layer.get_vocabulary()
    files = {} if hasattr(layer, "get_vocabulary") else _files(layer)
    parts = [json.dumps(config, sort_keys=True, default=_plain).encode()]
    parts += [part for name, content in files.items() for part in (name.encode(), content)]
    return b"\0".join([*parts, *_constants(layer)])


def _plain(value: Any) -> Any:
    """Give what JSON can hold of a value of a configuration: numbers and words, but no objects."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__


def _constants(layer: Any) -> list[bytes]:
    """Copy the tensors among a layer's attributes."""
    tensors = {name: value for name, value in vars(layer).items() if tf.is_tensor(value) and hasattr(value, "numpy")}
    return [
        part
        for name, value in sorted(tensors.items())
        if not hasattr(value, "assign")
        for part in (name.encode(), np.asarray(value.numpy()).tobytes())
    ]


def _files(layer: Any) -> dict[str, bytes]:
    """Give the content of the files into which a layer saves its state, by name."""
    if not hasattr(layer, "save_assets"):
        return {}
    with tempfile.TemporaryDirectory(prefix="hvd_ext-") as folder:
        layer.save_assets(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def _naming(layer: Any) -> Iterator[None]:
    """Name the layer where one of its methods fails."""
    try:
        yield
    except HvdExtError:
        raise
    except Exception as error:  # Keras raises different ones
        raise MismatchError(
            f"layer {layer.name!r}: its vocabulary, bin boundaries or constants cannot be copied to another rank or "
            f"from a checkpoint: {type(error).__name__}: {error}; call adapt with the same data on all ranks"
        ) from error
