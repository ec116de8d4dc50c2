"""Checks of the rows of the collectives: called with Horovod's argument names, on any number of ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import hvd_ext as hvd
import hvd_ext.keras as keras_face
from tests.ranks.migration.registry import check, compare, evens, every, in_evens, mine, same


def total(salt: int = 0) -> np.ndarray:
    return np.sum(every(salt), axis=0)


def mean(salt: int = 0) -> np.ndarray:
    return total(salt) / hvd.size()


def even_total() -> np.ndarray:
    return np.sum(every(ranks=list(evens().ranks)), axis=0)


def joined(salt: int = 0) -> np.ndarray:
    return np.concatenate(every(salt))


def even_joined() -> np.ndarray:
    return np.concatenate(every(ranks=list(evens().ranks)))


def square(salt: int = 0) -> np.ndarray:
    """As many rows as ranks."""
    return mine(salt, (hvd.size(), 2))


def my_row(salt: int = 0) -> np.ndarray:
    return np.sum(every(salt, (hvd.size(), 2)), axis=0)[hvd.rank() : hvd.rank() + 1]


def even_square() -> np.ndarray:
    return mine(0, (evens().size(), 2))


def my_even_row() -> np.ndarray:
    place = evens().rank()
    return np.sum(every(0, (evens().size(), 2), list(evens().ranks)), axis=0)[place : place + 1]


def exchanged(salt: int = 0) -> np.ndarray:
    """What alltoall of two equal rows to each rank gives."""
    rows = every(salt, (2 * hvd.size(), 1))
    return np.concatenate([part[2 * hvd.rank() : 2 * hvd.rank() + 2] for part in rows])


S, A = hvd.Sum, hvd.Average

compare(
    {
        "allreduce": lambda: (hvd.allreduce(mine(), None, "", "", hvd.Compression.none, S, 0.5, 4.0, "n"), 2 * total()),
        "allreduce(tensor)": lambda: (hvd.allreduce(tensor=mine()), mean()),
        "allreduce(value)": lambda: (keras_face.allreduce(value=mine(), name="v"), mean()),
        "allreduce(average)": lambda: (hvd.allreduce(mine(), average=False), total()),
        "allreduce(device_dense)": lambda: (hvd.allreduce(mine(), device_dense="/cpu:0", op=S), total()),
        "allreduce(device_sparse)": lambda: (hvd.allreduce(mine(), device_sparse="/cpu:0", op=S), total()),
        "allreduce(compression)": lambda: (hvd.allreduce(mine(), compression=hvd.Compression.fp16, op=S), total()),
        "allreduce(op)": lambda: (hvd.allreduce(mine(), op=S), total()),
        "allreduce(prescale_factor)": lambda: (hvd.allreduce(mine(), op=S, prescale_factor=0.5), total() / 2),
        "allreduce(postscale_factor)": lambda: (hvd.allreduce(mine(), op=S, postscale_factor=2.0), total() * 2),
        "allreduce(name)": lambda: (hvd.allreduce(mine(), op=S, name="a name"), total()),
        "allreduce(process_set)": lambda: in_evens(
            lambda: (hvd.allreduce(mine(), op=S, process_set=evens()), even_total())
        ),
        "allreduce(ignore_name_scope)": lambda: (hvd.allreduce(mine(), op=S, ignore_name_scope=True), total()),
        "allgather": lambda: (hvd.allgather(mine(), "n"), joined()),
        "allgather(tensor)": lambda: (hvd.allgather(tensor=mine()), joined()),
        "allgather(value)": lambda: (keras_face.allgather(value=mine()), joined()),
        "allgather(name)": lambda: (hvd.allgather(mine(), name="a name"), joined()),
        "allgather(ignore_name_scope)": lambda: (hvd.allgather(mine(), ignore_name_scope=True), joined()),
        "allgather(process_set)": lambda: in_evens(lambda: (hvd.allgather(mine(), process_set=evens()), even_joined())),
        "broadcast": lambda: (hvd.broadcast(mine(), hvd.size() - 1, "n"), every()[-1]),
        "broadcast(tensor)": lambda: (hvd.broadcast(tensor=mine(), root_rank=0), every()[0]),
        "broadcast(value)": lambda: (keras_face.broadcast(value=mine(), root_rank=0), every()[0]),
        "broadcast(root_rank)": lambda: (hvd.broadcast(mine(), root_rank=hvd.size() - 1), every()[-1]),
        "broadcast(name)": lambda: (hvd.broadcast(mine(), 0, name="a name"), every()[0]),
        "broadcast(ignore_name_scope)": lambda: (hvd.broadcast(mine(), 0, ignore_name_scope=True), every()[0]),
        "broadcast(process_set)": lambda: in_evens(
            lambda: (
                hvd.broadcast(mine(), root_rank=evens().ranks[-1], process_set=evens()),
                every()[evens().ranks[-1]],
            )
        ),
        "reducescatter": lambda: (hvd.reducescatter(square(), "", hvd.Compression.none, S, "n"), my_row()),
        "reducescatter(tensor)": lambda: (hvd.reducescatter(tensor=square()), my_row() / hvd.size()),
        "reducescatter(value)": lambda: (keras_face.reducescatter(value=square(), op=S), my_row()),
        "reducescatter(device_dense)": lambda: (hvd.reducescatter(square(), device_dense="/cpu:0", op=S), my_row()),
        "reducescatter(compression)": lambda: (
            hvd.reducescatter(square(), compression=hvd.Compression.none, op=S),
            my_row(),
        ),
        "reducescatter(op)": lambda: (hvd.reducescatter(square(), op=S), my_row()),
        "reducescatter(name)": lambda: (hvd.reducescatter(square(), op=S, name="a name"), my_row()),
        "reducescatter(process_set)": lambda: in_evens(
            lambda: (hvd.reducescatter(even_square(), op=S, process_set=evens()), my_even_row())
        ),
        "reducescatter(ignore_name_scope)": lambda: (
            hvd.reducescatter(square(), op=S, ignore_name_scope=True),
            my_row(),
        ),
        "reducescatter(prescale_factor)": lambda: (
            hvd.reducescatter(square(), op=S, prescale_factor=0.5),
            my_row() / 2,
        ),
        "reducescatter(postscale_factor)": lambda: (
            hvd.reducescatter(square(), op=S, postscale_factor=2.0),
            my_row() * 2,
        ),
        "alltoall(tensor)": lambda: (hvd.alltoall(tensor=mine(0, (2 * hvd.size(), 1))), exchanged()),
        "alltoall(name)": lambda: (hvd.alltoall(mine(0, (2 * hvd.size(), 1)), name="a name"), exchanged()),
        "alltoall(ignore_name_scope)": lambda: (
            hvd.alltoall(mine(0, (2 * hvd.size(), 1)), ignore_name_scope=True),
            exchanged(),
        ),
    }
)


@check("alltoall", "alltoall(splits)")
def uneven_alltoall() -> None:
    """Rank r sends d + 1 rows to rank d, and with splits both results come back, as in Horovod."""
    splits = [other + 1 for other in range(hvd.size())]
    rows = mine(0, (sum(splits), 2))
    got, received = hvd.alltoall(rows, splits=tf.constant(splits, tf.int32))
    begin = sum(splits[: hvd.rank()])
    parts = [part[begin : begin + splits[hvd.rank()]] for part in every(0, (sum(splits), 2))]
    same((got, np.concatenate(parts)))
    same((received, [hvd.rank() + 1] * hvd.size()))


@check("alltoall(process_set)")
def alltoall_in_a_set() -> None:
    """The rows go around among the even ranks."""
    if evens().included():
        size, place = evens().size(), evens().rank()
        got = hvd.alltoall(mine(0, (size, 2)), process_set=evens())
        same((got, [part[place] for part in every(0, (size, 2), list(evens().ranks))]))


def both(which: str, /, *others: object, expected: object, **keywords: object) -> None:
    """Call a grouped collective with two tensors of two shapes."""
    got = getattr(hvd, which)(*others, **keywords)
    assert len(got) == len(expected)
    for part, wanted in zip(got, expected, strict=True):
        same((part, wanted))


def pair() -> list[np.ndarray]:
    return [mine(), mine(1, (2, 3)).astype(np.float64)]


def pair_sum(ranks: list[int] | None = None) -> list[np.ndarray]:
    return [np.sum(every(ranks=ranks), axis=0), np.sum(every(1, (2, 3), ranks), axis=0)]


def scaled(factor: float) -> list[np.ndarray]:
    return [part * factor for part in pair_sum()]


for _argument, _value in {
    "device_dense": "/cpu:0",
    "device_sparse": "/cpu:0",
    "compression": hvd.Compression.fp16,
    "name": "a group",
    "ignore_name_scope": True,
}.items():
    check(f"grouped_allreduce({_argument})")(
        lambda key=_argument, value=_value: both("grouped_allreduce", pair(), op=S, expected=pair_sum(), **{key: value})
    )
check("grouped_allreduce", "grouped_allreduce(tensors)")(
    lambda: both("grouped_allreduce", tensors=pair(), expected=scaled(1 / hvd.size()))
)
check("grouped_allreduce(op)")(lambda: both("grouped_allreduce", pair(), op=S, expected=pair_sum()))
check("grouped_allreduce(average)")(lambda: both("grouped_allreduce", pair(), average=False, expected=pair_sum()))
check("grouped_allreduce(prescale_factor)")(
    lambda: both("grouped_allreduce", pair(), op=S, prescale_factor=0.5, expected=scaled(0.5))
)
check("grouped_allreduce(postscale_factor)")(
    lambda: both("grouped_allreduce", pair(), op=S, postscale_factor=2.0, expected=scaled(2.0))
)


@check("grouped_allreduce(process_set)")
def grouped_allreduce_in_a_set() -> None:
    """The group of the even ranks."""
    if evens().included():
        both("grouped_allreduce", pair(), op=S, process_set=evens(), expected=pair_sum(list(evens().ranks)))


def uneven(ranks: list[int] | None = None) -> list[np.ndarray]:
    chosen = list(range(hvd.size())) if ranks is None else ranks
    return [np.concatenate([np.full((rank + 1, 2), rank + salt, np.float32) for rank in chosen]) for salt in (0, 5)]


def my_uneven() -> list[np.ndarray]:
    return [np.full((hvd.rank() + 1, 2), hvd.rank() + salt, np.float32) for salt in (0, 5)]


check("grouped_allgather", "grouped_allgather(tensors)")(
    lambda: both("grouped_allgather", tensors=my_uneven(), expected=uneven())
)
check("grouped_allgather(name)")(lambda: both("grouped_allgather", my_uneven(), name="g", expected=uneven()))
check("grouped_allgather(ignore_name_scope)")(
    lambda: both("grouped_allgather", my_uneven(), ignore_name_scope=True, expected=uneven())
)


@check("grouped_allgather(process_set)")
def grouped_allgather_in_a_set() -> None:
    """The group of the even ranks."""
    if evens().included():
        both("grouped_allgather", my_uneven(), process_set=evens(), expected=uneven(list(evens().ranks)))


for _argument, _value in {"device_dense": "/cpu:0", "compression": hvd.Compression.none, "op": S}.items():
    check(f"grouped_reducescatter({_argument})")(
        lambda key=_argument, value=_value: both(
            "grouped_reducescatter", [square(), square(1)], **{"op": S, key: value}, expected=[my_row(), my_row(1)]
        )
    )
check("grouped_reducescatter", "grouped_reducescatter(tensors)")(
    lambda: both(
        "grouped_reducescatter",
        tensors=[square(), square(1)],
        expected=[my_row() / hvd.size(), my_row(1) / hvd.size()],
    )
)
for _argument, _value in {"prescale_factor": 0.5, "postscale_factor": 2.0}.items():
    check(f"grouped_reducescatter({_argument})")(
        lambda key=_argument, value=_value: both(
            "grouped_reducescatter", [square()], op=S, expected=[my_row() * value], **{key: value}
        )
    )


@check("grouped_reducescatter(process_set)")
def grouped_reducescatter_in_a_set() -> None:
    """The group of the even ranks."""
    if evens().included():
        both("grouped_reducescatter", [even_square()], op=S, process_set=evens(), expected=[my_even_row()])
