"""A channel: the gradients of one optimizer or tape. The ranks agree on them once and then reduce them every step.

`reduce` makes one op that begins the step, and for each bucket one `collect` and a few `submit`s, so that buckets are
sent while back-propagation still runs (docs/design.md, "Two ops for a list of gradients"). A step whose gradients would
be handed over by one `submit` is one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.job import runtime
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds as gradient_kinds

if TYPE_CHECKING:
    from hvd_ext.engine.partial import Partial
    from hvd_ext.planning.layout import Layout
    from hvd_ext.planning.step_times import StepTimes

# A gradient of this size is handed over alone, as soon as it is there. Smaller ones of a bucket are handed over in one
# op, because the op would cost more than the copy.
ALONE_NBYTES = 64 << 10
# One op hands over no more than this: what it copies when its last gradient comes, back-propagation does not hide.
TOGETHER_NBYTES = 1 << 20


class Channel:
    """The gradients of one optimizer, ready to be reduced every step; made by `registration.open_channel`.

    Attributes:
        name: the channel's name, for messages.
        kinds: the combined kinds of all ranks, one letter for each gradient (`kinds.joint`).
        layout: how the next step is reduced. Its buckets have the dense gradients; sparse gradients are reduced
            separately (`hvd_ext.tensorflow.collectives.sparse`).
        settings: the options that the layout depends on, as text.
        partial: what makes its rounds partial; None if steps wait for all ranks.
        delay: how many steps before its own a step's results are of; `policies.delayed` gives those of the first steps.
        device: TensorFlow's name of the device on which gradients are taken and results given.
        flags: the bits that this rank sends along with partial rounds (`round_flags.RoundFlags`).
        selects: whether some of its gradients have error feedback, at least in the first steps; each step must then
            `begin` with a density and end with `end_step`.
        with_momentum: the places of the tensors that go through momentum correction as long as it is not whole.
        whole: a boolean variable if it can switch to whole gradients (`TopK(until=...)`): whether the step under way
            sends them, once the step has begun; else None.
    """

    def __init__(
        self,
        name: str,
        kinds: str,
        layout: Layout,
        owner: runtime.Runtime,
        handle: int,
        lay_out: Callable[[StepTimes | None, bool], Layout],
        settings: str,
        partial: Partial | None = None,
        delay: int = 0,
        device: str = ops.HOST,
        *,
        until: bool = False,
    ) -> None:
        """Use `registration.open_channel`."""
        self.partial = partial
        self.delay = delay
        self.device = device
        self.name = name
        self.kinds = kinds
        self.layout = layout
        self._lay_out = lay_out
        self.settings = settings
        self.flags = 0
        self._rows: dict[int, tuple[int, tf.Variable]] = {}  # of sparse gradients: the bytes of one, and how many
        self.selects = bool(layout.selected)
        self.with_momentum = layout.with_momentum
        self.whole: tf.Variable | None = None
        if until and self.selects:
            with tf.init_scope(), tf.device(ops.HOST):
                self.whole = tf.Variable(False, trainable=False, name="hvd_ext_topk_whole")
        self._owner = owner
        self._handle: int | None = handle
        # what one op hands over and collects; right in any layout, and made for the first
        self._collected = [bucket.tensors for bucket in layout.buckets]
        self._handed_over = [handed_over(layout, places) for places in self._collected]
        sent = [layout.tensors[place].nbytes for place in layout.sent_tensors]
        is_small = len(sent) == 1 or sum(sent) <= TOGETHER_NBYTES
        self._is_one_op = len(layout.buckets) == 1 and is_small and not (self.selects or delay or partial)

    @property
    def is_open(self) -> bool:
        """Whether the channel was not closed and its engine still runs."""
        return self._handle is not None and self._owner.running

    @property
    def steps(self) -> int:
        """The number of its complete steps on this rank; to be read between two steps."""
        newest = self._owner.engine.times(self.handle, 1).steps
        return int(newest[-1]) if len(newest) else 0

    def count_of_rows(self, place: int, nbytes: int) -> tf.Variable:
        """Give the variable that becomes the number of rows of a sparse gradient, on all ranks.

        Args:
            nbytes: of a row and its index.
        """
        if place not in self._rows:
            with tf.init_scope(), tf.device(ops.HOST):
                self._rows[place] = nbytes, tf.Variable(0, trainable=False, dtype=tf.int64, name="hvd_ext_rows")
        return self._rows[place][1]

    @property
    def rows_nbytes(self) -> int:
        """The bytes of the rows of all sparse gradients, on all ranks, in the newest step that has ended."""
        return sum(nbytes * int(count.numpy()) for nbytes, count in self._rows.values())

    @property
    def is_whole(self) -> bool:
        """Whether it has switched to whole gradients."""
        return self.selects and not self.layout.selected

    def lay_out(self, times: StepTimes | None, whole: bool | None = None) -> Layout:
        """Plan a step; the same on all ranks.

        Args:
            times: the times of its gradients; None if they are not known.
            whole: whether its gradients are sent whole; None: as they are now.
        """
        return self._lay_out(times, self.is_whole if whole is None else whole)

    @ops.plain
    def begin(self, density: tf.Tensor | None = None, momentum: tf.Tensor | None = None) -> list[tf.Operation]:
        """Begin a step, before `reduce`, which does it itself otherwise.

        Args:
            density: a float64 scalar, the same on all ranks: the fraction of elements that is sent. Required if the
                channel `selects`.
            momentum: a float32 scalar, the same on all ranks: of this step; None: that of the layout.

        Returns:
            In a graph the operation, for `reduce`; else an empty list.

        Raises:
            NotInitializedError, CommunicationError: as `reduce`.
        """
        handle = self.handle
        # If a graph has two steps, only this makes the second begin after the first.
        last = list(ops.memory_of_graph().get(("last step", handle), []))
        with ops.translated(), tf.name_scope("hvd_ext_reduce"), tf.control_dependencies(last):
            if self.selects:
                assert density is not None
                begun = ops.begin_topk_step(density, handle, [] if momentum is None else [momentum])
            else:
                begun = ops.begin_step(channel=handle)
        return [] if begun is None else [begun]

    @ops.plain
    def reduce(
        self, gradients: Sequence[tf.Tensor | None] | None, begun: Sequence[tf.Operation] | None = None
    ) -> list[tf.Tensor | None]:
        """Reduce one step's gradients over the ranks; eager, or while a `tf.function` is traced.

        Every rank calls it once per step. A gradient that is None here but present on another rank counts as zeros. The
        results are constants to a gradient tape; use `hvd_ext.allreduce` for a differentiable reduction.

        Args:
            gradients: one dense tensor or None for each of the layout's tensors, of its shape and dtype. None: this
                step has no gradient of this rank; eager only, with partial rounds, where the step's round is over.
            begun: what `begin` has returned; None to begin the step here, if the channel does not `select`.

        Returns:
            The sums or averages, bit-identical on all ranks; None where no rank has the gradient.

        Raises:
            InvalidError: the number, shape or dtype of the gradients is wrong, or there is a gradient that no rank had
                when the channel was opened.
            NotInitializedError: the channel is closed, or hvd_ext was shut down after it was opened.
            CommunicationError: a peer is gone or stayed away; a running `tf.function` raises `tf.errors.UnknownError`.
        """
        handle, tensors = self.handle, self.layout.tensors
        if gradients is None:
            return self._collected_only()
        if len(gradients) != len(tensors):
            raise InvalidError(
                f"channel {self.name!r}: reduce takes one gradient or None for each of its {len(tensors)} tensors; "
                f"got {len(gradients)}"
            )
        ready = [self._ready(place, gradient) for place, gradient in enumerate(gradients)]
        with ops.translated(), tf.name_scope("hvd_ext_reduce"):
            last = ops.memory_of_graph().setdefault(("last step", handle), [])
            if self._is_one_op:
                (places,) = self._collected
                with tf.control_dependencies(last):
                    gradients = [ready[place] for place in places]
                    results = [ops.reduce_step(gradients, handle, self._numbers(places), self.device)]
            else:
                with tf.control_dependencies(self.begin() if begun is None and self._collected else begun or []):
                    # all are handed over before the first is collected: in eager mode a collect waits
                    tickets = [[self._submit(ready, places) for places in lists] for lists in self._handed_over]
                results = [
                    self._collect(of_bucket, places) for places, of_bucket in zip(self._collected, tickets, strict=True)
                ]
            last[:] = [bucket[0] for bucket in results]
        return self._by_place(results)

    @ops.plain
    def end_step(self, ok: tf.Tensor) -> tf.Operation | None:
        """End a step of a channel that `selects`; all ranks call it alike.

        Args:
            ok: a boolean that depends on all results of `reduce`; False restores the residuals and velocities from
                before the step.

        Returns:
            The operation in a graph, else None.

        Raises:
            NotInitializedError: as `reduce`.
        """
        handle = self.handle
        with ops.translated():
            ended = ops.end_step(ok, channel=handle)
        if ended is not None:
            ops.memory_of_graph().setdefault(("last step", handle), []).append(ended)
        return ended

    def switch(self, layout: Layout, first_step: int) -> None:
        """Reduce by another layout from the next step on; all ranks do so before the same step.

        Residuals and velocities are zero afterwards.

        Args:
            layout: a layout of the same tensors.
            first_step: the number of the next step.

        Raises:
            InvalidError, PlanError: the layout cannot be used; see `Engine.switch`.
            NotInitializedError: as `reduce`.
        """
        self._owner.engine.switch(self.handle, layout, self._owner.prepare, first_step)
        self.layout = layout
        if self.whole is not None:
            with tf.init_scope():
                self.whole.assign(self.is_whole)

    def close(self) -> None:
        """Free the channel's buffers; pending collects fail. All ranks close it. A second call does nothing."""
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
        if self._handle is None:
            raise NotInitializedError(f"channel {self.name!r}: it is closed; open it again")
        if not self.is_open:
            raise NotInitializedError(
                f"channel {self.name!r}: hvd_ext was shut down after it was opened; open it again after init()"
            )
        return self._handle

    def _collected_only(self) -> list[tf.Tensor | None]:
        with ops.translated():
            ticket = tf.constant(self._owner.engine.skip_step(self.handle), tf.int64)
            return self._by_place([self._collect([ticket], places) for places in self._collected])

    def _collect(self, tickets: Sequence[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
        """Return the results of a bucket, of `delay` steps before."""
        if self.delay:
            with tf.device(ops.HOST):
                tickets = [ticket - self.delay for ticket in tickets]
        tensors = [self.layout.tensors[place] for place in places]
        shapes = [tensor.shape for tensor in tensors]
        return ops.collect(tickets, tensors[0].dtype, shapes, self.handle, self._numbers(places), self.device)

    def _by_place(self, results: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor | None]:
        """Give one result or None for each of the layout's tensors; `results` are those of each bucket."""
        reduced: list[tf.Tensor | None] = [None] * len(self.layout.tensors)
        for places, bucket in zip(self._collected, results, strict=True):
            for place, result in zip(places, bucket, strict=True):
                reduced[place] = result
        return reduced

    def _submit(self, ready: Sequence[tf.Tensor | None], places: Sequence[int]) -> tf.Tensor:
        return ops.submit([ready[place] for place in places], self.handle, self._numbers(places), self.device)

    def _numbers(self, places: Sequence[int]) -> list[int]:
        return [self.layout.engine_numbers[place] for place in places]

    def _ready(self, place: int, gradient: tf.Tensor | None) -> tf.Tensor | None:
        about, kind = self.layout.tensors[place], self.kinds[place]
        if gradient is None:
            return tf.zeros(about.shape, about.dtype) if place in self.layout.engine_numbers else None
        if kind == gradient_kinds.NONE:
            raise InvalidError(
                f"gradient of {about.name!r}: no rank had it when channel {self.name!r} was opened, and now there is "
                "one; open the channel again on all ranks"
            )
        if isinstance(gradient, tf.IndexedSlices) or kind == gradient_kinds.SPARSE:
            raise InvalidError(
                f"gradient of {about.name!r}: it is an IndexedSlices, or was registered as one, and channels take "
                "dense gradients; make it dense: tf.convert_to_tensor(gradient)"
            )
        if gradient.dtype.name != about.dtype or not gradient.shape.is_compatible_with(about.shape):
            raise InvalidError(
                f"gradient of {about.name!r}: it is {gradient.dtype.name}{list(gradient.shape)}, "
                f"but it was registered as {about.text}"
            )
        return gradient


def handed_over(layout: Layout, places: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide tensors into lists that are handed over by one op each.

    Args:
        layout: has the tensors' sizes.
        places: the tensors of a bucket, in its order, which is the order in which back-propagation ends.

    Returns:
        The places in lists: a tensor of `ALONE_NBYTES` alone, others in lists of at most `TOGETHER_NBYTES`.
    """
    lists: list[tuple[int, ...]] = []
    small: list[int] = []
    room = TOGETHER_NBYTES
    for place in places:
        nbytes = layout.tensors[place].nbytes
        if nbytes >= ALONE_NBYTES:
            lists.append((place,))
            continue
        if nbytes > room:
            lists.append(tuple(small))
            small, room = [], TOGETHER_NBYTES
        small.append(place)
        room -= nbytes
    return [*lists, tuple(small)] if small else lists
