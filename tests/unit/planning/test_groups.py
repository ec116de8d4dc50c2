"""Buckets that the user names."""

from __future__ import annotations

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning.buckets import Bucket, by_groups, by_size
from hvd_ext.planning.tensors import Tensor


def tensors(*sizes: int, dtype: str = "float32") -> list[Tensor]:
    return [Tensor("kernel", (size,), dtype) for size in sizes]


def test_a_number_of_groups_has_about_equal_bytes_and_none_is_empty() -> None:
    plan = by_groups(tensors(10, 10, 20, 10, 30), 2)
    assert plan.buckets == (Bucket("float32", (4, 3), 160), Bucket("float32", (2, 1, 0), 160))
    assert [bucket.tensors for bucket in by_groups(tensors(0, 0, 0, 100), 3).buckets] == [(3,), (2,), (1, 0)]
    assert [bucket.tensors for bucket in by_groups(tensors(1, 2), 7).buckets] == [(1,), (0,)]
    assert by_groups([], 3).buckets == ()


def test_a_group_of_two_dtypes_is_two_buckets_and_the_rest_goes_by_size() -> None:
    mixed = [Tensor("kernel", (4,), dtype) for dtype in ("float32", "float64", "float32", "float32")]
    plan = by_groups(mixed, [[0, 1, 3], []], 16)
    assert plan.buckets == (
        Bucket("float32", (2,), 16),
        Bucket("float64", (1,), 32),
        Bucket("float32", (3, 0), 32),
    )


def test_no_groups_are_buckets_of_a_size() -> None:
    infos = tensors(10, 3, 20, 7, 0, 30)
    assert by_groups(infos, [], 64) == by_size(infos, 64)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (0, "must be at least 1"),
        ([[0], [2]], "tensor 2 does not exist; there are 2 tensors"),
        ([[0], [1, 0]], "tensor 'kernel' is listed twice"),
    ],
)
def test_wrong_groups_are_refused(groups: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        by_groups(tensors(1, 1), groups)
    with pytest.raises(PlanError, match="its dtype must be one of"):
        by_groups(tensors(1, dtype="complex64"), 1)
