"""An engine's channels: each reduces the gradients of one optimizer, bucket by bucket and step by step."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_ext.engine import native, spec
from hvd_ext.engine.native import call as _call
from hvd_ext.errors import InvalidError
from hvd_ext.planning.tensors import DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

    from hvd_ext.planning.layout import BucketLayout, Layout
    from hvd_ext.planning.model import LogicalPlan
    from hvd_ext.planning.tensors import Tensor

    Arrays = Sequence[npt.NDArray[np.generic]]

RESIDUAL, VELOCITY = 0, 1  # the values that a sparse bucket keeps between steps


class OpenChannel(NamedTuple):
    """A channel: its name, each layout that it has had with the number of its first step, and what its rounds are."""

    name: str
    layouts: list[tuple[int, Layout]]
    is_partial: bool

    @property
    def layout(self) -> Layout:
        """The layout of the next step."""
        return self.layouts[-1][1]


class RecentSteps(NamedTuple):
    """The newest complete steps of a channel on this rank, the oldest first.

    Attributes:
        steps: their numbers, int64 [steps].
        begins_s: when they began, by a steady clock of this host, seconds [steps].
        ends_s: when their last bucket had ended, by the same clock [steps].
        arrival_offset_s: how long after its step's begin each of the channel's tensors arrived, s [steps, tensors].
    """

    steps: npt.NDArray[np.int64]
    begins_s: npt.NDArray[np.float64]
    ends_s: npt.NDArray[np.float64]
    arrival_offset_s: npt.NDArray[np.float64]


class ResidualShard(NamedTuple):
    """The elements [begin, begin + elements) of a sparse bucket, whose residual and velocity this rank keeps."""

    begin: int
    elements: int
    has_velocity: bool


class TopKStatistics(NamedTuple):
    """Entries and bytes that this rank has sent for a channel's sparse buckets, and its committed and dropped steps."""

    entries: int
    value_bytes: int
    index_bytes: int
    head_bytes: int
    committed: int
    dropped: int


KEPT_STEPS = 100  # of which the engine keeps the times (kTimesKept of tf_ops/engine/channel.cc)


class Parts:
    """The steps of a channel, tensor by tensor on NumPy arrays; made by `Channels.in_parts`."""

    def __init__(self, channel: int, inputs: Arrays, outputs: Arrays) -> None:
        """Use `Channels.in_parts`, which checks the arrays."""
        self._held = tuple(inputs), tuple(outputs)  # an array with a reference cannot be resized
        self._channel = ctypes.c_int64(channel)
        self._memory = [(ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes)) for array in inputs]
        self._outputs, self._nbytes = _memories(outputs), _sizes(outputs)
        self._ticket = ctypes.c_int64()

    def begin(self) -> None:
        """Begin a step.

        Raises:
            InvalidError: some tensors of the previous step were not submitted.
        """
        _call("hvd_ext_channel_begin_step", self._channel)

    def submit(self, tensor: int) -> None:
        """Hand a tensor over, which is copied; its bucket starts when it is full and in line.

        Args:
            tensor: the tensor's number in the channel, which each step takes once.

        Raises:
            InvalidError: no step is under way, or the tensor was submitted already.
        """
        _call("hvd_ext_channel_submit", self._channel, tensor, *self._memory[tensor], ctypes.byref(self._ticket))

    def collect(self, before: int = 0) -> None:
        """Wait for the results of the step whose tensors were submitted last, and write them to the outputs.

        Args:
            before: 1: of the step before that one.

        Raises:
            CommunicationError: the step has failed on some rank.
        """
        ticket = ctypes.c_int64(self._ticket.value - before)
        _call("hvd_ext_channel_collect", self._channel, ticket, len(self._nbytes), self._outputs, self._nbytes)


