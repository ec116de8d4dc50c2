"""A layout says how a step is reduced: every tensor that travels is in one bucket, and ranks can compare it."""

from __future__ import annotations

import dataclasses
import random

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


@pytest.mark.parametrize("seed", range(30))
def test_every_tensor_that_travels_is_in_one_bucket_of_its_dtype(seed: int) -> None:
    rng = random.Random(seed)
    given = tensors(rng)
    places = sorted(rng.sample(range(len(given)), rng.randint(0, len(given))))
    groups = rng.choice([None, 2, [places[::2], places[1::2]]])
    topk = rng.choice([None, TopK(0.1, min_elements=50)])
    made = layout(
        cluster(rng), given, Sum, bucket_nbytes=rng.choice([64, 4096]), groups=groups, places=places, topk=topk
    )
    assert sorted(place for bucket in made.buckets for place in bucket.tensors) == places == list(made.travelling)
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


def example(**settings: object) -> Layout:
    given = [Tensor("kernel", (100, 100), "float32"), Tensor("bias", (100,), "float32"), Tensor("x", (9,), "float64")]
    return layout(TWO_HOSTS, given, **{"op": Average, **settings})  # type: ignore[arg-type]


def test_the_wire_is_that_of_float32_where_no_residual_keeps_what_rounding_takes() -> None:
    assert {bucket.dtype: bucket.wire for bucket in example(wire="float16").buckets} == {
        "float32": "float16",
        "float64": None,
    }
    sparse = example(wire="float16", topk=TopK(0.01))
    assert {bucket.tensors: bucket.wire for bucket in sparse.buckets} == {(0,): None, (1,): "float16", (2,): None}


def test_with_a_momentum_all_of_float32_goes_through_it_and_only_what_topk_takes_is_selected() -> None:
    made = example(topk=TopK(0.01), momentum=Momentum(0.9, True))
    assert made.with_momentum == {0, 1}
    (small,) = (bucket for bucket in made.buckets if bucket.tensors == (1,))
    assert small.selection is not None
    assert (small.selection.dense_above, small.plan) == (0.0, small.dense)


def test_the_digest_differs_where_anything_that_ranks_compare_differs() -> None:
    one = example()
    others = [
        example(algorithm="ring"),
        example(bucket_nbytes=300),
        example(groups=[[2], [0, 1]], bucket_nbytes=1),
        example(topk=TopK(0.01)),
        example(places=[0, 2]),
        dataclasses.replace(one, tensors=(Tensor("kernel", (50, 200), "float32"), *one.tensors[1:])),
    ]
    digests = {one.digest, *(other.digest for other in others)}
    assert example().digest == one.digest
    assert len(digests) >= 6  # groups of one dtype each may be the buckets that there are without them
    assert example().described() == one.described()


def test_it_prints_a_line_for_each_bucket() -> None:
    lines = str(example(algorithm="ring", wire="bfloat16", topk=TopK(0.01))).splitlines()
    assert len(lines) == 3
    assert any(": 1 tensor, 40000 bytes of float32, hitopk, dense from a density of" in line for line in lines)
    assert any("400 bytes of float32 as bfloat16, ring, in segments of" in line for line in lines)
    assert str(example(places=[])) == "nothing travels"


def test_an_algorithm_that_there_is_not_is_refused() -> None:
    with pytest.raises(PlanError, match="nonsense"):
        example(algorithm="nonsense")
