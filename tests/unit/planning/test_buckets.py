"""Bucketers: what all promise, enumerated from the registry, and the order in which buckets of a size fill."""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import buckets
from hvd_ext.planning.buckets import DEFAULT_BUCKET_NBYTES, Bucket, Request
from hvd_ext.planning.cost.lane import line
from hvd_ext.planning.tensors import DTYPES, Tensor


def by_size(some: Sequence[Tensor], bucket_nbytes: int = DEFAULT_BUCKET_NBYTES) -> tuple[Bucket, ...]:
    return buckets.plan(Request(some, bucket_nbytes), "by_size")


def by_groups(
    some: Sequence[Tensor], groups: Any, bucket_nbytes: int = DEFAULT_BUCKET_NBYTES, sparse: Collection[int] = ()
) -> tuple[Bucket, ...]:
    return buckets.plan(Request(some, bucket_nbytes, groups, sparse), "by_groups")


def tensors(*sizes: int, dtype: str = "float32") -> list[Tensor]:
    return [Tensor(f"t{index}", (size,), dtype) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "bucket_nbytes", "made"),
    [
        ((10, 20, 30, 40), 280, [(3, 2), (1, 0)]),  # from the last tensor to the first
        ((1, 1000, 1), 64, [(2,), (1,), (0,)]),  # a tensor larger than a bucket has its own
        ((), 64, []),
        ((0, 0), 64, [(1, 0)]),
    ],
)
def test_buckets_of_a_size_fill_from_the_last_tensor_to_the_first(
    sizes: tuple[int, ...], bucket_nbytes: int, made: list[tuple[int, ...]]
) -> None:
    assert [bucket.tensors for bucket in by_size(tensors(*sizes), bucket_nbytes)] == made


def test_each_dtype_has_its_own_buckets_in_the_order_in_which_they_fill() -> None:
    dtypes = ("float16", "float32", "float16", "float32")
    mixed = [Tensor(str(index), (1,), dtype) for index, dtype in enumerate(dtypes)]
    assert by_size(mixed, 100) == (Bucket("float32", (3, 1), 8), Bucket("float16", (2, 0), 4))


def test_a_number_of_groups_has_about_equal_bytes_and_none_is_empty() -> None:
    plan = by_groups(tensors(10, 10, 20, 10, 30), 2)
    assert plan == (Bucket("float32", (4, 3), 160), Bucket("float32", (2, 1, 0), 160))
    assert [bucket.tensors for bucket in by_groups(tensors(0, 0, 0, 100), 3)] == [(3,), (2,), (1, 0)]
    assert [bucket.tensors for bucket in by_groups(tensors(1, 2), 7)] == [(1,), (0,)]
    assert by_groups([], 3) == ()


def test_a_group_of_two_dtypes_is_two_buckets_and_the_rest_goes_by_size() -> None:
    mixed = [Tensor("kernel", (4,), dtype) for dtype in ("float32", "float64", "float32", "float32")]
    wanted = Bucket("float32", (2,), 16), Bucket("float64", (1,), 32), Bucket("float32", (3, 0), 32)
    assert by_groups(mixed, [[0, 1, 3], []], 16) == wanted
    infos = tensors(10, 3, 20, 7, 0, 30)
    assert by_groups(infos, [], 64) == by_size(infos, 64)


