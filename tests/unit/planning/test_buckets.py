"""Fixed-size buckets."""

from __future__ import annotations

import random

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import buckets
from hvd_ext.planning.buckets import NBYTES_OF, Bucket, TensorInfo, by_size


def tensors(*sizes: int, dtype: str = "float32") -> list[TensorInfo]:
    return [TensorInfo(f"t{index}", size, dtype) for index, size in enumerate(sizes)]


def test_buckets_fill_from_the_last_tensor_to_the_first() -> None:
    plan = by_size(tensors(10, 20, 30, 40), 280)
    assert plan.buckets == (Bucket("float32", (3, 2), 280), Bucket("float32", (1, 0), 120))


def test_a_tensor_larger_than_a_bucket_has_its_own() -> None:
    plan = by_size(tensors(1, 1000, 1), 64)
    assert [bucket.tensors for bucket in plan.buckets] == [(2,), (1,), (0,)]


def test_each_dtype_has_its_own_buckets_in_the_order_in_which_they_fill() -> None:
    mixed = [
        TensorInfo(str(index), 1, dtype) for index, dtype in enumerate(["float16", "float32", "float16", "float32"])
    ]
    assert [(bucket.dtype, bucket.tensors) for bucket in by_size(mixed, 100).buckets] == [
        ("float32", (3, 1)),
        ("float16", (2, 0)),
    ]


def test_no_tensors_make_no_buckets_and_empty_tensors_travel_along() -> None:
    assert by_size([]).buckets == ()
    assert by_size(tensors(0, 0)).buckets == (Bucket("float32", (1, 0), 0),)


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_is_in_exactly_one_bucket_of_its_dtype(seed: int) -> None:
    rng = random.Random(seed)
    infos = [TensorInfo(str(i), rng.randint(0, 50), rng.choice(sorted(NBYTES_OF))) for i in range(rng.randint(1, 60))]
    limit = rng.randint(1, 400)
    plan = by_size(infos, limit)
    assert sorted(index for bucket in plan.buckets for index in bucket.tensors) == list(range(len(infos)))
    for bucket in plan.buckets:
        assert {infos[index].dtype for index in bucket.tensors} == {bucket.dtype}
        assert bucket.nbytes == sum(infos[index].elements * NBYTES_OF[bucket.dtype] for index in bucket.tensors)
        assert bucket.nbytes <= limit or len([index for index in bucket.tensors if infos[index].elements]) == 1
    full = [bucket.tensors[-1] for bucket in plan.buckets]
    assert full == sorted(full, reverse=True)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(PlanError, match="bucket_nbytes 0: a bucket has at least one byte"):
        by_size(tensors(1), 0)
    with pytest.raises(PlanError, match=r"tensor 't0': its dtype is one of float32, .* got 'complex64'"):
        by_size(tensors(1, dtype="complex64"))
    with pytest.raises(PlanError, match="tensor 't0': it has 0 or more elements, got -1"):
        by_size(tensors(-1))


def test_planners_are_found_by_name() -> None:
    assert buckets.names() == ("by_size",)
    assert buckets.make(tensors(1, 2), 8) == by_size(tensors(1, 2), 8)
    with pytest.raises(PlanError, match="bucket planner 'wfbpp': it is one of by_size"):
        buckets.make(tensors(1), planner="wfbpp")
