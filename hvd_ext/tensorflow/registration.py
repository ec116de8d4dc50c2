"""Channels: the gradients of one optimizer, agreed over the ranks once and then reduced every step without negotiation.

A channel is opened by all ranks together. What must agree (names, shapes, dtypes, options, plans) is compared then; a
difference is the same `MismatchError` on all ranks and leaves nothing behind. Afterwards a step is `reduce`: one op
that begins the step, one `submit` per gradient and one `collect` per gradient, so that buckets travel while
back-propagation still runs (docs/design.md, "two ops per gradient").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext import agreement, runtime
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.options import Options
from hvd_ext.planning import buckets as bucketing
from hvd_ext.specs import DTYPES, BucketSpec, TensorSpec
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.planning.planner import Chosen


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """One gradient of a channel.

    Args:
        name: the variable's path; it should be the same on all ranks and is compared.
        shape: the gradient's shape, fully known.
        dtype: NumPy's name of its dtype ("float32", "bfloat16", ...).
        present: whether this rank has the gradient (its variable is used by the loss).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    present: bool = True

    @property
    def elements(self) -> int:
        """The number of elements."""
        product = 1
        for dimension in self.shape:
            product *= dimension
        return product


class Channel:
    """The gradients of one optimizer, ready to be reduced every step; made by `open`.

    Attributes:
        name: the channel's name, for messages.
        specs: the agreed gradients; `present` now says whether any rank has it.
        options: the options it was opened with.
        buckets: which gradients travel together: tuples of indices into `specs`, in the order in which they travel.
        choices: for each bucket the chosen plan with its algorithm and the reason (`planning.planner.Chosen`).
    """

    def __init__(
        self,
        name: str,
        specs: tuple[GradientSpec, ...],
        options: Options,
        owner: runtime.Runtime,
        prepared: _Prepared,
    ) -> None:
        """Use `open`."""
        self.name = name
        self.specs = specs
        self.options = options
        self.buckets = prepared.buckets
        self.choices = prepared.choices
        self._owner = owner
        self._handle: int | None = prepared.open(owner)
        self._tensor_of = {index: tensor for tensor, index in enumerate(prepared.included)}

    @property
    def chosen(self) -> Chosen | None:
        """The choice for the largest bucket (algorithm, why); None where no rank has any gradient."""
        if not self.choices:
            return None
        sizes = [sum(_nbytes(self.specs[index]) for index in bucket) for bucket in self.buckets]
        return self.choices[sizes.index(max(sizes))]

    @property
    def is_open(self) -> bool:
        """Whether the channel can reduce: not closed, and its engine still runs."""
        return self._handle is not None and runtime.current_or_none() is self._owner

    @ops.plain
    def reduce(self, gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Reduce one step's gradients over the ranks; eager, or while a `tf.function` is traced.

        Every rank calls it once per step. Gradients that are None here but present elsewhere count as zeros. A tape
        takes the results for constants: use `hvd_ext.allreduce` for what shall be differentiated.

        Args:
            gradients: one dense tensor or None per spec, of the spec's shape and dtype.

        Returns:
            The sums or averages, bit-identical on all ranks; None where no rank has the gradient.

        Raises:
            InvalidError: a wrong number of gradients, a wrong shape or dtype, or a gradient that no rank had when the
                channel was opened.
            NotInitializedError: the channel is closed, or hvd_ext was shut down after it was opened.
            CommunicationError: a peer is gone or stayed away. In a running `tf.function`: `tf.errors.UnavailableError`.
        """
        handle = self._checked_handle()
        if len(gradients) != len(self.specs):
            raise InvalidError(
                f"channel {self.name!r}: reduce takes one gradient or None for each of its {len(self.specs)} tensors; "
                f"got {len(gradients)}"
            )
        tensors = {index: self._ready(index, gradient) for index, gradient in enumerate(gradients)}
        order = [index for bucket in self.buckets for index in bucket]
        reduced: list[tf.Tensor | None] = [None] * len(self.specs)
        if not order:
            return reduced
        with ops.translated(), tf.name_scope("hvd_ext_reduce"):
            # Two steps in one graph: the second begins after the first, which nothing else would order.
            last = ops.memory_of_graph().setdefault(("last step", handle), [])
            with tf.control_dependencies(list(last)):
                begin = ops.begin_step(channel=handle)
            with tf.control_dependencies([begin] if begin is not None else []):
                tickets = [ops.submit(tensors[index], channel=handle, tensor=self._tensor_of[index]) for index in order]
            for index, ticket in zip(order, tickets, strict=True):
                spec = self.specs[index]
                reduced[index] = ops.collect(
                    ticket, spec.dtype, shape=spec.shape, channel=handle, tensor=self._tensor_of[index]
                )
            last[:] = [reduced[index] for index in order]
        return reduced

    def close(self) -> None:
        """Give the channel's buffers back; collects that still wait fail. All ranks close it. Again: nothing."""
        if self.is_open:
            assert self._handle is not None
            self._owner.engine.close_channel(self._handle)
        self._handle = None

    def _checked_handle(self) -> int:
        if self._handle is None:
            raise NotInitializedError(f"channel {self.name!r}: it is closed; open it again")
        if not self.is_open:
            raise NotInitializedError(
                f"channel {self.name!r}: hvd_ext was shut down after it was opened; open it again after init()"
            )
        return self._handle

    def _ready(self, index: int, gradient: tf.Tensor | None) -> tf.Tensor | None:
        spec = self.specs[index]
        if gradient is None:
            return tf.zeros(spec.shape, spec.dtype) if spec.present else None
        if not spec.present:
            raise InvalidError(
                f"gradient of {spec.name!r}: no rank had it when channel {self.name!r} was opened, and now there is "
                "one; open the channel again on all ranks"
            )
        if isinstance(gradient, tf.IndexedSlices):
            raise InvalidError(
                f"gradient of {spec.name!r}: it is an IndexedSlices; make it dense: tf.convert_to_tensor(gradient)"
            )
        if gradient.dtype.name != spec.dtype or not gradient.shape.is_compatible_with(spec.shape):
            raise InvalidError(
                f"gradient of {spec.name!r}: it is {gradient.dtype.name}{list(gradient.shape)}, "
                f"but it was registered as {_text(spec)}"
            )
        return gradient


@ops.plain
def open(name: str, specs: Sequence[GradientSpec], options: Options | None = None) -> Channel:
    """Open a channel; all ranks call it, with equal arguments except for `present`. Runs eagerly, also while tracing.

    Args:
        name: for messages ("Adam"); several channels may have one name.
        specs: the gradients, in the same order on all ranks.
        options: algorithm, bucket_nbytes, op and compression; None for those of `init`.

    Returns:
        The open channel.

    Raises:
        MismatchError: the ranks disagree; the message names the tensor or option and both ranks' values. It is
            raised on all ranks, and the next collective works.
        InvalidError: a dtype or shape that cannot be reduced, on any rank; raised on all ranks.
        PlanError: the algorithm cannot run on the topology.
        NotInitializedError: before `init()`.
    """
    owner = runtime.current()
    options = owner.options if options is None else options
    where = f"channel {name!r}"
    values = agreement.exchange(owner.engine, where, lambda: _described(where, specs, options))
    agreement.check_same(where, [value["options"] for value in values])
    agreement.check_tensors(where, [value["tensors"] for value in values])
    present = [any(value["present"][index] for value in values) for index in range(len(specs))]
    agreed = tuple(dataclasses.replace(spec, present=here) for spec, here in zip(specs, present, strict=True))
    prepared, digests = None, []

    def prepare() -> dict[str, Any]:
        nonlocal prepared
        prepared = _Prepared(name, agreed, options, owner)
        return prepared.described()

    digests = agreement.exchange(owner.engine, f"{where} plans", prepare)
    agreement.check_same(where, digests)
    assert prepared is not None
    return Channel(name, agreed, options, owner, prepared)


class _Prepared:
    """The buckets of a channel and their plans, before it is opened."""

    def __init__(self, name: str, specs: tuple[GradientSpec, ...], options: Options, owner: runtime.Runtime) -> None:
        self.included = tuple(index for index, spec in enumerate(specs) if spec.present)
        self._name = name
        self._specs = specs
        self._options = options
        infos = [bucketing.TensorInfo(spec.name, spec.elements, spec.dtype) for spec in self._present()]
        self._buckets = bucketing.by_size(infos, options.bucket_nbytes).buckets if infos else ()
        self.buckets = tuple(tuple(self.included[tensor] for tensor in bucket.tensors) for bucket in self._buckets)
        self._wires = [wire_of(bucket.dtype, options) for bucket in self._buckets]
        self._plans = [
            owner.allreduce(bucket.nbytes // 2 if wire else bucket.nbytes, options.algorithm)
            for bucket, wire in zip(self._buckets, self._wires, strict=True)
        ]
        self.choices = tuple(plan.chosen for plan in self._plans)

    def described(self) -> dict[str, Any]:
        return {
            f"bucket {index}": [list(bucket), plan.algorithm, f"plan {plan.digest:016x}", plan.segment_nbytes]
            for index, (bucket, plan) in enumerate(zip(self.buckets, self._plans, strict=True))
        }

    def open(self, owner: runtime.Runtime) -> int:
        return owner.engine.open_channel(
            self._name,
            [TensorSpec(spec.name, spec.elements, spec.dtype) for spec in self._present()],
            [
                BucketSpec(bucket.dtype, self._options.op, plan.plan, plan.segment_nbytes, tuple(bucket.tensors), wire)
                for bucket, plan, wire in zip(self._buckets, self._plans, self._wires, strict=True)
            ],
        )

    def _present(self) -> list[GradientSpec]:
        return [self._specs[index] for index in self.included]


def wire_of(dtype: str, options: Options) -> str | None:
    """Give the dtype in which a bucket travels; None for its own: only float32 is compressed.

    Args:
        dtype: of the bucket.
        options: its compression counts.
    """
    return options.compression.value or None if dtype == "float32" else None


def _described(where: str, specs: Sequence[GradientSpec], options: Options) -> dict[str, Any]:
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
        },
        "tensors": [[spec.name, _text(spec)] for spec in specs],
        "present": [bool(spec.present) for spec in specs],
    }


def _text(spec: GradientSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _nbytes(spec: GradientSpec) -> int:
    return spec.elements * DTYPES[spec.dtype].nbytes
