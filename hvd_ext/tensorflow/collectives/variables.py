"""Broadcasts of variables, at the start of training, so that all ranks train the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, process_sets
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.tensorflow import layers, ops
from hvd_ext.tensorflow.collectives import single
from hvd_ext.tensorflow.collectives.dtypes import MOVED
from hvd_ext.tensorflow.gradients import kinds

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime

# Variables are sent together in pieces of about this size, which needs few calls and little extra memory.
PIECE_NBYTES = 64 << 20


@ops.plain
def broadcast_variables(
    variables: Iterable[Any] | Callable[[], Iterable[Any]] | Any,
    root_rank: int = 0,
    process_set: ProcessSet | None = None,
    inplace: bool = False,
) -> tf.Operation | None:
    """Give all ranks the values that the variables have on one rank; all ranks call it.

    In eager mode the ranks compare the variables' names, shapes and dtypes first; in a `tf.function`, only shapes and
    dtypes.

    Variables know no layers: what a layer has besides its variables stays as it is on each rank (the vocabulary of
    `StringLookup` or `TextVectorization`, the bin boundaries of `Discretization`, the constants that `Normalization`
    computes from its variables in `adapt`). Pass the model, or such a layer, in eager mode: then all ranks get these
    too, and a layer that does not take them is an error on all ranks. A `tf.function` or a `tf.data` pipeline that has
    traced the layer before keeps its constants.

    Args:
        variables: variables of Keras 3, TensorFlow and tf_keras, mixed at will, in the same order on all ranks: an
            iterable, which is read once, or a function that returns one, such as the `variables` of an older optimizer.
            Or a model or layer of Keras, which is built on the root: its weights are sent, and what its layers have
            besides them; its seed generators keep their own state.
        root_rank: the rank whose values all ranks get, counted in the job, also with a process set.
        process_set: the ranks that take part; None for all.
        inplace: accepted for Horovod's sake; either way at most a piece of about 64 MiB is copied at a time.

    Returns:
        None; in a graph of TensorFlow 1, the operation that assigns all variables.

    Raises:
        MismatchError: the ranks have different variables; the message names the first difference and both ranks'
            values. It is raised on all ranks, and no variable is changed. Or a layer does not take the root's state.
        InvalidError: the root is not one of the ranks, a variable's dtype cannot be moved, or a model is sent in a
            `tf.function`.
        CommunicationError: a peer is gone or stayed away.
    """
    where = "broadcast_variables"
    if not layers.is_layer(variables):
        return _broadcast(where, variables, root_rank, process_set, None)
    model: Any = variables
    if not tf.executing_eagerly():
        raise InvalidError(
            f"{where} ({model.name!r}): a model or layer must be sent in eager mode, because a function keeps the "
            "constants of its layers; send it in front of the function, or send its variables"
        )
    layers.send(where, model, root_rank, process_set)
    done = _broadcast(where, layers.weights(model), root_rank, process_set, None)
    layers.refresh(model)
    return done


@ops.plain
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Give all ranks the values that the variables have on one rank, like `broadcast_variables`, and return them.

    Args:
        variables: see `broadcast_variables`.
        root_rank: see `broadcast_variables`.
        name: a name for messages, the same on all ranks.
        process_set: the ranks that take part; None for all.

    Returns:
        The variables' new values.

    Raises:
        MismatchError: the ranks have different variables; raised on all ranks.
        InvalidError: the root is not one of the ranks, or a variable's dtype cannot be moved.
        CommunicationError: a peer is gone or stayed away.
    """
    variables = list(variables)
    done = _broadcast("broadcast_", variables, root_rank, process_set, name)
    with tf.control_dependencies([] if done is None else [done]):
        return [_value(variable) for variable in variables]


@ops.plain
def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Broadcast the global variables of a graph of TensorFlow 1 (`with tf.Graph().as_default()`).

    Args:
        root_rank: the rank whose values all ranks get.

    Returns:
        The operation to run in a session after the variables' initializers.

    Raises:
        InvalidError: there is no graph of TensorFlow 1, and TensorFlow 2 keeps no list of its variables.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or _is_function(graph):
        raise InvalidError(
            "broadcast_global_variables: TensorFlow 2 keeps no list of all variables; say which: "
            "hvd_ext.broadcast_variables([*model.variables, *optimizer.variables], root_rank), or give model.fit the "
            "callback hvd_ext.callbacks.BroadcastGlobalVariablesCallback(root_rank)"
        )
    done = broadcast_variables(tf.compat.v1.global_variables(), root_rank)
    assert done is not None
    return done


def _broadcast(
    where: str, variables: Any, root_rank: int, process_set: ProcessSet | None, name: str | None
) -> tf.Operation | None:
    job = process_sets.member(process_set, where)
    variables = list(variables() if callable(variables) else variables)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise InvalidError(
                f"{where} ({variable!r}): must be a variable; lookup layers of tf_keras have a vocabulary among their "
                "weights: pass the model or layer itself"
            )
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    label = where if name is None else f"{where} {name}"
    if tf.executing_eagerly():
        _agree(job, label, variables, tensors, root_rank)
    done = []
    for dtype, members in _pieces(tensors):
        flat = tf.concat([tf.reshape(tensors[index], [-1]) for index in members], axis=0)
        flat = single.broadcast(flat, root_rank, name=f"{label} {dtype}", process_set=process_set)
        sizes = [tensors[index].shape.num_elements() for index in members]
        for index, part in zip(members, tf.split(flat, sizes), strict=True):
            done.append(variables[index].assign(tf.reshape(part, tensors[index].shape)))
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or _is_function(graph):
        return None
    return tf.group(*done)


def _agree(
    job: Runtime,
    where: str,
    variables: list[Any],
    tensors: list[tf.Tensor],
    root_rank: int,
) -> None:
    def described() -> dict[str, Any]:
        consensus.place_of_root(job.engine, root_rank)
        for variable, tensor in zip(variables, tensors, strict=True):
            if tensor.dtype.name not in MOVED:
                raise InvalidError(
                    f"{where}, {kinds.name(variable)!r}: variables of dtype {tensor.dtype.name} cannot be moved; "
                    f"the dtypes are {', '.join(MOVED)}"
                )
        return {
            "root_rank": {"root_rank": root_rank},
            "tensors": [
                [kinds.name(variable), f"{tensor.dtype.name}{list(tensor.shape)}"]
                for variable, tensor in zip(variables, tensors, strict=True)
            ],
        }

    values = consensus.exchange(job.engine, where, described)
    consensus.check_same(where, [value["root_rank"] for value in values], job.engine.ranks)
    consensus.check_tensors(where, [value["tensors"] for value in values], job.engine.ranks)


def _is_function(graph: Any) -> bool:
    return hasattr(graph, "outer_graph")


def _value(variable: Any) -> tf.Tensor:
    read = getattr(variable, "read_value", None)
    return read() if read is not None else tf.convert_to_tensor(variable)


def _pieces(tensors: list[tf.Tensor]) -> list[tuple[str, list[int]]]:
    """Group the tensors by dtype, in pieces of limited size; a piece is a dtype and the places of its tensors."""
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