class Channels:
    """The part of `hvd_ext.engine.engine.Engine` that opens and runs channels; `channel` is from `open_channel`."""

    generation: int
    channels: dict[int, OpenChannel]

    def __init__(self) -> None:
        self._open: dict[int, OpenChannel] = {}  # by handle
        # by channel and name: from which step on what is called
        self._due: dict[int, dict[str, tuple[int, Callable[[int], None]]]] = {}
        # one for all calls and for good: it must not be freed while it runs
        self._before_step = spec.AT_STEP(self._call_before_step)

    def open_channel(
        self,
        name: str,
        layout: Layout,
        handle_of: Callable[[LogicalPlan], int],
        partial: ctypes.Structure | None = None,
        *,
        on_device: bool = False,
    ) -> int:
        """Open a channel; all ranks open their channels in the same order, with equal arguments.

        Args:
            name: the channel's name in messages.
            layout: the layout of a step. The tensors that are in buckets become the channel's tensors 0, 1, ... in the
                order of the layout.
            handle_of: returns the engine's handle of a plan, which `Engine.add_plan` made.
            partial: what makes its rounds partial (`hvd_ext.engine.partial`); None if steps wait for all ranks.
            on_device: whether its tensors are given and taken in the memory of the engine's GPU.

        Returns:
            The channel's handle.

        Raises:
            InvalidError: the layout breaks a rule of the engine, for example with a tensor in two buckets.
        """
        handle = ctypes.c_int64()
        described = _described(name, layout, handle_of, partial, on_device=on_device)
        _call("hvd_ext_channel_open", self.generation, ctypes.byref(described), ctypes.byref(handle))
        opened = OpenChannel(name, [(1, layout)], partial is not None)
        self.channels[lane_of(handle.value)] = self._open[handle.value] = opened
        return handle.value

    def switch(self, channel: int, layout: Layout, handle_of: Callable[[LogicalPlan], int], first_step: int) -> None:
        """Give a channel another layout, which its next step takes; all ranks do so before the same step.

        The residuals and velocities of all tensors are zero afterwards, until `write_state`. If the channel was opened
        with sparse buckets, its steps still begin with `begin_topk_step`, even where the new layout has none.

        Args:
            layout: a layout in which the same tensors travel.
            handle_of: as `open_channel` takes it.
            first_step: the number of the next step.

        Raises:
            InvalidError: the layout breaks a rule of the engine or has other tensors, a top-k step is under way, or
                the layout has buckets with a selection, and the channel was opened without.
        """
        opened = self.channels[lane_of(channel)]
        _call("hvd_ext_channel_switch", channel, ctypes.byref(_described(opened.name, layout, handle_of)))
        opened.layouts.append((first_step, layout))

    def open_channels(self) -> dict[int, OpenChannel]:
        """Return the channels that are open, by handle."""
        return dict(self._open)

    def at_step(self, channel: int, step: int, call: Callable[[int], None], name: str = "") -> None:
        """Have a function called once, before a step begins.

        Args:
            step: the number of the step, the first of a channel being 1; if it has begun already, the next one.
            call: gets the number of the step that is about to begin, on the thread that begins it. It may use the
                engine and wait for other ranks whose function is called before the same step. It must not raise.
            name: the function replaces the one of this name that was to be called; those of other names stay. Those of
                one step are called in the order of their names.
        """
        self._due.setdefault(channel, {})[name] = step, call
        self._wait_for_due(channel)

    def _wait_for_due(self, channel: int) -> None:
        due = self._due.get(channel)
        if due:
            _call("hvd_ext_channel_at_step", channel, min(step for step, _ in due.values()), self._before_step)

    def _call_before_step(self, channel: int, step: int) -> None:
        due = self._due.get(channel, {})
        for name in sorted(name for name, (first, _) in due.items() if first <= step):
            due.pop(name)[1](step)
        self._wait_for_due(channel)

    def times(self, channel: int, most: int = KEPT_STEPS) -> RecentSteps:
        """Return when the tensors of the newest complete steps came on this rank; the engine notes this always.

        Args:
            most: the largest number of steps, `KEPT_STEPS` or less.
        """
        tensors = len(self.channels[lane_of(channel)].layout.engine_tensors)
        begins_s, ends_s = np.zeros((2, most))
        recent = RecentSteps(np.zeros(most, np.int64), begins_s, ends_s, np.zeros((most, tensors)))
        count, pointers = ctypes.c_int64(), map(native.pointer, recent)
        _call("hvd_ext_channel_times", channel, most, tensors, *pointers, ctypes.byref(count))
        return RecentSteps._make(array[: count.value] for array in recent)

    def close_channel(self, channel: int) -> None:
        """Close a channel; collect operations that still wait fail with `NotInitializedError`.

        Raises:
            InvalidError: there is no such channel.
        """
        _call("hvd_ext_channel_close", channel)
        self._open.pop(channel, None)
        self._due.pop(channel, None)

    def reduce(self, channel: int, inputs: Arrays, outputs: Arrays) -> None:
        """Run a whole step of a channel on NumPy arrays, and wait for all ranks; see `prepare`."""
        self.prepare(channel, inputs, outputs)()

    def prepare(self, channel: int, inputs: Arrays, outputs: Arrays) -> Callable[[], None]:
        """Make ready a whole step of a channel on NumPy arrays that stay where they are.

        Checking the arrays takes Python longer than the engine needs for a step of a few bytes. So they are checked
        once here, and the steps that follow only read and write them.

        Args:
            inputs: one contiguous array per tensor, of its dtype and number of elements.
            outputs: arrays like `inputs` for the results; they may be the same arrays.

        Returns:
            A function that runs a step and waits for all ranks. It raises CommunicationError if the step has failed on
            some rank. If the channel was opened with sparse buckets, call `begin_topk_step` before it and `end_step`
            after it.

        Raises:
            InvalidError: an array is not contiguous, or does not match its tensor.
        """
        self._check_arrays(channel, inputs, outputs)
        numbers = ctypes.c_int64(channel), ctypes.c_int64(len(inputs))
        memories = _memories(inputs), _memories(outputs), _sizes(inputs)
        arrays = tuple(inputs), tuple(outputs)  # an array with a reference cannot be resized
        return native.prepared("hvd_ext_channel_reduce", *numbers, *memories, owners=arrays)

    @contextlib.contextmanager
    def prepared_on_device(self, channel: int, sizes: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Make ready a whole step of a channel with `on_device` on arrays of zeros in the memory of the engine's GPU.

        Args:
            sizes: the bytes of each tensor.

        Yields:
            A function as `prepare` gives it.
        """
        arrays: list[ctypes.c_void_p] = []
        try:
            for nbytes in (*sizes, *sizes):
                arrays.append(ctypes.c_void_p())
                _call("hvd_ext_device_allocate", self.generation, nbytes, ctypes.byref(arrays[-1]))
            inputs, outputs = (
                (ctypes.c_void_p * len(sizes))(*[array.value for array in half])
                for half in (arrays[: len(sizes)], arrays[len(sizes) :])
            )
            numbers = ctypes.c_int64(channel), ctypes.c_int64(len(sizes))
            memories = inputs, outputs, native.int64s(sizes)
            yield native.prepared("hvd_ext_channel_reduce_on_device", *numbers, *memories, owners=arrays)
        finally:
            for array in arrays:
                if array.value:
                    _call("hvd_ext_device_free", self.generation, array)

    def collect(self, channel: int, step: int, outputs: Arrays) -> None:
        """Wait for the results of a step, and take them; each is taken once.

        Args:
            step: the newest step, or the one before it.
            outputs: one contiguous array per tensor, of its dtype and number of elements.

        Raises:
            InvalidError: an array does not match its tensor, or the results are gone.
            CommunicationError: the step has failed on some rank.
        """
        self._check_arrays(channel, outputs, outputs)
        _call("hvd_ext_channel_collect", channel, step, len(outputs), _memories(outputs), _sizes(outputs))

    def give_result(self, channel: int, tensor: int, values: npt.NDArray[np.generic]) -> None:
        """Set what the next collect of a tensor takes, whatever its step.

        Args:
            channel: from `open_channel`; its rounds are not partial.
            tensor: the tensor's number in the channel.
            values: a contiguous array; its bytes are copied.

        Raises:
            InvalidError: there is no such tensor, or the array has not its size.
        """
        memory = ctypes.c_void_p(values.ctypes.data)
        _call("hvd_ext_channel_give_result", channel, tensor, memory, values.nbytes)

    def in_parts(self, channel: int, inputs: Arrays, outputs: Arrays) -> Parts:
        """Make ready steps of a channel whose tensors are handed over one by one; see `prepare`.

        Args:
            channel: from `open_channel`; it has no sparse buckets.
            inputs: one contiguous array per tensor, of its dtype and number of elements.
            outputs: arrays like `inputs` for the results; they may be the same arrays.

        Returns:
            What begins a step, hands over a tensor, and waits for the results.

        Raises:
            InvalidError: an array is not contiguous, or does not match its tensor.
        """
        self._check_arrays(channel, inputs, outputs)
        return Parts(channel, inputs, outputs)

    def _check_arrays(self, channel: int, inputs: Arrays, outputs: Arrays) -> None:
        opened = self.channels[lane_of(channel)]
        name, tensors = opened.name, opened.layout.engine_tensors
        if not len(inputs) == len(outputs) == len(tensors):
            raise InvalidError(
                f"reduce of {name!r}: it takes {len(tensors)} inputs and as many outputs, got {len(inputs)} "
                f"and {len(outputs)}"
            )
        for tensor, *arrays in zip(tensors, inputs, outputs, strict=True):
            for array in arrays:
                check_array(f"reduce of {name!r}", tensor, array)

    def begin_topk_step(self, channel: int, density: float, momentum: float | None = None) -> None:
        """Begin a step of a channel that was opened with sparse buckets, in place of `begin_step`.

        A previous step that `end_step` has not ended is dropped.

        Args:
            density: in [0, 1], equal on all ranks. Of the elements [b, e) of a bucket, K(e) - K(b) are selected, with
                K(x) = floor(density * x + 1/2).
            momentum: in [0, 1), equal on all ranks: of this step, in place of that of the layout; None for that.

        Raises:
            InvalidError: the channel was opened without a sparse bucket, or the previous step is incomplete.
        """
        _call("hvd_ext_channel_begin_topk_step", channel, density, -1.0 if momentum is None else momentum)

    def end_step(self, channel: int, commit: bool) -> None:
        """End the step that `begin_topk_step` has begun.

        Args:
            commit: equal on all ranks. True takes over the residuals and velocities that the step has computed, and
                requires that all results have arrived. False leaves residuals and velocities as they were.

        Raises:
            InvalidError: no such step is under way, or it cannot be committed because a bucket has not succeeded.
        """
        _call("hvd_ext_channel_end_step", channel, int(commit))

    def state(self, channel: int, bucket: int) -> ResidualShard:
        """Return the range of a sparse bucket's elements whose residual this rank keeps.

        Args:
            bucket: the bucket's index.

        Returns:
            The range, and whether the rank keeps a velocity too.

        Raises:
            InvalidError: the bucket is not sparse, or does not exist.
        """
        values = (ctypes.c_int64 * 4)()
        _call("hvd_ext_channel_state", channel, bucket, values)
        return ResidualShard(values[0], values[1], bool(values[2]))

    def read_state(
        self, channel: int, bucket: int, which: int = RESIDUAL, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Copy this rank's residual or velocity of a sparse bucket, between two steps.

        Args:
            bucket: the bucket's index.
            which: `RESIDUAL` or `VELOCITY`.
            out: a contiguous float32 array of the shard's size; None for a new array.

        Returns:
            `out`, or the new array, with the shard's elements in the units of the sums that are selected from.

        Raises:
            InvalidError: a step is under way, there is no velocity, or the array does not fit.
        """
        elements = self.state(channel, bucket).elements
        array = np.empty(elements, np.float32) if out is None else out
        _call("hvd_ext_channel_state_read", channel, bucket, which, _floats(array, elements))
        return array

    def write_state(self, channel: int, bucket: int, which: int, values: npt.NDArray[np.float32]) -> None:
        """Set this rank's residual or velocity of a sparse bucket, between two steps.

        Args:
            bucket: the bucket's index.
            which: `RESIDUAL` or `VELOCITY`.
            values: a contiguous float32 array of the shard's size.

        Raises:
            InvalidError: see `read_state`.
        """
        pointer = _floats(values, self.state(channel, bucket).elements)
        _call("hvd_ext_channel_state_write", channel, bucket, which, pointer)

    def topk_statistics(self, channel: int) -> TopKStatistics:
        """Return how much this rank has sent for a channel's sparse buckets.

        Returns:
            The counters since the channel was opened.
        """
        values = (ctypes.c_int64 * 6)()
        _call("hvd_ext_channel_topk_statistics", channel, values)
        return TopKStatistics(*values)


def check_array(where: str, tensor: Tensor, array: npt.NDArray[np.generic]) -> None:
    """Refuse an array that the engine cannot read or write as a tensor.

    Raises:
        InvalidError: it is not contiguous, or has another size or dtype.
    """
    if array.dtype.name != tensor.dtype or array.size != tensor.elements or not array.flags.c_contiguous:
        raise InvalidError(
            f"{where}, {tensor.name!r}: takes contiguous arrays of {tensor.elements} "
            f"elements of {tensor.dtype}, got {array.size} of {array.dtype.name}"
        )


def lane_of(channel: int) -> int:
    """Return the engine's lane of a channel, by which traces name it.

    Args:
        channel: from `Channels.open_channel`.
    """
    return 1 + (channel & 0xFFFFFFFF)


def _described(
    name: str,
    layout: Layout,
    handle_of: Callable[[LogicalPlan], int],
    partial: ctypes.Structure | None = None,
    *,
    on_device: bool = False,
) -> ctypes.Structure:
    """Describe a channel; see `Channels.open_channel`."""
    tensors = layout.engine_tensors
    buckets = [
        spec.Bucket(
            dtype=DTYPES[bucket.dtype].code,
            wire=-1 if bucket.wire is None else DTYPES[bucket.wire].code,
            op=int(bucket.op),
            plan=handle_of(bucket.plan),
            segment_nbytes=bucket.segment_nbytes,
            n_tensors=len(bucket.tensors),
            tensors=native.int64s([layout.engine_numbers[place] for place in bucket.tensors]),
            sparse=None if bucket.selection is None else ctypes.pointer(_selection(bucket, handle_of)),
        )
        for bucket in layout.buckets
    ]
    return spec.Channel(
        name=name.encode(),
        n_tensors=len(tensors),
        tensor_names=(ctypes.c_char_p * len(tensors))(*[tensor.name.encode() for tensor in tensors]),
        elements=native.int64s([tensor.elements for tensor in tensors]),
        n_buckets=len(buckets),
        buckets=(spec.Bucket * len(buckets))(*buckets),
        partial=None if partial is None else ctypes.pointer(partial),
        on_device=on_device,
    )


def _memories(arrays: Arrays) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


def _sizes(arrays: Arrays) -> ctypes.Array[ctypes.c_int64]:
    return native.int64s([array.nbytes for array in arrays])


def _floats(array: npt.NDArray[np.float32], elements: int) -> Any:
    if array.dtype != np.float32 or array.size != elements or not array.flags.c_contiguous:
        raise InvalidError(
            f"state of a sparse bucket: takes a contiguous array of {elements} elements of float32, got {array.size} "
            f"of {array.dtype.name}"
        )
    return native.pointer(array)


def _selection(bucket: BucketLayout, handle_of: Callable[[LogicalPlan], int]) -> ctypes.Structure:
    selection = bucket.selection
    assert selection is not None
    assert bucket.dense is not None
    values = dataclasses.asdict(selection)
    del values["density"], values["entry_nbytes"]  # for predictions
    values |= {
        "codec": selection.codec.encode(),
        "dense_plan": handle_of(bucket.dense),
        "momentum": selection.momentum or 0.0,
        "has_momentum": selection.momentum is not None,
        "value_wire": -1 if selection.value_wire is None else DTYPES[selection.value_wire].code,
    }
    return spec.filled(spec.Selection, **values)
