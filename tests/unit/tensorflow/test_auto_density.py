"""`density="auto"` goes on from a checkpoint: what is saved is what the next decisions need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.compression import density
from hvd_ext.tensorflow.collectives import single
from hvd_ext.tensorflow.topk import auto_density
from hvd_ext.tensorflow.topk.auto_density import AutoDensity

WINDOW = 5
# The norm does not change from the second window to the third, and changes much in the fifth.
NORMS = [1.0] * (4 * WINDOW) + [3.0] * (2 * WINDOW) + [1.0] * (2 * WINDOW)
INTERRUPTED = 3 * WINDOW - 1  # a step before the third window ends
SAVED = {"auto density", "auto norm", "auto sum", "auto steps"}


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """One rank, short windows; whether the steps are traced."""
    monkeypatch.setattr(auto_density, "Auto", lambda: density.Auto(window_steps=WINDOW))
    monkeypatch.setattr(single, "allreduce", lambda tensor, **_: tensor)
    return bool(request.param)


def steps_of(one: AutoDensity, traced: bool) -> Callable[[float], float]:
    """Gives what makes a step with a gradient of a norm and says which density it had."""

    def step(norm: tf.Tensor) -> tf.Tensor:
        had = one.density()
        with tf.control_dependencies([had]):
            one.seen([tf.reshape(norm, [1]) / 2], [0.5], tf.constant(True))
        return had

    made = tf.function(step) if traced else step
    return lambda norm: float(made(tf.constant(norm)))


def fresh() -> AutoDensity:
    job: Any = SimpleNamespace(engine=SimpleNamespace(rank=0))
    return AutoDensity("it", "it", job, None)


def densities_of(one: AutoDensity, norms: Sequence[float], traced: bool) -> list[float]:
    step = steps_of(one, traced)
    return [step(norm) for norm in norms]


def test_a_restored_one_decides_as_one_that_was_not_interrupted(traced: bool) -> None:
    high, low = density.Auto.densities
    whole = densities_of(fresh(), NORMS, traced)
    assert whole == np.repeat([high, high, low, low, low, high, low, high], WINDOW).tolist()
    for interrupted in (1, WINDOW, INTERRUPTED, 5 * WINDOW + 2):
        first, second = fresh(), fresh()
        before = densities_of(first, NORMS[:interrupted], traced)
        saved = first.save()
        densities_of(second, [7.0] * 3, traced)  # whatever it has seen before
        second.load(saved)
        assert before + densities_of(second, NORMS[interrupted:], traced) == whole
        assert first.save() == saved  # a copy, and of nobody else


@pytest.mark.parametrize("lacking", sorted(SAVED))
def test_each_of_what_is_saved_is_needed(lacking: str, traced: bool) -> None:
    first, second = fresh(), fresh()
    densities_of(first, NORMS[:INTERRUPTED], traced)
    saved = first.save()
    assert set(saved) == SAVED
    second.load({name: value for name, value in saved.items() if name != lacking})
    assert densities_of(second, NORMS[INTERRUPTED:], traced) != densities_of(first, NORMS[INTERRUPTED:], traced)
