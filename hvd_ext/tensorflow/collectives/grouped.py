"""Collectives of several tensors in one call.

The first message of a group describes all its tensors, so that the ranks compare the whole group before they exchange
any of it. An allreduce joins the dense tensors of each dtype; a group of one dtype is therefore a single call of the
engine. Each tensor of an allgather or a reducescatter, and each IndexedSlices, is a call of its own after the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options import Average, Compression, ReduceOp
from hvd_ext.tensorflow.collectives import calls, dtypes, rows, single
from hvd_ext.tensorflow.collectives.calls import Call
from hvd_ext.tensorflow.collectives.dtypes import ALLREDUCED, MOVED, REDUCED
from hvd_ext.tensorflow.collectives.reductions import Reduction
from hvd_ext.tensorflow.ops import plain


@plain
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce several tensors over the ranks; all ranks call it with equal lists. Differentiable.

    Args:
        tensors: dense tensors and `tf.IndexedSlices` of the dtypes of `allreduce`, mixed at will; shapes and dtypes
            must be equal on all ranks. May be empty.
        average: as for `allreduce`, and so are all that follow.

    Returns:
        The results, in the order of the tensors.

    Raises:
        MismatchError: the ranks' lists, op, compression or factors differ; raised on all ranks, before any tensor is
            sent.
        InvalidError: an argument breaks its rule, or a sum does not fit into a narrow dtype.
        CommunicationError: a peer is gone or stayed away.
    """
    kind = "grouped_allreduce"
    with calls.preparing(kind, name, process_set) as call:
        request = Reduction.of(call, op, average, compression, prescale_factor, postscale_factor)
        members = _members(kind, tensors, lambda tensor: _dense_or_sparse(tensor, request.op))
        signature = request.full_signature(kind, *_lines(members))
    results: list[Any] = [None] * len(members)
    by_dtype: dict[str, list[int]] = {}
    for index, tensor in enumerate(members):
        if isinstance(tensor, tf.Tensor):
            by_dtype.setdefault(tensor.dtype.name, []).append(index)
    before: list[Any] = []
    agreed = not by_dtype or any(isinstance(tensor, tf.IndexedSlices) for tensor in members)
    if agreed:
        before = calls.agree(call, signature)
    for dtype, indices in by_dtype.items():
        part = dataclasses.replace(request, call=_part(call, dtype) if agreed else call)
        with tf.control_dependencies(before):
            reduced = _joined(part, [members[i] for i in indices], kind if agreed else signature)
        before, agreed = before or reduced[:1], True
        for index, result in zip(indices, reduced, strict=True):
            results[index] = result
    for index, tensor in enumerate(members):
        if isinstance(tensor, tf.IndexedSlices):
            with tf.control_dependencies(before):
                results[index] = rows.gathered(request, tensor, index)
    return results


@plain
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Join several tensors of all ranks, each along its first dimension; all ranks call it. Differentiable.

    Args:
        tensors: this rank's parts, each as in `allgather`; dtypes may be mixed. May be empty.
        name: as for `allgather`, and so are all that follow.

    Returns:
        The joined tensors, in the order of the parts.

    Raises:
        MismatchError: the ranks' lists differ in more than first dimensions; raised on all ranks, before any tensor is
            sent.
        InvalidError: a tensor is a scalar, or its dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    kind = "grouped_allgather"
    with calls.preparing(kind, name, process_set) as call:
        members = _members(
            kind, tensors, lambda tensor: dtypes.with_rows(kind, dtypes.converted(kind, tensor, MOVED), "joined")
        )
        signature = calls.signature(kind, *_lines(members, free=True))
    return _in_turn(call, members, signature, single.gathered)


@plain
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Compression | None = None,
    op: ReduceOp | None = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Sum or average several tensors over the ranks and keep one part of each; all ranks call it. Differentiable.

    Args:
        tensors: each as in `reducescatter`; dtypes may be mixed, shapes must be equal on all ranks. May be empty.
        device_dense: as for `reducescatter`, and so are all that follow.

    Returns:
        This rank's rows of each result, in the order of the tensors.

    Raises:
        MismatchError: the ranks' lists, op, compression or factors differ; raised on all ranks, before any tensor is
            sent.
        InvalidError: a tensor is a scalar, or its dtype cannot be reduced.
        CommunicationError: a peer is gone or stayed away.
    """
    kind = "grouped_reducescatter"
    with calls.preparing(kind, name, process_set) as call:
        request = Reduction.of(call, op, None, compression, prescale_factor, postscale_factor)
        members = _members(
            kind, tensors, lambda tensor: dtypes.with_rows(kind, dtypes.converted(kind, tensor, REDUCED), "divided")
        )
        signature = request.full_signature(kind, *_lines(members))
    return _in_turn(
        call,
        members,
        signature,
        lambda part, tensor, words: dataclasses.replace(request, call=part).scattered(tensor, words),
    )


def _members(kind: str, tensors: Any, check: Callable[[Any], Any]) -> list[Any]:
    if isinstance(tensors, (tf.Tensor, tf.Variable, tf.IndexedSlices)) or not isinstance(tensors, Iterable):
        raise InvalidError(f"{kind} ({type(tensors).__name__}): takes a list of tensors")
    return [check(tensor) for tensor in tensors]


def _dense_or_sparse(tensor: Any, op: ReduceOp) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(tensor, tf.IndexedSlices):
        return rows.checked("grouped_allreduce", tensor, op)
    return dtypes.converted("grouped_allreduce", tensor, ALLREDUCED)


def _lines(members: list[Any], free: bool = False) -> list[Any]:
    """Describe the tensors of a group; `free`: their first dimensions may differ between ranks, as those of slices."""
    lines: list[Any] = [f"number of tensors {len(members)}"]
    for index, tensor in enumerate(members):
        start = f"tensor {index} "
        if isinstance(tensor, tf.IndexedSlices):
            start, text = f"{start}IndexedSlices of ", calls.described(tensor.values, free=True)
        else:
            text = calls.described(tensor, free)
        lines.append(start + text if isinstance(text, str) else tf.strings.join([start, text]))
    return lines


def _part(call: Call, suffix: str) -> Call:
    return dataclasses.replace(call, name=f"{call.name}/{suffix}")


def _in_turn(
    call: Call, members: list[Any], signature: Any, run: Callable[[Call, Any, Any], tf.Tensor]
) -> list[tf.Tensor]:
    if not members:
        calls.agree(call, signature)
        return []
    first = run(call, members[0], signature)
    with tf.control_dependencies([first]):
        return [first, *(run(_part(call, str(i)), tensor, call.kind) for i, tensor in enumerate(members[1:], 1))]


def _joined(request: Reduction, members: list[tf.Tensor], signature: Any) -> list[tf.Tensor]:
    """Allreduce dense tensors of one dtype as a single tensor."""
    if len(members) == 1:
        return [request.allreduced(members[0], signature=signature)]
    flat = request.allreduced(tf.concat([tf.reshape(tensor, [-1]) for tensor in members], 0), signature=signature)
    sizes = [tensor.shape.num_elements() for tensor in members]
    if None in sizes:
        parts = tf.split(flat, tf.stack([tf.size(tensor) for tensor in members]), num=len(members))
    else:
        parts = tf.split(flat, sizes)
    results = []
    for tensor, part in zip(members, parts, strict=True):
        is_known = tensor.shape.is_fully_defined()
        result = tf.reshape(part, tensor.shape if is_known else tf.shape(tensor))
        results.append(tf.ensure_shape(result, tensor.shape))
    return results
