"""The layout: one value that says how a step is reduced, with its buckets and each bucket's plan and wire format.

A layout knows neither the engine nor TensorFlow. `hvd_ext.job.runtime` hands its plans to the engine and opens a lane
for it; the ranks compare the results of `described`. As JSON a layout can be written to a file, and forced again from
it: buckets have the names of their tensors there, and plans are made again from the names of their schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_ext.errors import PlanError
from hvd_ext.planning import ir, planner, registry
from hvd_ext.planning.model import LogicalPlan
from hvd_ext.planning.sparse_planner import companion, heights, variants
from hvd_ext.planning.tensors import DTYPES, Tensor
from hvd_ext.topology.tree import Tree

FORMAT = 1  # of the JSON


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
        density: the density of an ordinary step, for predictions; the engine gets the density of each step.
        codec: the name of the codec: a file of hvd_ext/compression.
        entry_nbytes: the mean number of bytes of a value and its index, for predictions.
        bits: of a number of the codec "quantized".
        block: the elements that share a scale, of the same codec.
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
    density: float = 1.0
    codec: str = "topk"
    entry_nbytes: float = 4.0
    bits: int = 8
    block: int = 256


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
    choice: planner.Choice | None = None

    def described(self) -> list[Any]:
        """Return the values that must be the same on all ranks."""
        common = [list(self.tensors), self.plan.algorithm, f"plan {ir.digest(self.plan):016x}", self.segment_nbytes]
        if self.selection is None or self.dense is None:
            return common
        return [*common, f"dense plan {ir.digest(self.dense):016x}", f"dense from {self.selection.dense_above!r}"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a bucketer would have made of a step.

    Args:
        step_s: the predicted time of the step, seconds; None if it does not apply.
        reason: why it does not apply; empty if it does.
    """

    bucketer: str
    step_s: float | None
    buckets: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the gradients of a step are reduced; the same on all ranks.

    Args:
        tensors: the tensors of the step, in the order of the model's layers. Tensors outside all buckets are not sent.
        buckets: the buckets in the order in which they start; a tensor is in at most one.
        bucketer: the name of the bucketer that made the buckets; empty if they were given.
        outcomes: all bucketers that were asked, the chosen one first, then the others by their time; empty if there was
            no choice.
        forms: with `AnyOf` its forms, the chosen one first, each with its time by the cost model, seconds: of the step
            if the times of its tensors are known, else of all bytes in one bucket.
    """

    tensors: tuple[Tensor, ...]
    buckets: tuple[BucketLayout, ...]
    bucketer: str = ""
    outcomes: tuple[Outcome, ...] = ()
    forms: tuple[tuple[str, float], ...] = ()

    @functools.cached_property
    def sent_tensors(self) -> tuple[int, ...]:
        """The ascending places of the tensors that are in a bucket; the engine numbers them from 0 in this order."""
        return tuple(sorted(place for bucket in self.buckets for place in bucket.tensors))

    @functools.cached_property
    def engine_numbers(self) -> dict[int, int]:
        """The engine's number of each tensor that is in a bucket, by its place in the layout."""
        return {place: number for number, place in enumerate(self.sent_tensors)}

    @functools.cached_property
    def engine_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are in a bucket, by the engine's number."""
        return tuple(self.tensors[place] for place in self.sent_tensors)

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

    @functools.cached_property
    def lossy_elements(self) -> int:
        """The number of elements that are not sent as they are."""
        return sum(
            self.tensors[place].elements
            for bucket in self.buckets
            if bucket.wire or (bucket.selection is not None and bucket.selection.dense_above > 0)
            for place in bucket.tensors
        )

    @functools.cached_property
    def form_of(self) -> dict[int, tuple[str | None, Selection | None]]:
        """The form of each tensor on the way, whatever its bucket: the wire, and the selection without its density."""
        return {
            place: (
                bucket.wire,
                bucket.selection and dataclasses.replace(bucket.selection, dense_above=0.0, density=0.0),
            )
            for bucket in self.buckets
            for place in bucket.tensors
        }

    def described(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, bucket by bucket."""
        return {f"bucket {number}": bucket.described() for number, bucket in enumerate(self.buckets)}

    @functools.cached_property
    def digest(self) -> int:
        """A 64-bit hash of the tensors' shapes and dtypes and of the compared values of all buckets."""
        text = repr([[tensor.text for tensor in self.tensors], self.described()])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    @property
    def form_reason(self) -> str:
        """Why the form was chosen, in one line; empty without `AnyOf`."""
        listed = ", ".join(f"{label} {seconds * 1e3:.4g} ms" for label, seconds in self.forms)
        return f"the least lossy near the shortest: {listed}" if listed else ""

    @property
    def reason(self) -> str:
        """Why the bucketer was chosen, in one line; empty if there was no choice."""
        timed = [outcome for outcome in self.outcomes if outcome.step_s is not None]
        listed = ", ".join(
            f"{outcome.bucketer} {(outcome.step_s or 0.0) * 1e3:.4g} ms "
            f"({outcome.buckets} bucket{'s' if outcome.buckets != 1 else ''})"
            for outcome in timed
        )
        return f"the predicted step by bucketer: {listed}" if timed else ""

    def to_json(self) -> dict[str, Any]:
        """Converts the layout to values that JSON can hold; it leaves out why its plans were chosen.

        Raises:
            PlanError: two tensors have the same name.
        """
        _place_of(self.tensors)
        return {
            "format": FORMAT,
            "bucketer": self.bucketer,
            "tensors": {tensor.name: tensor.text for tensor in self.tensors},
            "buckets": [
                {
                    "tensors": [self.tensors[place].name for place in bucket.tensors],
                    "algorithm": bucket.plan.algorithm,
                    "plan": f"{ir.digest(bucket.plan):016x}",
                    "segment_nbytes": bucket.segment_nbytes,
                    "wire": bucket.wire,
                    "selection": bucket.selection and dataclasses.asdict(bucket.selection),
                }
                for bucket in self.buckets
            ],
        }

    @classmethod
    def from_json(
        cls,
        values: Mapping[str, Any],
        tree: Tree,
        tensors: Sequence[Tensor],
        op: int,
        *,
        places: Sequence[int] | None = None,
        source: str = "layout",
    ) -> Layout:
        """Makes a layout from the values of to_json().

        Args:
            tree: the cluster. If it is another one than that of the values, schedules make other plans.
            tensors: the tensors of the step, in the order of the model's layers.
            op: the number of `Sum` or `Average`.
            places: the places of the tensors that are sent, which must be those in the buckets; None to send those.

        Raises:
            PlanError: the values have another format, know a tensor that the step does not have or that has another
                shape or dtype, have it in two buckets, leave one out, or name a plan that there is not.
        """
        try:
            return cls._from_json(values, tree, tuple(tensors), op, places)
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{source}: it is not a layout as hvd_ext writes it ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _from_json(
        cls, values: Mapping[str, Any], tree: Tree, tensors: tuple[Tensor, ...], op: int, places: Sequence[int] | None
    ) -> Layout:
        if values.get("format") != FORMAT:
            raise PlanError(f"format ({values.get('format')!r}): must be {FORMAT}; write the layout again")
        place_of = _place_of(tensors)
        for name, text in values["tensors"].items():
            if name in place_of and tensors[place_of[name]].text != text:
                raise PlanError(f"tensor {name!r}: it is {text} there, and {tensors[place_of[name]].text} here")
        buckets: list[BucketLayout] = []
        seen: dict[int, int] = {}
        for number, bucket in enumerate(values["buckets"]):
            members = []
            for name in bucket["tensors"]:
                if name not in place_of:
                    raise PlanError(f"bucket {number}: the step has no tensor {name!r}")
                place = place_of[name]
                if place in seen:
                    raise PlanError(
                        f"tensor {name!r}: it is in buckets {seen[place]} and {number}; it may be in one only"
                    )
                seen[place] = number
                members.append(place)
            try:
                buckets.append(_bucket_from_json(bucket, tree, tensors, members, op))
            except PlanError as error:
                raise PlanError(f"bucket {number}: {error}") from error
        if places is not None and set(places) != set(seen):
            place = min(set(places) ^ set(seen))
            here = "it is sent, and in no bucket" if place in places else "it is in a bucket, and not sent"
            raise PlanError(f"tensor {tensors[place].name!r}: {here}; the layout belongs to another model or optimizer")
        return cls(tensors, tuple(buckets), str(values.get("bucketer", "")))

    def __str__(self) -> str:
        lines = []
        for number, (bucket, nbytes) in enumerate(zip(self.buckets, self.nbytes, strict=True)):
            form = bucket.dtype if bucket.wire is None else f"{bucket.dtype} as {bucket.wire}"
            count = "1 tensor" if len(bucket.tensors) == 1 else f"{len(bucket.tensors)} tensors"
            words = [f"bucket {number}: {count}, {nbytes} bytes of {form}", bucket.plan.algorithm]
            if bucket.selection is not None and bucket.selection.dense_above > 0:
                words.append(f"dense from a density of {bucket.selection.dense_above:.3g}")
            lines.append(f"{', '.join(words)}, in segments of {bucket.segment_nbytes} bytes")
        return "\n".join(lines) or "no tensors are sent"


def _place_of(tensors: Sequence[Tensor]) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, tensor in enumerate(tensors):
        if places.setdefault(tensor.name, place) != place:
            raise PlanError(f"tensor {tensor.name!r}: two tensors have this name, so that a layout cannot name them")
    return places


def _bucket_from_json(
    values: Mapping[str, Any], tree: Tree, tensors: Sequence[Tensor], members: Sequence[int], op: int
) -> BucketLayout:
    dtypes = {tensors[place].dtype for place in members}
    if len(dtypes) != 1:
        raise PlanError(
            f"its tensors must be of one dtype, at least one tensor; got {', '.join(sorted(dtypes)) or 'none'}"
        )
    dtype = dtypes.pop()
    segment, wire = values["segment_nbytes"], values.get("wire")
    if not isinstance(segment, int) or segment < 1:
        raise PlanError(f"segment_nbytes ({segment!r}): must be a whole number, at least 1")
    if wire is not None and (dtype != "float32" or wire not in ("float16", "bfloat16")):
        raise PlanError(f"wire ({wire!r}): must be null, or 'float16' or 'bfloat16' for float32; the bucket is {dtype}")
    name, selection, dense = str(values["algorithm"]), None, None
    if values.get("selection") is None:
        plan = planner.allreduce_plan(tree, name).plan
    else:
        selection = Selection(**values["selection"])
        nbytes = sum(tensors[place].elements for place in members) * DTYPES[dtype].nbytes
        if dtype != "float32" or (wire is not None and selection.dense_above > 0):
            raise PlanError(f"selection: its tensors must be float32 without a wire; they are {dtype}, wire {wire!r}")
        plan, dense = _sparse_plans(tree, name, str(values.get("plan")))
        segment = max(segment, nbytes)  # a rank's selection and residual belong to one range of the buffer
    return BucketLayout(dtype, tuple(members), op, plan, segment, wire, selection, dense)


def _sparse_plans(tree: Tree, name: str, digest: str) -> tuple[LogicalPlan, LogicalPlan]:
    """Finds the plan with a digest, and its dense companion; on another cluster, the first plan of the schedule."""
    reason = registry.supports(registry.sparse(name), tree)
    if reason is not None:
        raise PlanError(f"algorithm {name!r} on {tree.describe()}: {reason}")
    for height in heights(tree, None):
        dense = companion(tree, name, height)
        for plan in (*variants(tree, name, height), dense):
            if f"{ir.digest(plan):016x}" == digest:
                return plan, dense
    return variants(tree, name, 1)[0], companion(tree, name, 1)
