"""The options of `LowRank`: which gradients are factorised."""

from __future__ import annotations

import pytest

import hvd_ext as hvd
from hvd_ext.compression import from_text
from hvd_ext.errors import InvalidError
from hvd_ext.options.gradients import GradientOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, r"LowRank, rank \(0\): must be a whole number from 1"),
        ({"rank": True}, r"LowRank, rank \(True\)"),
        ({"start": -1}, r"LowRank, start \(-1\): must be a whole number from 0"),
        ({"seed": 0.5}, r"LowRank, seed \(0.5\)"),
        ({"saving": -1}, r"LowRank, saving \(-1\): must be a number from 0"),
        ({"saving": float("nan")}, r"LowRank, saving \(nan\)"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.LowRank(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "dtype", "factors"),
    [
        ((512, 512), "float32", (512, 512, 4)),
        ((3, 3, 64, 128), "float32", (576, 128, 4)),
        ((512, 512), "float16", None),
        ((512,), "float32", None),
        ((), "float32", None),
        ((0, 512), "float32", None),
        ((16, 16), "float32", (16, 16, 4)),  # just half of the elements
        ((16, 15), "float32", None),
    ],
)
def test_matrices_are_factorised_where_that_saves_enough(
    shape: tuple[int, ...], dtype: str, factors: tuple[int, int, int] | None
) -> None:
    assert hvd.LowRank(rank=4).factors(shape, dtype) == factors


def test_a_rank_is_no_larger_than_the_matrix() -> None:
    assert hvd.LowRank(rank=8, saving=0.0).factors((3, 5), "float32") == (3, 5, 3)


def test_it_is_no_codec_of_the_engine_and_has_a_feature_of_its_own() -> None:
    options = GradientOptions.from_texts("a test", {"compression": "lowrank:2,start=5"})
    assert options.low_rank == hvd.LowRank(2, start=5) == from_text("lowrank:rank=2,start=5")
    assert options.codec is None and options.keeps_residuals
    assert "low rank" in options.features and not {"compression", "top-k"} & options.features
    assert options.described()["LowRank's rank"] == 2
    with pytest.raises(InvalidError, match=r"sync: with compression=hvd_ext.LowRank\(...\) it must be 'full'"):
        GradientOptions(compression=hvd.LowRank(), sync="solo")
