"""The layout: one value that says how a step is reduced, with its buckets and each bucket's plan and wire format.

A layout knows neither the engine nor TensorFlow. `hvd_ext.job.runtime` hands its plans to the engine and opens a lane
for it; the ranks compare the results of `described`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from hvd_ext.compression import density, selectors
from hvd_ext.compression.momentum import Momentum
from hvd_ext.compression.topk import INDICES, WIRES, TopK
from hvd_ext.planning import buckets, grain, ir, planner
from hvd_ext.planning.choice import Choice
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.tensors import DTYPES, Tensor
from hvd_ext.topology.tree import Tree

Groups = int | Sequence[Sequence[int]] | None

# the mean size of an index as sent: a gap takes two bytes at densities around 0.001, and less at higher densities
_INDEX_NBYTES = 2.0


@dataclasses.dataclass(frozen=True)
class Selection:
    """How the engine selects from a bucket: the selected elements of each sum are sent, the rest stays in the residual.

    A rank keeps the residual and the velocity of the units in its plan's SELECT or FOLD (tf_ops/plan/ir.def). Both are
    on the scale of the sums there.

    Args:
        dense_above: steps of this density and above use the bucket's dense plan; with 0 all steps do.
        selector: the selector's number in the native code (hvd_ext/compression/selectors.py).
        samplings: the number of samplings of MSTopK, at least 1.
        seed: the seed of random selectors.
        threshold: the magnitude from which the threshold selector takes elements.
        momentum: the coefficient in [0, 1) of the velocity that gradients go through first; None for no velocity.
        nesterov: whether the velocity is Nesterov's.
        masks: whether the velocity of sent elements is set to 0.
        value_wire: the dtype in which selected values are sent, "float32", "float16" or "bfloat16"; None for float32.
            float16 is bounded by 65504; the rounding error stays in the residual.
        indices: the encoding of the indices: 0 for the shortest, 1 for int32, 2 for gaps, 3 for a bitmap.
        per_tensor: whether k is divided over the tensors; else one k covers all of them.
    """

    dense_above: float = 1.0
    selector: int = 0
    samplings: int = 30
    seed: int = 0
    threshold: float = 0.0
    momentum: float | None = None
    nesterov: bool = False
    masks: bool = True
    value_wire: str | None = None
    indices: int = 0
    per_tensor: bool = False


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Tensors that are reduced together, and how.

    Args:
        dtype: the dtype of all tensors of the bucket, a key of `DTYPES`.
        tensors: the tensors' places in the layout, in their order in the buffer.
        op: the number of `Sum` or `Average` (tf_ops/kernels/reduce.h).
        plan: the plan of an ordinary step.
        segment_nbytes: the grain of pipelining in bytes sent, at least 1.
        wire: the dtype in which float32 is sent, "float16" or "bfloat16"; None for the bucket's own dtype.
        selection: how elements are selected; None to send all elements.
        dense: the plan of a step in which nothing is selected; None without a selection.
        choice: the planner's choice of the plan; None if the plan was given.
    """

    dtype: str
    tensors: tuple[int, ...]
    op: int
    plan: LogicalPlan
    segment_nbytes: int
    wire: str | None = None
    selection: Selection | None = None
    dense: LogicalPlan | None = None
    choice: Choice | None = None

    def described(self) -> list[Any]:
        """Return the values that must be the same on all ranks."""
        common = [list(self.tensors), self.plan.algorithm, f"plan {ir.digest(self.plan):016x}", self.segment_nbytes]
        if self.selection is None or self.dense is None:
            return common
        return [*common, f"dense plan {ir.digest(self.dense):016x}", f"dense from {self.selection.dense_above!r}"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the gradients of a step are reduced; the same on all ranks.

    Args:
        tensors: the tensors of the step, in the order of the model's layers. Tensors outside all buckets are not sent.
        buckets: the buckets in the order in which they start; a tensor is in at most one.
    """

    tensors: tuple[Tensor, ...]
    buckets: tuple[BucketLayout, ...]

    @functools.cached_property
    def travelling(self) -> tuple[int, ...]:
        """The ascending places of the tensors that are in a bucket; the engine numbers them from 0 in this order."""
        return tuple(sorted(place for bucket in self.buckets for place in bucket.tensors))

    @functools.cached_property
    def nbytes(self) -> tuple[int, ...]:
        """The size of each bucket in memory."""
        return tuple(sum(self.tensors[place].nbytes for place in bucket.tensors) for bucket in self.buckets)

    @functools.cached_property
    def largest(self) -> BucketLayout | None:
        """The bucket with the most bytes; None if there is no bucket."""
        return self.buckets[self.nbytes.index(max(self.nbytes))] if self.buckets else None

    @functools.cached_property
    def selected(self) -> frozenset[int]:
        """The places of the tensors with error feedback."""
        return frozenset(place for bucket in self.buckets if bucket.selection for place in bucket.tensors)

    @functools.cached_property
    def with_momentum(self) -> frozenset[int]:
        """The places of the tensors whose gradients go through momentum correction before they are sent."""
        return frozenset(
            place
            for bucket in self.buckets
            if bucket.selection is not None and bucket.selection.momentum is not None
            for place in bucket.tensors
        )

    def described(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, bucket by bucket."""
        return {f"bucket {number}": bucket.described() for number, bucket in enumerate(self.buckets)}

    @functools.cached_property
    def digest(self) -> int:
        """A 64-bit hash of the tensors' shapes and dtypes and of the compared values of all buckets."""
        text = repr([[tensor.text for tensor in self.tensors], self.described()])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def __str__(self) -> str:
        lines = []
        for number, (bucket, nbytes) in enumerate(zip(self.buckets, self.nbytes, strict=True)):
            form = bucket.dtype if bucket.wire is None else f"{bucket.dtype} as {bucket.wire}"
            count = "1 tensor" if len(bucket.tensors) == 1 else f"{len(bucket.tensors)} tensors"
            words = [f"bucket {number}: {count}, {nbytes} bytes of {form}", bucket.plan.algorithm]
            if bucket.selection is not None and bucket.selection.dense_above > 0:
                words.append(f"dense from a density of {bucket.selection.dense_above:.3g}")
            lines.append(f"{', '.join(words)}, in segments of {bucket.segment_nbytes} bytes")
        return "\n".join(lines) or "nothing travels"


def layout(
    tree: Tree,
    tensors: Sequence[Tensor],
    op: int,
    *,
    algorithm: str = "auto",
    bucket_nbytes: int = buckets.DEFAULT_BUCKET_NBYTES,
    wire: str | None = None,
    groups: Groups = None,
    places: Sequence[int] | None = None,
    topk: TopK | None = None,
    sparse_algorithm: str = "hitopk",
    momentum: Momentum | None = None,
) -> Layout:
    """Lay out a step: divide its tensors into buckets, and choose a plan for each.

    Args:
        tree: the cluster.
        tensors: the tensors of the step, of dtypes of `DTYPES`, in the order of the model's layers.
        op: the number of `Sum` or `Average`.
        algorithm: a schedule's name or "auto", for buckets without a selection.
        bucket_nbytes: the size that a bucket should have.
        wire: the dtype in which float32 is sent in these buckets; None for float32.
        groups: a number of groups, or lists of places of tensors that share a bucket (`planning.buckets.by_groups`);
            None for buckets of bucket_nbytes.
        places: the places of the tensors that are sent; None for all.
        topk: how top-k gradients are selected; None to send all gradients whole.
        sparse_algorithm: the algorithm of the buckets with top-k gradients.
        momentum: the momentum correction that top-k gradients go through; with it all float32 gradients do.

    Raises:
        PlanError: there is no such algorithm, or it cannot run on the cluster.
    """
    travelling = range(len(tensors)) if places is None else places
    planned: list[BucketLayout] = []
    for dtype, members in _divided(tensors, travelling, groups, bucket_nbytes, topk):
        nbytes = sum(tensors[place].nbytes for place in members)
        first = tensors[members[0]]
        selects = topk is not None and topk.takes(first.shape, first.dtype)
        if topk is not None and dtype == "float32" and (selects or momentum is not None):
            choice = _sparse_choice(tree, nbytes, topk, sparse_algorithm)
            assert choice.dense is not None
            plan = choice.plan if selects else choice.dense
            selection = _selection(topk, momentum, choice.dense_above if selects else 0.0)
            segment = grain.segment_nbytes(plan, nbytes, tree)
            # no wire: rounding a sum for sending would lose what error feedback must keep
            planned.append(BucketLayout(dtype, members, op, plan, segment, None, selection, choice.dense, choice))
        else:
            halved = wire if dtype == "float32" else None
            sent = nbytes // 2 if halved else nbytes
            choice = planner.allreduce_plan(tree, algorithm, nbytes=sent)
            segment = grain.segment_nbytes(choice.plan, sent, tree)
            planned.append(BucketLayout(dtype, members, op, choice.plan, segment, halved, choice=choice))
    return Layout(tuple(tensors), tuple(planned))


def _divided(
    tensors: Sequence[Tensor], places: Sequence[int], groups: Groups, bucket_nbytes: int, topk: TopK | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Divide the tensors that are sent into buckets; return each bucket's dtype and the places of its tensors."""
    some = [tensors[place] for place in places]
    if not some:
        return []
    if groups is not None and not isinstance(groups, int):
        number = {place: index for index, place in enumerate(places)}
        groups = [[number[place] for place in group if place in number] for group in groups]
    selected = None
    if topk is not None:
        selected = [index for index, tensor in enumerate(some) if topk.takes(tensor.shape, tensor.dtype)]
    found = buckets.plan(buckets.Request(some, bucket_nbytes, groups, selected))
    return [(bucket.dtype, tuple(places[index] for index in bucket.tensors)) for bucket in found.buckets]


def _sparse_choice(tree: Tree, nbytes: int, topk: TopK, algorithm: str) -> Choice:
    usual = density.schedule(topk).densities[-1]
    entry_nbytes = DTYPES[WIRES[topk.wire]].nbytes + _INDEX_NBYTES
    return planner.sparse_plan(tree, algorithm, nbytes, usual, entry_nbytes, height=topk.height)


def _selection(topk: TopK, momentum: Momentum | None, dense_above: float) -> Selection:
    """Convert the user's options to the engine's."""
    wire, selector = WIRES[topk.wire], selectors.find(topk.selector).number
    assert selector is not None  # TopK takes the native selectors only
    return Selection(
        dense_above=dense_above,
        selector=selector,
        samplings=topk.samplings,
        seed=topk.seed,
        threshold=topk.threshold,
        momentum=None if momentum is None else momentum.value,
        nesterov=momentum is not None and momentum.nesterov,
        masks=topk.masks,
        value_wire=None if wire == "float32" else wire,
        indices=INDICES.index(topk.indices),
        per_tensor=topk.per_tensor,
    )
