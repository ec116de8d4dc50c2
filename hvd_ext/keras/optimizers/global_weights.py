"""What a model evaluates, predicts and saves with, where its optimizer makes local steps: the global weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.tensorflow.gradients.policies import local_steps

# the methods of a model that read its weights, and those that set them
READ = (
    *("evaluate", "test_on_batch", "predict", "predict_on_batch"),
    *("save", "save_weights", "export", "get_weights"),
)
SET = ("set_weights", "load_weights")

_local = 0  # how many blocks of `local_weights` are open


@contextlib.contextmanager
def local_weights() -> Iterator[None]:
    """Let models evaluate, predict and save with the weights of this rank's host, in a `with` block.

    With `LocalSteps` a host's weights differ from those of other hosts between two outer steps. Outside of such a block
    `evaluate` (also as the validation of `fit`), `test_on_batch`, `predict`, `predict_on_batch`, `save`,
    `save_weights`, `export` and `get_weights` of a model have the global weights, which are equal on all ranks, and
    `set_weights` and `load_weights` set both. A call of the model itself has those of the host.
    """
    global _local
    _local += 1
    try:
        yield
    finally:
        _local -= 1


@contextlib.contextmanager
def _within(pairs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Give variables their global weights in a `with` block."""
    before = [tf.identity(variable) for variable, _ in pairs]
    for variable, value in pairs:
        variable.assign(value)
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, before, strict=True):
            variable.assign(value)


def reading(plain: Any) -> Any:
    """Make a method of a model read the global weights."""

    @functools.wraps(plain)
    def with_global_weights(model: Any, *arguments: Any, **keywords: Any) -> Any:
        found = [] if _local else local_steps.of_variables(model.weights)
        if not found:
            return plain(model, *arguments, **keywords)
        # what it calls, as `evaluate` of `fit` or `get_weights` of `save`, finds them in their places
        with _within([pair for _, pairs in found for pair in pairs]), local_weights():
            return plain(model, *arguments, **keywords)

    return with_global_weights


def setting(plain: Any) -> Any:
    """Make a method of a model set the global weights, too."""

    @functools.wraps(plain)
    def with_global_weights(model: Any, *arguments: Any, **keywords: Any) -> Any:
        result = plain(model, *arguments, **keywords)
        for policy, _ in local_steps.of_variables(model.weights) if not _local else ():
            policy.take_global_weights()
        return result

    return with_global_weights
