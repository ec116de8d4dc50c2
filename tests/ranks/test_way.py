"""The files of hvd_ext that a step enters: a gradient's way (docs/design.md)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd

pytestmark = pytest.mark.ranks(2)

# With a codec, late or delayed gradients the policy is another file.
WAY = {
    "keras.optimizers.wrapper",
    "tensorflow.gradients.channel",
    "tensorflow.gradients.kinds",
    "tensorflow.gradients.reducer",
    "tensorflow.gradients.step",
    "tensorflow.ops",
}
# An eager step also exchanges with the other ranks which gradients it has.
EXCHANGED = {"engine.engine", "engine.native", "job.consensus"}


def entered(call: Callable[..., Any], *arguments: Any) -> set[str]:
    """Give the modules of hvd_ext whose functions run in a call, on its thread."""
    modules: set[str] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("hvd_ext."):
            modules.add(name.removeprefix("hvd_ext."))

    gc.collect()  # which may close channels of earlier tests
    sys.setprofile(profile)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return modules


def test_a_step_enters_these_files() -> None:
    variables = [keras.Variable(np.zeros((6, 7)), dtype="float32", name=f"v{number}") for number in range(3)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradients = [tf.constant(np.full((6, 7), hvd.rank() + 1, np.float32))] * 3

    def step(*of_step: tf.Tensor) -> None:
        optimizer.apply(list(of_step), variables)

    step(*gradients)  # the first step registers, and opens the channel
    way = WAY if hvd.size() > 1 else WAY | {"tensorflow.devices"}  # a rank alone may leave gradients on its GPU
    assert entered(step, *gradients) == way | EXCHANGED
    tf.function(step, autograph=False)(*gradients)
    traced = tf.function(step, autograph=False)
    assert entered(traced, *gradients) == way
    assert entered(traced, *gradients) == set()
