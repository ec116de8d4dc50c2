"""Variables from one rank to all: at the start of training, so that all ranks train the same model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvd_ext import agreement, runtime
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow import collectives, ops

# Variables travel together in pieces of about so many bytes: few calls, and little memory beside the variables'.
PIECE_NBYTES = 64 << 20


@ops.plain
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Give all ranks the values that the variables have on one rank; all ranks call it.

    Run eagerly it compares the variables' names, shapes and dtypes first. In a `tf.function` the calls compare shapes
    and dtypes only.

    Args:
        variables: `keras.Variable` or `tf.Variable`, in the same order on all ranks; an iterable, read once.
        root_rank: whose values all get.

    Raises:
        MismatchError: the ranks have different variables; the message names the first and both ranks' values. It is
            raised on all ranks and changes no variable.
        InvalidError: the root is not a rank, or a variable's dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    job = runtime.current()
    variables = list(variables)
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    if tf.executing_eagerly():
        _agree(job, variables, tensors, root_rank)
    for dtype, members in _pieces(tensors):
        flat = tf.concat([tf.reshape(tensors[index], [-1]) for index in members], axis=0)
        flat = collectives.broadcast(flat, root_rank, name=f"broadcast_variables {dtype}")
        sizes = [tensors[index].shape.num_elements() for index in members]
        for index, part in zip(members, tf.split(flat, sizes), strict=True):
            variables[index].assign(tf.reshape(part, tensors[index].shape))


def _agree(job: runtime.Runtime, variables: list[Any], tensors: list[tf.Tensor], root_rank: int) -> None:
    where = "broadcast_variables"

    def described() -> dict[str, Any]:
        for variable, tensor in zip(variables, tensors, strict=True):
            if tensor.dtype.name not in collectives.MOVED:
                raise InvalidError(
                    f"{where}, {_name(variable)!r}: variables of dtype {tensor.dtype.name} cannot be moved; "
                    f"the dtypes are {', '.join(collectives.MOVED)}"
                )
        return {
            "root_rank": {"root_rank": root_rank},
            "tensors": [
                [_name(variable), f"{tensor.dtype.name}{list(tensor.shape)}"]
                for variable, tensor in zip(variables, tensors, strict=True)
            ],
        }

    values = agreement.exchange(job.engine, where, described)
    agreement.check_same(where, [value["root_rank"] for value in values])
    agreement.check_tensors(where, [value["tensors"] for value in values])


def _pieces(tensors: list[tf.Tensor]) -> list[tuple[str, list[int]]]:
    """Group the tensors by dtype, in pieces of limited size."""
    pieces: list[tuple[str, list[int]]] = []
    open_piece: dict[str, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        dtype = tensor.dtype.name
        members, nbytes = open_piece.get(dtype, ([], 0))
        if not members or nbytes >= PIECE_NBYTES:
            members, nbytes = [], 0
            pieces.append((dtype, members))
        members.append(index)
        open_piece[dtype] = (members, nbytes + tensor.shape.num_elements() * tensor.dtype.size)
    return pieces


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
