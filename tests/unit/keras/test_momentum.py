"""The momentum that `TopK` takes over: from whom, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.momentum import BY_DEFAULT, OfLARS, OfSGD, momentum_of
from hvd_ext.options.gradients import GradientOptions

SGD, LARS = keras.optimizers.SGD, hvd.optimizers.LARS
CORRECTED, DEFAULT = (GradientOptions(compression=hvd.TopK(momentum_correction=how)) for how in (True, "auto"))


def test_it_is_that_of_sgd() -> None:
    found = momentum_of(SGD(0.1, momentum=0.75, nesterov=True), CORRECTED)
    assert (type(found), found.value, found.nesterov, found.now()) == (OfSGD, 0.75, True, None)
    # layouts of a checkpoint are for equal options, as text
    assert len({str(momentum_of(SGD(0.1, momentum=0.75), CORRECTED)) for _ in range(3)}) == 1


def test_by_default_it_is_taken_over_where_there_is_one() -> None:
    sgd, variable = SGD(0.1, momentum=0.75), keras.Variable(np.zeros(2), dtype="float32")
    found = momentum_of(sgd, DEFAULT)
    assert (type(found), found.value, found.nesterov) == (OfSGD, 0.75, False)
    for codec in (None, hvd.TopK(momentum_correction=False), hvd.TopK(selector="random")):
        assert momentum_of(sgd, GradientOptions(compression=codec)) is None
    for other in (keras.optimizers.Adam(), SGD(0.1), SGD(0.1, momentum=0.75, clipnorm=1.0)):
        assert momentum_of(other, DEFAULT) is None
    assert (momentum_of(LARS(), DEFAULT) is not None) == (LARS in BY_DEFAULT)
    sgd.build([variable])
    sgd.apply([np.ones(2, np.float32)], [variable])
    assert momentum_of(sgd, DEFAULT) is None  # its own momentum stays


def test_it_is_that_of_lars_and_the_momentum_is_asked_for_in_each_step() -> None:
    lars = LARS(0.1, momentum=0.75, nesterov=True)
    found = momentum_of(lars, CORRECTED)
    assert (type(found), found.value, found.nesterov, float(found.now())) == (OfLARS, 0.0, True, 0.75)
    lars.momentum = 0.0  # it is taken over all the same
    for again in (found, momentum_of(lars, CORRECTED)):
        assert (again.value, float(again.now())) == (0.0, 0.0)
    lars = LARS(0.1, momentum=keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.75, 0.25]))
    found = momentum_of(lars, CORRECTED)
    lars.iterations.assign(1)
    assert (found.value, float(found.now())) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (keras.optimizers.Adam, {}, "momentum_correction .*'adam.*' is Adam, whose step is not a sum of gradients"),
        (SGD, {}, "has momentum 0, so there is none to take over"),
        (LARS, {"rate_in_momentum": False}, "rate_in_momentum=False.*rates of its own steps"),
        *(
            (SGD, {"momentum": 0.75, limit: 1.0}, "would act after its momentum and its learning rate")
            for limit in ("clipnorm", "clipvalue", "global_clipnorm")
        ),
    ],
)
def test_optimizers_without_such_a_momentum_are_refused(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.DistributedOptimizer(make(0.1, **settings), compression=CORRECTED.compression)


def test_an_optimizer_whose_momentum_runs_already_is_refused() -> None:
    optimizer = SGD(0.1, momentum=0.9)
    moved, dead = (keras.Variable(np.zeros(2), dtype="float32") for _ in range(2))
    optimizer.build([moved, dead])
    assert momentum_of(optimizer, CORRECTED) is not None
    optimizer.apply([np.ones(2, np.float32), np.zeros(2, np.float32)], [moved, dead])
    with pytest.raises(InvalidError, match="has trained without it, and its momentum would be lost"):
        momentum_of(optimizer, CORRECTED)
