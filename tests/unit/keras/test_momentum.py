"""The momentum that `TopK` takes over: from whom, and what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.momentum import BY_DEFAULT, OfLARS, OfSGD, momentum_of
from hvd_ext.options.gradients import GradientOptions

CORRECTED = GradientOptions(compression=hvd.TopK(momentum_correction=True))


def test_it_is_that_of_sgd() -> None:
    found = momentum_of(keras.optimizers.SGD(0.1, momentum=0.75, nesterov=True), CORRECTED)
    assert (type(found), found.value, found.nesterov, found.now()) == (OfSGD, 0.75, True, None)
    # layouts of a checkpoint are for equal options, as text
    assert len({str(momentum_of(keras.optimizers.SGD(0.1, momentum=0.75), CORRECTED)) for _ in range(3)}) == 1
    assert momentum_of(keras.optimizers.Adam(), GradientOptions(compression=hvd.TopK())) is None
    assert momentum_of(keras.optimizers.SGD(momentum=0.9), GradientOptions()) is None


def test_by_default_it_is_taken_over_where_there_is_one() -> None:
    default = GradientOptions(compression=hvd.TopK())
    sgd = keras.optimizers.SGD(0.1, momentum=0.75)
    found = momentum_of(sgd, default)
    assert (type(found), found.value, found.nesterov) == (OfSGD, 0.75, False)
    assert momentum_of(sgd, GradientOptions(compression=hvd.TopK(momentum_correction=False))) is None
    assert momentum_of(sgd, GradientOptions(compression=hvd.TopK(selector="random"))) is None
    assert momentum_of(keras.optimizers.SGD(0.1), default) is None
    assert momentum_of(keras.optimizers.SGD(0.1, momentum=0.75, clipnorm=1.0), default) is None
    variable = keras.Variable(np.zeros(2), dtype="float32")
    sgd.build([variable])
    sgd.apply([np.ones(2, np.float32)], [variable])
    assert momentum_of(sgd, default) is None  # its own goes on


def test_it_is_that_of_lars_and_the_momentum_is_asked_for_in_each_step() -> None:
    lars = hvd.optimizers.LARS(0.1, momentum=0.75, nesterov=True)
    found = momentum_of(lars, CORRECTED)
    assert (type(found), found.value, found.nesterov, float(found.now())) == (OfLARS, 0.0, True, 0.75)
    lars.momentum = 0.5
    assert (found.value, float(found.now())) == (0.0, 0.5)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.75, 0.25])
    lars = hvd.optimizers.LARS(0.1, momentum=schedule)
    found = momentum_of(lars, CORRECTED)
    lars.iterations.assign(1)
    assert (found.value, float(found.now())) == (0.0, 0.25)
    taken = momentum_of(hvd.optimizers.LARS(), GradientOptions(compression=hvd.TopK()))
    assert (taken is not None) == (hvd.optimizers.LARS in BY_DEFAULT)
    with pytest.raises(InvalidError, match="rate_in_momentum=False.*rates of its own steps"):
        momentum_of(hvd.optimizers.LARS(rate_in_momentum=False), CORRECTED)


def test_a_momentum_that_is_0_at_present_is_taken_over() -> None:
    lars = hvd.optimizers.LARS(1.0, momentum=0.0)
    found = momentum_of(lars, CORRECTED)
    assert (found.value, float(found.now())) == (0.0, 0.0)


def test_optimizers_without_such_a_momentum_are_refused() -> None:
    with pytest.raises(
        InvalidError, match="momentum_correction .*'adam.*' is Adam, whose step is not a sum of gradients"
    ):
        hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=hvd.TopK(momentum_correction=True))
    with pytest.raises(InvalidError, match="has momentum 0, so there is none to take over"):
        momentum_of(keras.optimizers.SGD(), CORRECTED)


@pytest.mark.parametrize("limit", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_an_optimizer_that_clips_is_refused(limit: str) -> None:
    with pytest.raises(InvalidError, match="would act after its momentum and its learning rate"):
        momentum_of(keras.optimizers.SGD(0.1, momentum=0.75, **{limit: 1.0}), CORRECTED)


def test_an_optimizer_whose_momentum_runs_already_is_refused() -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    moved, dead = (keras.Variable(np.zeros(2), dtype="float32") for _ in range(2))
    optimizer.build([moved, dead])
    assert momentum_of(optimizer, CORRECTED) is not None
    optimizer.apply([np.ones(2, np.float32), np.zeros(2, np.float32)], [moved, dead])
    with pytest.raises(InvalidError, match="has trained without it, and its momentum would be lost"):
        momentum_of(optimizer, CORRECTED)
