"""The options of sparse gradients: which values they take, which density a step has, which tensors may be sparse."""

from __future__ import annotations

import bisect
from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext.compression import from_text
from hvd_ext.errors import InvalidError
from hvd_ext.options import Compression, Options
from hvd_ext.options.gradients import GradientOptions


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"density": 0}, "density .*above 0 and at most 1, or 'auto'"),
        *(({"density": value}, "density") for value in (1.5, True, float("nan"), "dense")),
        ({"selector": "largest"}, "selector .*must be one of exact, mstopk, dgc, threshold, random"),
        ({"selector": "tf"}, "selector"),
        ({"wire": "float16"}, "wire .*must be one of fp32, fp16, bf16"),
        ({"indices": "int64"}, "indices .*must be one of auto, int32, delta, bitmap"),
        ({"per_tensor": 1}, "per_tensor .*True or False"),
        ({"height": 0}, "height .*whole number from 1, or None"),
        ({"height": True}, "height"),
        ({"vectors": None}, "vectors .*True or False"),
        ({"momentum_correction": 0.9}, "momentum_correction .*True, False or 'auto'"),
        ({"momentum_correction": "Auto"}, "momentum_correction"),
        ({"masks": "yes"}, "masks .*True or False"),
        ({"min_elements": -1}, "min_elements .*whole number from 0"),
        ({"min_elements": 10.0}, "min_elements"),
        ({"samplings": 0}, "samplings .*whole number from 1"),
        ({"seed": -1}, "seed .*whole number from 0"),
        ({"seed": 1 << 63}, "seed .*below 2"),
        ({"warmup": 100}, r"warmup .*must be a hvd_ext\.Warmup, or None"),
        ({"until": 1}, "until .*at least 2, or None; to send whole gradients from the first step on, leave TopK out"),
        ({"until": 2.0}, "until .*whole number of update steps"),
        *(({"until": value}, "until") for value in (True, "end")),
        ({"clip": 0.0}, "clip .*above 0, or None"),
        ({"clip": float("inf")}, "clip"),
        ({"threshold": -0.5}, "threshold .*from 0"),
        ({"where": "nowhere"}, "where .*must be one of everywhere, needed"),
        ({"threshold": 0.5}, "threshold .*selector 'threshold' needs one above 0, the others take none"),
        ({"selector": "threshold"}, ".*selector 'threshold' needs one above 0"),
        (
            {"selector": "random", "momentum_correction": True},
            ".*selector 'random' does not prefer large elements",
        ),
        (
            {"until": 10, "warmup": hvd.Warmup(9)},
            r".*until \(10\): the warm-up has 9 steps.*fewer steps, or a later until",
        ),
    ],
)
def test_values_that_break_a_rule_or_exclude_each_other_are_refused_in_words(
    keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidError, match=f"TopK.*{words}"):
        hvd.TopK(**keywords)


def test_values_at_the_edge_of_a_rule_are_taken() -> None:
    assert hvd.TopK(until=10, warmup=hvd.Warmup(8)).until == 10
    assert hvd.TopK(selector="threshold", threshold=0.5).threshold == 0.5


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"steps": 0}, "steps .*at least 1"),
        ({"steps": 2.5}, "steps"),
        ({"steps": 5, "densities": 0.5}, "must be a list of numbers"),
        ({"steps": 5, "densities": ()}, "must be a list of numbers"),
        ({"steps": 5, "densities": (0.5, 0.0)}, "each must be a number above 0"),
        ({"steps": 5, "densities": (0.1, 0.5)}, "each must be below the one before"),
        ({"steps": 5, "dense": 1}, "True or False"),
        ({"steps": 5, "densities": (0.5,), "dense": True}, "give one of the two"),
    ],
)
def test_a_warm_up_that_breaks_a_rule_is_refused(keywords: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=f"Warmup.*{words}"):
        hvd.Warmup(**keywords)


FALLING = (0.25, 0.0625, 0.015625, 0.004, 0.001)


