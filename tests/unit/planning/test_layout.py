"""A layout says how a step is reduced: every tensor that travels is in one bucket, ranks can compare it, and it is read
from JSON as it was written, with clear words for a layout of another model."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from hvd_ext.compression.momentum import Momentum
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.options import Average, Sum
from hvd_ext.planning.layout import Layout, layout
from hvd_ext.planning.tensors import DTYPES, Tensor
from hvd_ext.topology.tree import Tree, from_hosts

TWO_HOSTS = from_hosts(list("aabbb"))


def tensors(rng: random.Random, dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")) -> list[Tensor]:
    """Some of several ranks and dtypes, a few without elements."""
    shapes = [tuple(rng.randint(0, 40) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 20))]
    return [Tensor(f"v{place}", shape, rng.choice(dtypes)) for place, shape in enumerate(shapes)]


def cluster(rng: random.Random) -> Tree:
    """One to three hosts of up to four ranks."""
    return from_hosts([name for name in "abc"[: rng.randint(1, 3)] for _ in range(rng.randint(1, 4))])


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_that_travels_is_in_one_bucket_of_its_dtype(seed: int) -> None:
    rng = random.Random(seed)
    given = tensors(rng)
    places = sorted(rng.sample(range(len(given)), rng.randint(0, len(given))))
    groups = rng.choice([None, 2, [places[::2], places[1::2]]])
    topk = rng.choice([None, TopK(0.1, min_elements=50)])
    made = layout(
        cluster(rng), given, Sum, bucket_nbytes=rng.choice([64, 4096]), groups=groups, places=places, codec=topk
    )
    assert sorted(place for bucket in made.buckets for place in bucket.tensors) == places == list(made.sent_tensors)
    assert made.tensors == tuple(given)
    for bucket, nbytes in zip(made.buckets, made.nbytes, strict=True):
        assert {given[place].dtype for place in bucket.tensors} == {bucket.dtype}
        assert nbytes == sum(given[place].elements for place in bucket.tensors) * DTYPES[bucket.dtype].nbytes
        assert bucket.segment_nbytes > 0
        selects = {topk is not None and topk.takes(given[place].shape, given[place].dtype) for place in bucket.tensors}
        assert selects == {bucket.selection is not None}
    assert made.selected == {place for place in places if topk and topk.takes(given[place].shape, given[place].dtype)}
    assert made.with_momentum == frozenset()
    assert (made.largest is None) == (not places)


TENSORS = (
    Tensor("kernel", (100, 100), "float32"),
    Tensor("bias", (100,), "float32"),
    Tensor("double", (9,), "float64"),
    Tensor("last", (64, 64), "float32"),
)


def example(**settings: Any) -> Layout:
    return layout(TWO_HOSTS, TENSORS, **{"op": Average, **settings})


def test_the_wire_is_that_of_float32_where_no_residual_keeps_what_rounding_takes() -> None:
    wires = {bucket.tensors: bucket.wire for bucket in example(wire="float16", codec=TopK(0.01)).buckets}
    assert wires == {(3, 0): None, (1,): "float16", (2,): None}


def test_with_a_momentum_all_of_float32_goes_through_it_and_only_what_topk_takes_is_selected() -> None:
    made = example(codec=TopK(0.01), momentum=Momentum(0.9, True))
    assert made.with_momentum == {0, 1, 3}
    (small,) = (bucket for bucket in made.buckets if bucket.tensors == (1,))
    assert small.selection is not None
    assert (small.selection.dense_above, small.plan) == (0.0, small.dense)


def test_the_digest_differs_where_anything_that_ranks_compare_differs() -> None:
    plain = example()
    others = [
        example(algorithm="ring"),
        example(bucket_nbytes=300),
        example(codec=TopK(0.01)),
        example(places=[0, 2]),
        dataclasses.replace(plain, tensors=(Tensor("kernel", (50, 200), "float32"), *plain.tensors[1:])),
    ]
    assert len({plain.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert (example().digest, example().described()) == (plain.digest, plain.described())


def test_it_prints_a_line_for_each_bucket() -> None:
    lines = str(example(algorithm="ring", wire="bfloat16", codec=TopK(0.01))).splitlines()
    assert len(lines) == 3
    assert any(": 2 tensors, 56384 bytes of float32, hitopk, dense from a density of" in line for line in lines)
    assert any("400 bytes of float32 as bfloat16, ring, in segments of" in line for line in lines)
    assert str(example(places=[])) == "no tensors are sent"


def written(**settings: Any) -> dict[str, Any]:
    """A layout as it is read from a file."""
    values: dict[str, Any] = json.loads(json.dumps(example(**settings).to_json()))
    return values


def read(values: Any, **settings: Any) -> Layout:
    return Layout.from_json(values, TWO_HOSTS, TENSORS, Average, source="file.json", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "ring", "wire": "float16"},
        {"buckets": "wfbp"},
        {"groups": [[2], [0, 3]]},
        {"places": [0, 2]},
        {"codec": TopK(0.01)},
        {"codec": TopK(0.02, wire="bf16", height=None), "momentum": Momentum(0.9, True), "wire": "bfloat16"},
        {"codec": TopK(0.01), "sparse_algorithm": "gtopk"},
    ],
)
def test_what_is_written_is_read_again(settings: dict[str, Any]) -> None:
    made = example(**settings)
    again = read(written(**settings), places=settings.get("places"))
    assert (again.digest, again.described(), again.bucketer) == (made.digest, made.described(), made.bucketer)
    for bucket, other in zip(again.buckets, made.buckets, strict=True):
        assert (bucket.dtype, bucket.tensors, bucket.op, bucket.wire) == (
            *(other.dtype, other.tensors, other.op, other.wire),
        )
        assert (bucket.selection, bucket.plan, bucket.dense) == (other.selection, other.plan, other.dense)
    assert again.to_json() == made.to_json()


def test_on_another_cluster_the_schedules_make_other_plans() -> None:
    values = written(codec=TopK(0.01), algorithm="ring")
    found = Layout.from_json(values, from_hosts(list("aab")), TENSORS, Sum)
    assert {bucket.plan.size for bucket in found.buckets} == {3}
    assert {bucket.op for bucket in found.buckets} == {int(Sum)}


def changed(**changes: Any) -> dict[str, Any]:
    values = written(algorithm="ring", bucket_nbytes=1)
    values["buckets"][0] |= changes
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"file.json: format \(None\): must be 1"),
        ({"format": 1}, "file.json: it is not a layout as hvd_ext writes it .KeyError: 'tensors'."),
        (None, "file.json: it is not a layout as hvd_ext writes it .AttributeError"),
        (changed(tensors=["other"]), "bucket 0: the step has no tensor 'other'"),
        (changed(tensors=["kernel"]), "tensor 'kernel': it is in buckets 0 and 3; it may be in one only"),
        (changed(tensors=["last", "double"]), "bucket 0: its tensors must be of one dtype, at least one tensor; got"),
        (changed(tensors=[]), "bucket 0: its tensors must be of one dtype, at least one tensor; got none"),
        (changed(segment_nbytes=0), r"bucket 0: segment_nbytes \(0\): must be a whole number, at least 1"),
        (changed(wire="int8"), r"bucket 0: wire \('int8'\): must be null, or 'float16' or 'bfloat16'"),
        (changed(algorithm="rings"), "bucket 0: algorithm 'rings': .* did you mean 'ring'"),
        (changed(selection={"none": 1}), "it is not a layout as hvd_ext writes it .TypeError"),
        (
            written() | {"tensors": {"kernel": "float32[7]"}},
            r"'kernel': it is float32\[7\] there, and float32\[100, 100\]",
        ),
        (written() | {"buckets": []}, "tensor 'kernel': it is sent, and in no bucket"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read(values, places=range(4))


def test_a_tensor_that_is_not_sent_is_in_no_bucket_and_tensors_of_one_name_cannot_be_written() -> None:
    with pytest.raises(PlanError, match="tensor 'bias': it is in a bucket, and not sent"):
        read(written(), places=[0, 2, 3])
    with pytest.raises(PlanError, match="tensor 'kernel': two tensors have this name"):
        layout(TWO_HOSTS, [TENSORS[0], TENSORS[0]], Sum).to_json()
