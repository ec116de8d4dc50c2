"""Registration: the ranks agree on the gradients of a channel, once, and then reduce them without negotiation.

A channel is opened by all ranks together. What must agree (names, shapes, dtypes, options, plans) is compared then; a
difference is the same `MismatchError` on all ranks and leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hvd_ext.engine.specs import DTYPES, BucketSpec, TensorSpec
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.options import Options
from hvd_ext.planning import buckets as bucketing
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients.channel import Channel, GradientSpec
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.tensorflow.topk.in_part import InPart

__all__ = ["Channel", "GradientSpec", "open", "wire_of"]

# One name for all channels: ranks that come with different ones meet, and hear what differs.
EXCHANGE = "agreement on gradients"

Groups = int | Sequence[Sequence[int]] | None


@ops.plain
def open(
    name: str,
    specs: Sequence[GradientSpec],
    options: Options | None = None,
    *,
    owner: runtime.Runtime | None = None,
    groups: Groups = None,
    in_part: InPart | None = None,
    facts: Callable[[], dict[str, Any]] | None = None,
    start: SameStart | None = None,
    weights: Weights | None = None,
) -> Channel:
    """Open a channel; all ranks call it, with equal arguments except for `present` and `sparse`.

    It runs eagerly, also while a function is traced.

    Args:
        name: for messages ("Adam"); several channels may have one name.
        specs: the gradients, in the same order on all ranks.
        options: algorithm, bucket_nbytes, op and compression; None for those of the owner.
        owner: the runtime of the ranks that take part; None for that of all ranks.
        groups: a number of groups, or lists of indices into the specs: what travels together
            (`planning.buckets.by_groups`); None: buckets of bucket_nbytes.
        in_part: how a part of the gradients is sent; None: they are sent whole.
        facts: gives what else must be the same on all ranks, by name; what it raises is raised on all ranks.
        start: compares the weights before the first update; None where nobody asks for that.
        weights: what it compares.

    Returns:
        The open channel.

    Raises:
        MismatchError: the ranks disagree; the message names the tensor or option and both ranks' values. It is
            raised on all ranks, and the next collective works.
        InvalidError: a dtype or shape that cannot be reduced, on any rank; raised on all ranks.
        PlanError: the algorithm cannot run on the topology.
        NotInitializedError: before `init()`.
    """
    owner = runtime.current() if owner is None else owner
    options = owner.options if options is None else options
    where = f"channel {name!r}"

    def mine() -> dict[str, Any]:
        given = facts() if facts is not None else {}
        given |= {} if in_part is None else in_part.described()
        sums = None if start is None or weights is None else start.described(weights)
        return {"name": name, "facts": given, "weights": sums, **_described(where, specs, options, groups)}

    values = consensus.exchange(owner.engine, EXCHANGE, mine)
    check_facts(values, owner.engine.ranks)
    where = f"channel {values[0]['name']!r}"  # the verdict has the same words on all ranks
    consensus.check_same(where, [value["options"] for value in values], owner.engine.ranks)
    consensus.check_tensors(where, [value["tensors"] for value in values], owner.engine.ranks)
    if start is not None and weights is not None:
        start.registered([value["weights"] for value in values])
    kinds = joint([value["kinds"] for value in values])
    agreed = tuple(
        dataclasses.replace(spec, present=kind != "-", sparse=kind == "s")
        for spec, kind in zip(specs, kinds, strict=True)
    )
    prepared = None

    def prepare() -> dict[str, Any]:
        nonlocal prepared
        prepared = _Prepared(name, agreed, options, owner, groups, in_part)
        return prepared.described()

    plans = consensus.exchange(owner.engine, f"{EXCHANGE}, plans", prepare)
    consensus.check_same(where, plans, owner.engine.ranks)
    assert prepared is not None
    handle = prepared.open(owner)
    return Channel(name, agreed, options, owner, handle, prepared.buckets, prepared.choices, prepared.sparse)


def check_facts(values: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Compare what must be the same on all ranks.

    Args:
        values: what the ranks sent: "name", the channel's there, and "facts".
        ranks: the job's numbers of these ranks.

    Raises:
        MismatchError: a fact differs; with rank 0's name in its words.
    """
    consensus.check_same(values[0]["name"], [value["facts"] for value in values], ranks)


def joint(ranks: Sequence[str]) -> str:
    """Give what the ranks have together of each gradient.

    Args:
        ranks: for each rank one letter per gradient, `GradientSpec.kind`.

    Returns:
        Per gradient "-" where no rank has it, "s" where all that have it have it sparse, else "d".
    """
    return "".join("d" if "d" in kinds else "s" if "s" in kinds else "-" for kinds in zip(*ranks, strict=True))


