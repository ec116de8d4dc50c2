"""`LocalSteps`: what it takes and refuses, what the ranks compare, and when its outer steps come."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.options import compatibility
from hvd_ext.options.gradients import GradientOptions


class Outer:
    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": 0.5, "name": "sgd_7"}


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"every": 0}, "every (0): must be a whole number from 1"),
        ({"every": True}, "every (True): must be a whole number from 1"),
        ({"every": 4, "start": -1}, "start (-1): must be a whole number from 0"),
        ({"every": 4, "fragments": 5}, "fragments (5): must be at most `every` (4)"),
        ({"every": 4, "overlap": 4}, "overlap (4): must be less than `every` (4)"),
        ({"every": 4, "within": "rack"}, "within ('rack'): must be one of 'host', 'rank'"),
        ({"every": 4, "outer": 0.7}, "outer (0.7): must be an optimizer of Keras 3, 'nesterov' or None"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=re.escape(f"LocalSteps, {words}")):
        hvd.LocalSteps(**keywords)


def test_a_wrapped_outer_optimizer_is_refused() -> None:
    outer = Outer()
    outer._hvd_ext = object()  # type: ignore[attr-defined]
    with pytest.raises(InvalidError, match="must be a plain optimizer; its gradients are reduced already"):
        hvd.LocalSteps(4, outer=outer)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"clip": 1.0}, {"momentum_correction": True}])
def test_a_codec_that_is_for_gradients_only_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match="TopK can have no momentum_correction and no clip"):
        GradientOptions(local_steps=hvd.LocalSteps(4), compression=hvd.TopK(**option))


def test_the_comparison_of_the_first_weights_cannot_be_left_out() -> None:
    with pytest.raises(InvalidError, match=re.escape("check_start (False): with local_steps it must be True")):
        GradientOptions(local_steps=hvd.LocalSteps(4), check_start=False)


def test_something_else_is_refused() -> None:
    with pytest.raises(InvalidError, match=re.escape("local_steps (16): must be a hvd_ext.LocalSteps, or None")):
        GradientOptions(local_steps=16)  # type: ignore[arg-type]


def test_the_ranks_compare_the_values_and_the_configuration_of_the_outer_optimizer() -> None:
    described = GradientOptions(local_steps=hvd.LocalSteps(4, outer=Outer(), start=2)).described()  # type: ignore[arg-type]
    assert described["LocalSteps' every"] == 4 and described["LocalSteps' start"] == 2
    assert described["LocalSteps' outer"] == 'Outer {"learning_rate": 0.5, "name": ""}'


def test_a_command_line_gives_the_number_or_the_fields() -> None:
    read = GradientOptions.from_texts("bench", {"local_steps": "16"}).local_steps
    assert read == hvd.LocalSteps(16)
    read = GradientOptions.from_texts("bench", {"local_steps": "every=16,overlap=4,outer=null"}).local_steps
    assert read == hvd.LocalSteps(16, overlap=4, outer=None)


def test_gradients_of_a_host_are_whole_and_outer_steps_have_the_codec() -> None:
    codec = hvd.Quantized(4)
    options = GradientOptions(
        local_steps=hvd.LocalSteps(4), compression=codec, algorithm="hitopk", gradient_predivide_factor=2.0
    )
    inside, outer = options.within(None), options.of_outer_steps
    assert inside.codec is None and inside.algorithm is None and inside.gradient_predivide_factor == 2.0
    assert outer.codec is codec and outer.algorithm == "hitopk" and outer.gradient_predivide_factor == 1.0
    assert outer.local_steps is None and options.before_local_steps.codec is None
    assert not options.waits_for_all and outer.waits_for_all


@pytest.mark.parametrize("every", [1, 3, 4, 10])
def test_the_outer_steps_of_fragments_are_evenly_spread_and_the_last_one_ends_the_round(every: int) -> None:
    for fragments in range(1, every + 1):
        offsets = [hvd.LocalSteps(every).offset(number, fragments) for number in range(fragments)]
        assert offsets[-1] == 0 and len(set(offsets)) == fragments
        gaps = np.diff([0, *offsets[:-1], every])
        assert max(gaps) - min(gaps) <= 1


def test_fragments_have_about_equal_size_and_keep_the_order() -> None:
    from hvd_ext.tensorflow.gradients.fragment import divided

    random = np.random.default_rng(0)
    for count in (1, 2, 5):
        shapes = [(int(size),) for size in random.integers(1, 100, 40)]
        variables = [
            SimpleNamespace(shape=shape, dtype="float32", number=number) for number, shape in enumerate(shapes)
        ]
        parts = divided(variables, count)
        assert [one.number for part in parts for one in part] == list(range(40))
        sizes = [sum(one.shape[0] for one in part) for part in parts]
        assert len(parts) == count and max(sizes) - min(sizes) <= 2 * 100
    assert len(divided(variables[:2], 5)) == 2


@pytest.mark.parametrize(
    "outer",
    [
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.optimizers.SGD(loss_scale_factor=8.0),
        keras.optimizers.SGD(gradient_accumulation_steps=2),
        keras.layers.Dense(1),
    ],
    ids=["scales", "factor", "accumulates", "layer"],
)
def test_an_outer_optimizer_that_changes_its_gradients_is_refused(outer: Any) -> None:
    with pytest.raises(InvalidError, match="LocalSteps, outer .*: must be"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), local_steps=hvd.LocalSteps(4, outer=outer))


def test_what_is_refused_with_it_says_so() -> None:
    for feature in ("op=Sum", "partial rounds", "delay", "tape", "Keras 2", "EMA", "SyncBatchNormalization"):
        assert compatibility.words("local steps", feature).startswith("local_steps: ")