@pytest.mark.parametrize(
    ("topk", "densities"),
    [
        (hvd.TopK(0.004, warmup=hvd.Warmup(9, FALLING)), {0: 0.25, 2: 0.25, 3: 0.0625, 5: 0.0625}),
        (hvd.TopK(0.004, warmup=hvd.Warmup(9, FALLING)), {6: 0.015625, 8: 0.015625, 9: 0.004, 10**9: 0.004}),
        (hvd.TopK(warmup=hvd.Warmup(3, dense=True)), {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.01, 4: 0.01}),
        (hvd.TopK(0.5, warmup=hvd.Warmup(9)), {0: 0.5}),
        (hvd.TopK(0.001, warmup=hvd.Warmup(1, FALLING)), {0: 0.004}),
        (hvd.TopK(warmup=hvd.Warmup(2)), {0: 0.25, 1: 0.25, 2: 0.01}),
    ],
)
def test_each_density_of_a_warm_up_above_the_last_has_an_equal_part_of_its_steps(
    topk: hvd.TopK, densities: dict[int, float]
) -> None:
    plan = topk.schedule
    places = {step: bisect.bisect_right(plan.firsts, step) - 1 for step in densities}
    assert {step: plan.densities[place] for step, place in places.items()} == densities


def test_small_tensors_vectors_and_other_dtypes_stay_dense() -> None:
    plain, all_of_them = hvd.TopK(min_elements=10), hvd.TopK(min_elements=0, vectors=True)
    shapes = [(2, 5), (3, 3), (100,), ()]
    assert [plain.takes(shape, "float32") for shape in shapes] == [True, False, False, False]
    assert all(all_of_them.takes(shape, "float32") for shape in shapes)
    assert not all_of_them.takes((0, 5), "float32")
    assert not any(all_of_them.takes((4, 4), dtype) for dtype in ("float16", "bfloat16", "float64"))


def test_a_command_line_says_the_same_in_one_word() -> None:
    assert from_text("topk") == hvd.TopK()
    assert from_text("topk:0.02") == hvd.TopK(0.02)
    assert from_text("topk:0.02,until=500") == hvd.TopK(0.02, until=500)
    found = from_text("topk:density=auto,wire=bf16,warmup=10/dense,momentum_correction=true,clip=2")
    warmup = hvd.Warmup(10, dense=True)
    assert found == hvd.TopK("auto", wire="bf16", warmup=warmup, momentum_correction=True, clip=2)
    read = GradientOptions.from_texts("it", {"compression": "topk:0.02,warmup=7", "algorithm": "gtopk"})
    assert (read.codec, read.sparse_algorithm) == (hvd.TopK(0.02, warmup=hvd.Warmup(7)), "gtopk")
    for text, words in (
        ("topk:sparsity=0.9", "TopK has no field 'sparsity'; its fields are density"),
        ("topk:warmup=10/slow", "'steps/dense'"),
        ("topk4", "must be one of"),
        ("topk:2", "density"),
        ("topk:until=soon", "until .*whole number"),
    ):
        with pytest.raises(InvalidError, match=words):
            GradientOptions.from_texts("it", {"compression": text})


def test_algorithms_and_compressions_that_do_not_belong_together_are_refused() -> None:
    assert GradientOptions(compression=hvd.TopK()).sparse_algorithm == "hitopk"
    with pytest.raises(InvalidError, match=r"algorithm \('ring'\).*must be one of .*hitopk.*or None"):
        GradientOptions(compression=hvd.TopK(), algorithm="ring")
    with pytest.raises(InvalidError, match=r"algorithm \('hitopk'\).*give compression=hvd_ext.TopK"):
        GradientOptions(algorithm="hitopk")
    with pytest.raises(
        InvalidError, match="keeps residuals for each optimizer; give it to hvd_ext.DistributedOptimizer"
    ):
        Options(compression=hvd.TopK())
    with pytest.raises(InvalidError, match="check_every .*0 for never"):
        GradientOptions(check_every=-1)


def test_dense_gradients_beside_sparse_ones_travel_as_those_of_the_job() -> None:
    job = Options(compression=Compression.bf16, algorithm="ring")
    channel = GradientOptions(compression=hvd.TopK(), algorithm="hitopk").for_channel(job)
    assert (channel.compression, channel.algorithm) == (Compression.bf16, "ring")
    compared = GradientOptions(compression=hvd.TopK(warmup=hvd.Warmup(5))).described()
    assert compared["TopK's density"] == 0.01
    assert compared["TopK's until"] is None
    assert compared["TopK's warmup"][0] == 5
    assert compared["sparse algorithm"] == "hitopk"
