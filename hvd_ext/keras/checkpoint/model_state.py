"""What a checkpoint has of a model: its variables, in one order on all ranks, and the states of random generators."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvd_ext.errors import CheckpointError, InvalidError
from hvd_ext.keras.optimizers.global_weights import local_weights
from hvd_ext.keras.optimizers.models import optimizers
from hvd_ext.tensorflow.collectives import single
from hvd_ext.tensorflow.collectives.objects import broadcast_object
from hvd_ext.tensorflow.collectives.variables import broadcast_variables

try:  # the generator of `keras.random` where no seed is given; Keras has no public name for it
    from keras.src.backend.common import global_state as _global_state
    from keras.src.random import seed_generator as _seed_generator
except ImportError:
    _global_state = _seed_generator = None


def ready(model: keras.Model) -> None:
    """Make the optimizers' variables; `InvalidError` for a model of tf_keras, or if only the user can make some."""
    if not isinstance(model, keras.Model):
        raise InvalidError(
            f"model {model.name!r}: Checkpoint needs a model of Keras 3, and this one is of tf_keras, whose fit cannot "
            "begin in a later epoch; save with the ModelCheckpoint of tf_keras on rank 0, and resume with "
            "hvd_ext.load_model(file, root_rank=0) and fit(..., initial_epoch=...)"
        )
    if not model.built:
        raise InvalidError(
            f"model {model.name!r}: its variables do not exist yet; give it an Input, or call it on a batch before fit"
        )
    for optimizer in optimizers(model):
        if not optimizer.built and optimizer is getattr(model, "optimizer", None):
            optimizer.build(model.trainable_variables)
        elif not optimizer.built:
            raise InvalidError(
                f"model {model.name!r}, optimizer {optimizer.name!r}: its variables do not exist yet; call its "
                "build(variables) before fit, with the variables that it trains"
            )


