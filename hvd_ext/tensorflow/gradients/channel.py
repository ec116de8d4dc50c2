"""A channel: the gradients of one optimizer or tape, agreed over the ranks once and then reduced every step.

Made by `registration.open`. A step is `reduce`: one op that begins the step, one `submit` per gradient and one
`collect` per gradient, so that buckets travel while back-propagation still runs (docs/design.md, "two ops per
gradient").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from hvd_ext.engine.specs import DTYPES
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.job import runtime
from hvd_ext.options import Options
from hvd_ext.tensorflow import ops

if TYPE_CHECKING:
    from hvd_ext.engine.specs import SparseBucket
    from hvd_ext.planning.planner import Chosen
    from hvd_ext.planning.sparse_planner import SparseChosen


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """One gradient of a channel.

    Args:
        name: the variable's path; it should be the same on all ranks and is compared.
        shape: the gradient's shape, fully known.
        dtype: NumPy's name of its dtype ("float32", "bfloat16", ...).
        present: whether this rank has the gradient (its variable is used by the loss).
        sparse: whether it has it as `tf.IndexedSlices`; such gradients are agreed with the others, but travel apart
            (`hvd_ext.tensorflow.collectives.sparse`) where no rank has a dense one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    present: bool = True
    sparse: bool = False

    @property
    def kind(self) -> str:
        """What this rank has: "-" nothing, "d" a dense gradient, "s" a sparse one."""
        return ("s" if self.sparse else "d") if self.present else "-"

    @property
    def text(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def elements(self) -> int:
        """The number of elements."""
        product = 1
        for dimension in self.shape:
            product *= dimension
        return product


class Channel:
    """The gradients of one optimizer, ready to be reduced every step; made by `registration.open`.

    Attributes:
        name: the channel's name, for messages.
        specs: the agreed gradients; `present` now says whether any rank has it, and `sparse` that no rank has a dense
            one.
        options: the options it was opened with.
        buckets: which gradients travel together: tuples of indices into `specs`, in the order in which they travel.
        choices: for each bucket the chosen plan with its algorithm and the reason (`planning.planner.Chosen`).
        sparse: for each bucket what the engine was told about sending a part of it; None: it is sent whole.
    """

    def __init__(
        self,
        name: str,
        specs: tuple[GradientSpec, ...],
        options: Options,
        owner: runtime.Runtime,
        handle: int,
        buckets: tuple[tuple[int, ...], ...],
        choices: tuple[Chosen | SparseChosen | None, ...],
        sparse: tuple[SparseBucket | None, ...] = (),
    ) -> None:
        """Use `registration.open`."""
        self.name = name
        self.specs = specs
        self.options = options
        self.buckets = buckets
        self.choices = choices
        self.sparse = sparse or (None,) * len(buckets)
        self._owner = owner
        self._handle: int | None = handle
        included = sorted(index for bucket in buckets for index in bucket)
        self._tensor_of = {index: tensor for tensor, index in enumerate(included)}

    @property
    def chosen(self) -> Chosen | SparseChosen | None:
        """The choice for the largest bucket (algorithm, why); None where no rank has any gradient."""
        return self.choices[self.nbytes.index(max(self.nbytes))] if self.choices else None

    @property
    def nbytes(self) -> tuple[int, ...]:
        """The size of each bucket in memory."""
        return tuple(sum(_nbytes(self.specs[index]) for index in bucket) for bucket in self.buckets)

    @property
    def is_open(self) -> bool:
        """Whether the channel can reduce: not closed, and its engine still runs."""
        return self._handle is not None and _runs(self._owner)

    @property
    def has_state(self) -> bool:
        """Whether a part of its gradients waits on the ranks between steps: each step then ends with `end_step`."""
        return any(bucket is not None for bucket in self.sparse)

    @property
    def with_momentum(self) -> frozenset[int]:
        """The indices of the gradients that go through a momentum before they are sent."""
        buckets = zip(self.buckets, self.sparse, strict=True)
        return frozenset(
            index for bucket, spec in buckets if spec is not None and spec.momentum is not None for index in bucket
        )

    @ops.plain
    def reduce(self, gradients: Sequence[tf.Tensor | None], density: tf.Tensor | None = None) -> list[tf.Tensor | None]:
        """Reduce one step's gradients over the ranks; eager, or while a `tf.function` is traced.

        Every rank calls it once per step. Gradients that are None here but present elsewhere count as zeros. A tape
        takes the results for constants: use `hvd_ext.allreduce` for what shall be differentiated.

        Args:
            gradients: one dense tensor or None per spec, of the spec's shape and dtype.
            density: float64, the same on all ranks: the part that is sent, where a part is.

        Returns:
            The sums or averages, bit-identical on all ranks; None where no rank has the gradient.

        Raises:
            InvalidError: a wrong number of gradients, a wrong shape or dtype, or a gradient that no rank had when the
                channel was opened.
            NotInitializedError: the channel is closed, or hvd_ext was shut down after it was opened.
            CommunicationError: a peer is gone or stayed away. In a running `tf.function`: `tf.errors.UnknownError`.
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
                if self.has_state:
                    assert density is not None
                    begin = ops.begin_sparse_step(density, channel=handle)
                else:
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

    @ops.plain
    def end_step(self, ok: tf.Tensor) -> tf.Operation | None:
        """End a step of a channel that `has_state`; all ranks call it alike.

        Args:
            ok: a boolean that depends on all that `reduce` gave; False: what the ranks keep is as before the step.

        Returns:
            The operation, in a graph.

        Raises:
            NotInitializedError: as `reduce`.
        """
        handle = self._checked_handle()
        with ops.translated():
            ended = ops.end_step(ok, channel=handle)
        if ended is not None:
            ops.memory_of_graph().setdefault(("last step", handle), []).append(ended)
        return ended

    def close(self) -> None:
        """Give the channel's buffers back; collects that still wait fail. All ranks close it. Again: nothing."""
        if self.is_open:
            assert self._handle is not None
            self._owner.engine.close_channel(self._handle)
        self._handle = None

    @property
    def handle(self) -> int:
        """The engine's handle.

        Raises:
            NotInitializedError: the channel is closed, or hvd_ext was shut down after it was opened.
        """
        return self._checked_handle()

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
            return tf.zeros(spec.shape, spec.dtype) if index in self._tensor_of else None
        if not spec.present:
            raise InvalidError(
                f"gradient of {spec.name!r}: no rank had it when channel {self.name!r} was opened, and now there is "
                "one; open the channel again on all ranks"
            )
        if isinstance(gradient, tf.IndexedSlices) or spec.sparse:
            raise InvalidError(
                f"gradient of {spec.name!r}: it is an IndexedSlices, or was registered as one, and channels take dense "
                "gradients; make it dense: tf.convert_to_tensor(gradient)"
            )
        if gradient.dtype.name != spec.dtype or not gradient.shape.is_compatible_with(spec.shape):
            raise InvalidError(
                f"gradient of {spec.name!r}: it is {gradient.dtype.name}{list(gradient.shape)}, "
                f"but it was registered as {spec.text}"
            )
        return gradient


def _runs(owner: runtime.Runtime) -> bool:
    """Whether it is the job's runtime, or that of a process set which is still there."""
    job = runtime.current_or_none()
    return job is not None and (job is owner or any(one._runtime is owner for one in job.process_sets.values()))


def _nbytes(spec: GradientSpec) -> int:
    return spec.elements * DTYPES[spec.dtype].nbytes
