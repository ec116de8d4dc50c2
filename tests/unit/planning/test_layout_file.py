"""A layout as JSON: the same again, on the same cluster, and clear words for a layout of another model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvd_ext.compression.momentum import Momentum
from hvd_ext.compression.topk import TopK
from hvd_ext.errors import PlanError
from hvd_ext.options import Average, Sum
from hvd_ext.planning.layout import Layout, layout
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import from_hosts

TREE = from_hosts(list("aabbb"))
TENSORS = (
    Tensor("kernel", (100, 100), "float32"),
    Tensor("bias", (100,), "float32"),
    Tensor("double", (9,), "float64"),
    Tensor("last", (64, 64), "float32"),
)


def written(**settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(layout(TREE, TENSORS, Average, **settings).to_json()))
    return found


def read(values: Any, **settings: Any) -> Layout:
    return Layout.from_json(values, TREE, TENSORS, Average, source="file.json", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "ring", "wire": "float16"},
        {"buckets": "wfbp"},
        {"groups": [[2], [0, 3]]},
        {"places": [0, 2]},
        {"topk": TopK(0.01)},
        {"topk": TopK(0.02, wire="bf16", height=None), "momentum": Momentum(0.9, True), "wire": "bfloat16"},
        {"topk": TopK(0.01), "sparse_algorithm": "gtopk"},
    ],
)
def test_what_is_written_is_read_again(settings: dict[str, Any]) -> None:
    made = layout(TREE, TENSORS, Average, **settings)
    again = read(written(**settings), places=settings.get("places"))
    assert again.digest == made.digest
    assert again.described() == made.described()
    assert again.bucketer == made.bucketer
    for one, other in zip(again.buckets, made.buckets, strict=True):
        assert (one.dtype, one.tensors, one.op, one.wire) == (other.dtype, other.tensors, other.op, other.wire)
        assert (one.selection, one.plan, one.dense) == (other.selection, other.plan, other.dense)
    assert again.to_json() == made.to_json()


def test_on_another_cluster_the_schedules_make_other_plans() -> None:
    values = written(topk=TopK(0.01), algorithm="ring")
    other = from_hosts(list("aab"))
    found = Layout.from_json(values, other, TENSORS, Sum)
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


def test_a_tensor_that_is_not_sent_is_in_no_bucket() -> None:
    with pytest.raises(PlanError, match="tensor 'bias': it is in a bucket, and not sent"):
        read(written(), places=[0, 2, 3])


def test_tensors_of_one_name_cannot_be_written() -> None:
    twice = layout(TREE, [TENSORS[0], TENSORS[0]], Sum)
    with pytest.raises(PlanError, match="tensor 'kernel': two tensors have this name"):
        twice.to_json()