def variables(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """List the variables of a model and of its optimizers, in an order that depends only on how the model is made.

    Returns:
        The variables that the model's file has (of weights and optimizers), and those that it lacks (states of seed
        generators).
    """
    written: dict[int, keras.Variable] = {}
    for variable in (
        *model.weights,
        *(variable for optimizer in optimizers(model) for variable in optimizer.variables),
    ):
        written.setdefault(id(variable), variable)
    return list(written.values()), [variable for variable in model.variables if id(variable) not in written]


def described(listed: Sequence[keras.Variable]) -> list[str]:
    """Give path, dtype and shape of each variable, as text."""
    return [f"{variable.path} {_kind(variable)}" for variable in listed]


def check(saved: Sequence[str], listed: Sequence[keras.Variable], subject: str) -> None:
    """Raise `CheckpointError` with the first variable unlike that of `described` when saved; names may differ."""
    for index, (text, variable) in enumerate(zip(saved, listed, strict=False)):
        path, _, kind = text.rpartition(" ")
        if kind != _kind(variable):
            raise CheckpointError(
                f"{subject}: saved from another model: variable {index} was {path!r}, {kind}, but is "
                f"{variable.path!r}, {_kind(variable)}; use the same model and optimizer, or another directory"
            )
    if len(saved) != len(listed):
        raise CheckpointError(
            f"{subject}: saved from another model: it had {len(saved)} variables with those of its optimizers, this "
            f"one has {len(listed)}; use the same model and optimizer, or another directory"
        )


def digests(listed: Sequence[keras.Variable]) -> list[str]:
    """Give a digest of the bits of each variable."""
    return [hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest() for array in map(_values, listed)]


def arrays(listed: Sequence[keras.Variable], indices: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Copy the variables at these indices of a list, or all of them. Returns their values by index, as text."""
    indices = range(len(listed)) if indices is None else indices
    return {str(index): _values(listed[index]) for index in indices}


def assign(listed: Sequence[keras.Variable], values: dict[str, np.ndarray], subject: str) -> None:
    """Set variables to what `arrays` gave; `CheckpointError` if there is no such variable, or it has another shape."""
    for index, value in values.items():
        variable = listed[int(index)] if int(index) < len(listed) else None
        if variable is None or tuple(variable.shape) != value.shape:
            raise CheckpointError(f"{subject}: saved from another model: no variable {index} of shape {value.shape}")
        variable.assign(value)


def save(model: keras.Model, folder: Path) -> str:
    """Write a model and its optimizers for plain Keras: model.keras, or without a configuration model.weights.h5."""
    with local_weights():  # training resumes from them
        try:
            model.save(folder / "model.keras")
        except (NotImplementedError, TypeError):
            # a class without a configuration: its weights and its optimizers' variables can still be saved
            (folder / "model.keras").unlink(missing_ok=True)
            model.save_weights(folder / "model.weights.h5")
            return "model.weights.h5"
    return "model.keras"


def send(listed: Sequence[keras.Variable], root_rank: int = 0) -> None:
    """Give all ranks the values of one rank, bit for bit; all ranks call it."""
    moved = [variable for variable in listed if variable.dtype in single.MOVED]
    others = [variable for variable in listed if variable.dtype not in single.MOVED]
    if moved:
        broadcast_variables(moved, root_rank=root_rank)
    if others:
        sent = broadcast_object([_values(variable) for variable in others], root_rank, name="Checkpoint: model")
        for variable, value in zip(others, sent, strict=True):
            variable.assign(value)


def random_state() -> dict[str, np.ndarray]:
    """Copy the states of the random generators of Python, NumPy, TensorFlow (tf.random.Generator) and Keras.

    A generator that has not been used yet is not made here: Keras would draw its seed from Python's generator, so that
    the numbers that follow would not be those of a job without a checkpoint.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": np.frombuffer(json.dumps(random.getstate()).encode(), np.uint8),
        "numpy": np.frombuffer(json.dumps([name, position, has_gauss, gauss]).encode(), np.uint8),
        "numpy keys": np.asarray(keys),
    }
    if _tensorflow_has_generator():
        state["tensorflow"] = np.asarray(tf.random.get_global_generator().state)
    if _keras_has_generator():
        state["keras"] = _values(_seed_generator.global_seed_generator().state)
    return state


def set_random_state(state: Mapping[str, np.ndarray]) -> None:
    """Set the random generators to a state from `random_state`; a generator that the state lacks is left alone."""
    if "tensorflow" in state:
        generator = tf.random.get_global_generator()
        if generator.state.shape == state["tensorflow"].shape:
            generator.state.assign(state["tensorflow"])
    if "keras" in state and _global_state is not None:
        _seed_generator.global_seed_generator().state.assign(state["keras"])  # if this makes it, it draws from Python's
    if "python" in state:
        version, internal, gauss = json.loads(state["python"].tobytes())
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        name, position, has_gauss, second = json.loads(state["numpy"].tobytes())
        np.random.set_state((name, state["numpy keys"], position, has_gauss, second))


def not_drawn_from(since: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the part of a state whose generators have not been used since an earlier state."""
    now = random_state()
    drawn = {name.split()[0] for name in now if name in since and not np.array_equal(now[name], since[name])}
    return {name: value for name, value in state.items() if name.split()[0] not in drawn}


def _keras_has_generator() -> bool:
    """Whether Keras has made its own generator: for the first number from `keras.random` without a seed."""
    if _global_state is None:
        return False
    name = getattr(_seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")  # Keras 3.8 has only the text
    return _global_state.get_global_attribute(name) is not None


def _tensorflow_has_generator() -> bool:
    from tensorflow.python.ops import stateful_random_ops

    return getattr(stateful_random_ops, "global_generator", None) is not None


def _kind(variable: keras.Variable) -> str:
    return f"{variable.dtype}[{','.join(str(size) for size in variable.shape)}]"


def _values(variable: keras.Variable) -> np.ndarray:
    return np.asarray(variable.numpy())