def random_request(rng: random.Random) -> Request:
    infos = [Tensor(str(i), (rng.randint(0, 50),), rng.choice(sorted(DTYPES))) for i in range(rng.randint(1, 60))]
    places = list(range(len(infos)))
    rng.shuffle(places)
    lists = [places[begin : begin + 3] for begin in range(0, len(places) // 2, 3)]
    sparse = () if rng.randrange(2) else frozenset(rng.sample(range(len(infos)), rng.randint(0, len(infos))))
    groups = rng.choice([None, rng.randint(1, 70), lists])
    if rng.randrange(2):
        return Request(infos, rng.randint(1, 400), groups, sparse)
    if rng.randrange(2):
        infos = [Tensor(info.name, info.shape, "float32") for info in infos]
    prices = {sparse: line(rng.random(), rng.random() / 100) for sparse in (False, True)}
    ready_s = [float(rng.randint(0, 40)) for _ in infos]
    return Request(infos, rng.randint(1, 400), groups, sparse, ready_s, lambda kind: prices[kind[1]])


@pytest.mark.parametrize("name", buckets.names())
@pytest.mark.parametrize("seed", range(25))
def test_every_bucketer_puts_each_tensor_into_one_bucket_of_its_dtype_or_says_why_not(name: str, seed: int) -> None:
    request = random_request(random.Random(seed))
    reason = buckets.supports(buckets.get(name), request)
    if reason is not None:
        with pytest.raises(PlanError, match=re.escape(f"bucketer '{name}': {reason}; choose another one")):
            buckets.plan(request, name)
        return
    plan, infos = buckets.plan(request, name), request.tensors
    assert plan == buckets.plan(request, name)
    assert sorted(index for bucket in plan for index in bucket.tensors) == list(range(len(infos)))
    for bucket in plan:
        assert {infos[index].dtype for index in bucket.tensors} == {bucket.dtype}
        assert bucket.nbytes == sum(infos[index].elements * DTYPES[bucket.dtype].nbytes for index in bucket.tensors)
        if request.groups is None and name == "by_size":
            full = bucket.nbytes <= request.bucket_nbytes
            assert full or len([index for index in bucket.tensors if infos[index].elements]) == 1
        assert len({index in request.sparse for index in bucket.tensors}) == 1
        places = [request.order.index(index) for index in bucket.tensors]
        assert places == sorted(places)
    ready = [max(request.order.index(index) for index in bucket.tensors) for bucket in plan]
    assert ready == sorted(ready)


@pytest.mark.parametrize("groups", [None, 2, [[0, 2]]])
@pytest.mark.parametrize("sparse", [(), (1, 2)])
def test_the_simplest_bucketer_that_meets_a_request_is_chosen(groups: Any, sparse: tuple[int, ...]) -> None:
    infos = tensors(1, 2, 3, 4)
    request = Request(infos, 16, groups, sparse)
    expected = by_groups(infos, groups or [], 16, sparse=sparse)
    assert buckets.choose(request) == ("by_size" if groups is None else "by_groups")
    assert buckets.plan(request) == expected


@pytest.mark.parametrize(
    ("name", "settings", "made"),
    [
        ("auto", {"bucket_nbytes": 200}, [(0, 1), (3,), (2,)]),
        ("auto", {"sparse": (0, 2)}, [(1, 3), (0, 2)]),
        ("single", {"sparse": (0, 2)}, [(1, 3), (0, 2)]),
        ("wfbp", {"sparse": (0, 2)}, [(0,), (1,), (3,), (2,)]),
        ("auto", {"groups": [[2, 0]]}, [(1, 3), (0, 2)]),
    ],
)
def test_what_is_ready_first_goes_first_whatever_its_layer(
    name: str, settings: dict[str, Any], made: list[tuple[int, ...]]
) -> None:
    request = Request(tensors(10, 20, 30, 40), **{"bucket_nbytes": 1000, **settings}, ready_s=[1.0, 2.0, 4.0, 3.0])
    assert [bucket.tensors for bucket in buckets.plan(request, name)] == made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: by_size(tensors(1), 0), r"bucket_nbytes \(0\): must be at least 1"),
        (
            lambda: by_size(tensors(1, dtype="complex64")),
            r"tensor 't0': its dtype must be one of float32, .*'complex64'",
        ),
        (lambda: by_size(tensors(-1)), "tensor 't0': it must have 0 or more elements, got -1"),
        (lambda: by_groups(tensors(1, 1), 0), "must be at least 1"),
        (lambda: by_groups(tensors(1, 1), [[0], [2]]), "tensor 2 does not exist; there are 2 tensors"),
        (lambda: by_groups(tensors(1, 1), [[0], [1, 0]]), "tensor 't0' is listed twice"),
        (lambda: by_groups(tensors(1, dtype="complex64"), 1), "its dtype must be one of"),
        (
            lambda: buckets.plan(Request(tensors(1)), "wfbpp"),
            "bucketer 'wfbpp': must be one of by_groups, by_size, mgwfbp",
        ),
    ],
)
def test_wrong_input_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()


def test_bucketers_are_found_by_name_and_every_card_is_complete() -> None:
    assert buckets.names() == ("by_groups", "by_size", "mgwfbp", "optimal", "single", "wfbp")
    assert sorted(buckets.SIMPLEST_FIRST) == list(buckets.names())
    for name in buckets.names():
        card = buckets.get(name).card
        assert card.name == name
        assert card.idea.endswith(".")
        assert card.source


def test_a_card_with_another_name_than_its_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("hvd_ext.planning.buckets.by_size")
    monkeypatch.setattr(module, "card", dataclasses.replace(module.card, name="by_weight"))
    with pytest.raises(
        PlanError, match="bucketer 'by_size': its card must have the name of its module, got 'by_weight'"
    ):
        buckets._bucketers.__wrapped__()
