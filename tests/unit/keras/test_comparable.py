"""What the ranks compare of an optimizer: equal values for equal optimizers, with any schedules and functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers.comparable import comparable, configuration, current


class Bare(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration."""

    def __init__(self, rate: float, late: float = 1.0) -> None:
        self.rate, self.late = rate, late

    def __call__(self, step: Any) -> Any:
        return self.rate * tf.where(step < 500, 1.0, self.late)


class Rate:
    """An object that gives a rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self) -> float:
        return self.rate


class Masked(keras.optimizers.SGD):
    """An optimizer with a setting of its own."""

    def __init__(self, mask: Any) -> None:
        super().__init__(0.1)
        self.mask = mask

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"mask": self.mask}


def constant(rate: float) -> float:
    return rate


def written_in(path: str, rate: float) -> Callable[[], float]:
    names: dict[str, Any] = {}
    exec(compile(f"given = lambda: {rate}", path, "exec"), names)
    return names["given"]  # type: ignore[no-any-return]


def nested(rate: float) -> Callable[[], float]:
    def again() -> float:
        return rate if rate else again()

    return again


@pytest.mark.parametrize(
    "make",
    [
        Bare,
        lambda value: Bare(0.1, value),
        lambda value: keras.optimizers.schedules.ExponentialDecay(value, 10, 0.5),
        lambda value: lambda: value,
    ],
    ids=["schedule", "late", "with a configuration", "function"],
)
def test_schedules_and_functions_are_compared_by_value_and_stay_where_they_are(make: Any) -> None:
    schedules = [make(0.5), make(0.5), make(0.25)]
    optimizers = [keras.optimizers.SGD(schedule) for schedule in schedules]
    first, same, other = (comparable(optimizer, "the optimizer's") for optimizer in optimizers)
    assert first == same
    assert first != other
    assert [optimizer._learning_rate for optimizer in optimizers] == schedules


@pytest.mark.parametrize("wrap", [lambda one: one, keras.optimizers.LossScaleOptimizer])
def test_a_schedule_without_a_configuration_may_be_a_momentum_or_inside_of_a_loss_scale_optimizer(wrap: Any) -> None:
    optimizer = hvd.optimizers.LARS(Bare(0.5), momentum=Bare(0.25))
    outer = wrap(optimizer)
    assert "exclude_from_trust" in configuration(optimizer)[0]
    found = comparable(optimizer, "the")
    assert [values for key, values in found.items() if "values" in key] == [["0.5"] * 7, ["0.25"] * 7]
    assert "learning_rate" in current(outer)


@pytest.mark.parametrize(
    ("make", "value", "other"),
    [
        (lambda value: written_in(value[0], value[1]), ("a.py", 0.5), ("b.py", 0.25)),
        (nested, 0.5, 0.25),
        (lambda value: functools.partial(constant, value), 0.5, 0.25),
        (Rate, 0.5, 0.25),
        (lambda value: Rate(value).__call__, 0.5, 0.25),
        (lambda value: {value, "b", "c"}, "a", "d"),
        (lambda value: {"a": [value]}, 1, 2),
        (lambda value: np.full(3, value), 1.0, 2.0),
        (lambda value: [constant, lambda step: step in {"a", "b", value}], 1, 2),
    ],
)
def test_settings_of_every_kind_are_compared_by_what_they_hold(make: Any, value: Any, other: Any) -> None:
    def mask(given: Any) -> Any:
        return comparable(Masked(make(given)), "the")["the mask"]

    assert mask(value) == mask(value)
    assert mask(value) != mask(other)


def test_a_function_is_the_same_in_scripts_at_different_paths() -> None:
    first, second = (comparable(Masked(written_in(path, 0.5)), "the") for path in ("/a/train.py", "/b/train.py"))
    assert first == second


def test_an_optimizer_that_refuses_its_configuration_is_compared_by_its_attributes() -> None:
    class Refusing(keras.optimizers.SGD):
        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError

    config, _ = configuration(Refusing(0.1, momentum=0.5))
    assert (config["momentum"], config["nesterov"]) == (0.5, False)


def test_the_current_values_include_what_is_a_variable() -> None:
    scaling = keras.optimizers.LossScaleOptimizer(hvd.optimizers.LARS(0.5, momentum=0.75), initial_scale=8.0)
    variable = keras.Variable(np.float32(1.0))
    scaling.build([variable])
    found = current(scaling)
    assert (found["learning_rate"], found["momentum"], found["dynamic_scale"]) == ("0.5", "0.75", "8.0")
    scaling.inner_optimizer.momentums[0].assign(3.0)  # a slot may be a scalar
    assert current(scaling) == found


def test_topk_refuses_an_adafactor_whose_update_would_be_nan() -> None:
    topk = hvd.TopK(0.1)
    with pytest.raises(InvalidError, match=r"epsilon_1=1e-30 .* NaN .*keras.optimizers.Adafactor\(epsilon_1=1e-12\)"):
        hvd.DistributedOptimizer(keras.optimizers.Adafactor(), compression=topk)
    hvd.DistributedOptimizer(keras.optimizers.Adafactor(epsilon_1=1e-12), compression=topk)