class _Prepared:
    """The buckets of a channel and their plans, before it is opened."""

    def __init__(
        self,
        name: str,
        specs: tuple[GradientSpec, ...],
        options: Options,
        owner: runtime.Runtime,
        groups: Groups,
        in_part: InPart | None,
    ) -> None:
        self.included = tuple(index for index, spec in enumerate(specs) if spec.kind == "d")
        self._name = name
        self._specs = specs
        self._options = options
        reduced = self._reduced()
        takes = None if in_part is None else in_part.options.takes
        some = [takes is not None and takes(spec.shape, spec.dtype) for spec in reduced]
        self._buckets = self._planned(groups, None if in_part is None else some)
        self.buckets = tuple(tuple(self.included[tensor] for tensor in bucket.tensors) for bucket in self._buckets)
        self._in_part = [
            None if in_part is None else in_part.planned(owner, bucket, some[bucket.tensors[0]])
            for bucket in self._buckets
        ]
        # a sum that was rounded for the way would lose what error feedback is to keep
        self._wires = [
            wire_of(bucket.dtype, options) if planned is None else None
            for bucket, planned in zip(self._buckets, self._in_part, strict=True)
        ]
        self._plans = [
            owner.allreduce(bucket.nbytes // 2 if wire else bucket.nbytes, options.algorithm)
            if planned is None
            else planned.plan
            for bucket, wire, planned in zip(self._buckets, self._wires, self._in_part, strict=True)
        ]
        self.choices = tuple(
            plan.chosen if planned is None else planned.prepared.chosen
            for plan, planned in zip(self._plans, self._in_part, strict=True)
        )
        self.sparse = tuple(None if planned is None else planned.spec for planned in self._in_part)

    def described(self) -> dict[str, Any]:
        return {
            f"bucket {index}": [
                list(bucket),
                plan.algorithm,
                f"plan {plan.digest:016x}",
                plan.segment_nbytes,
                *([] if planned is None else planned.described()),
            ]
            for index, (bucket, plan, planned) in enumerate(zip(self.buckets, self._plans, self._in_part, strict=True))
        }

    def open(self, owner: runtime.Runtime) -> int:
        return owner.engine.open_channel(
            self._name,
            [TensorSpec(spec.name, spec.elements, spec.dtype) for spec in self._reduced()],
            [
                BucketSpec(bucket.dtype, self._options.op, plan.plan, plan.segment_nbytes, tuple(bucket.tensors), wire)
                for bucket, plan, wire in zip(self._buckets, self._plans, self._wires, strict=True)
            ],
            **({} if not any(self.sparse) else {"sparse": self.sparse}),
        )

    def _planned(self, groups: Groups, some: list[bool] | None) -> tuple[bucketing.Bucket, ...]:
        infos = [bucketing.TensorInfo(spec.name, spec.elements, spec.dtype) for spec in self._reduced()]
        if not infos:
            return ()
        if groups is not None and not isinstance(groups, int):
            place = {index: tensor for tensor, index in enumerate(self.included)}
            groups = [[place[index] for index in group if index in place] for group in groups]
        if some is not None:
            sparse = [index for index, one in enumerate(some) if one]
            return bucketing.apart(infos, sparse, groups, self._options.bucket_nbytes).buckets
        if groups is None:
            return bucketing.by_size(infos, self._options.bucket_nbytes).buckets
        return bucketing.by_groups(infos, groups, self._options.bucket_nbytes).buckets

    def _reduced(self) -> list[GradientSpec]:
        return [self._specs[index] for index in self.included]


def wire_of(dtype: str, options: Options) -> str | None:
    """Give the dtype in which a bucket travels; None for its own: only float32 is compressed.

    Args:
        dtype: of the bucket.
        options: its compression counts.
    """
    return options.compression.value or None if dtype == "float32" else None


def _described(where: str, specs: Sequence[GradientSpec], options: Options, groups: Groups) -> dict[str, Any]:
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise InvalidError(
                f"{where}, {spec.name!r}: gradients of dtype {spec.dtype} cannot be reduced; "
                f"the dtypes are {', '.join(DTYPES)}"
            )
        if not all(isinstance(dimension, int) and dimension >= 0 for dimension in spec.shape):
            raise InvalidError(f"{where}, {spec.name!r}: the shape {spec.shape} must be known")
    return {
        "options": {
            "algorithm": options.algorithm,
            "bucket_nbytes": options.bucket_nbytes,
            "op": options.op.name,
            "compression": options.compression.name,
            "groups": groups if isinstance(groups, int) or groups is None else [list(group) for group in groups],
        },
        "tensors": [[spec.name, spec.text] for spec in specs],
        "kinds": "".join(spec.kind for spec in specs),
    }
