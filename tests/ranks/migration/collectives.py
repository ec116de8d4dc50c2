"""Checks of the rows of the collectives: called with Horovod's argument names, on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_ext as hvd
import hvd_ext.keras as keras_face
from tests.ranks.migration.registry import check, compare, evens, every, everyone, mine, same

# What this rank gives to a collective of some ranks, and what comes; the salt makes the tensors of a group differ.
Given = tuple[np.ndarray, np.ndarray]


def summed(ranks: list[int], salt: int = 0) -> Given:
    shape = (4 + salt,)
    return mine(salt, shape), np.sum(every(salt, shape, ranks), axis=0)


def joined(ranks: list[int], salt: int = 0) -> Given:
    """Rank r has r + 1 rows."""
    parts = [np.full((rank + 1, 2), rank + 5 * salt, np.float32) for rank in ranks]
    return parts[ranks.index(hvd.rank())], np.concatenate(parts)


def sent(ranks: list[int], salt: int = 0) -> Given:
    return mine(salt), every(salt)[ranks[-1]]


def my_row(ranks: list[int], salt: int = 0) -> Given:
    """As many rows as ranks are added, and each rank gets one."""
    shape, place = (len(ranks), 2 + salt), ranks.index(hvd.rank())
    return mine(salt, shape), np.sum(every(salt, shape, ranks), axis=0)[place : place + 1]


def exchanged(ranks: list[int], salt: int = 0) -> Given:
    """Two rows go from each rank to each."""
    shape, place = (2 * len(ranks), 1), ranks.index(hvd.rank())
    parts = [part[2 * place : 2 * place + 2] for part in every(salt, shape, ranks)]
    return mine(salt, shape), np.concatenate(parts)


CASES: dict[str, Callable[..., Given]] = {
    "allreduce": summed,
    "allgather": joined,
    "broadcast": sent,
    "reducescatter": my_row,
    "alltoall": exchanged,
}


def agrees(which: str, factor: float = 1.0, by: str = "", face: ModuleType = hvd, **keywords: Any) -> None:
    """Call a collective, or its grouped form with two tensors of two dtypes, and compare what comes.

    Args:
        which: the collective.
        factor: by which the keywords multiply the result.
        by: the name with which the tensor is given; empty, if it is given by its place.
        face: the module that has the function.
        keywords: the other arguments; with a process set only its members call.
    """
    if "process_set" in keywords:
        keywords["process_set"] = evens()
    ranks = list(evens().ranks) if "process_set" in keywords else everyone()
    if hvd.rank() not in ranks:
        return
    name = which.removeprefix("grouped_")
    if name in ("allreduce", "reducescatter") and "average" not in keywords:
        keywords.setdefault("op", hvd.Sum)
    if name == "broadcast":
        keywords.setdefault("root_rank", ranks[-1])
    pairs = [CASES[name](ranks, salt) for salt in (0, 1)]
    given: Any = [pairs[0][0], pairs[1][0].astype(np.float64)] if name != which else pairs[0][0]
    got = getattr(face, which)(*([] if by else [given]), **({by: given} if by else {}), **keywords)
    expected = [pair[1] * factor for pair in pairs]
    if name == which:
        same((got, expected[0]))
        return
    assert len(got) == len(expected)
    for part, wanted in zip(got, expected, strict=True):
        same((part, wanted))


# The arguments of each collective: a value, and the factor that it has on the result.
Arguments = dict[str, tuple[Any, float]]
NAMED: Arguments = {"name": ("a name", 1), "ignore_name_scope": (True, 1)}
IN_SET: Arguments = {"process_set": (None, 1)}
REDUCTION: Arguments = {
    **IN_SET,
    "device_dense": ("/cpu:0", 1),
    "op": (hvd.Sum, 1),
    "prescale_factor": (0.5, 0.5),
    "postscale_factor": (2.0, 2),
}
ALLREDUCE: Arguments = {
    **NAMED,
    **REDUCTION,
    "average": (False, 1),
    "compression": (hvd.Compression.fp16, 1),
    "device_sparse": ("/cpu:0", 1),
}
REDUCESCATTER: Arguments = {**REDUCTION, "compression": (hvd.Compression.none, 1)}
TABLE: dict[str, Arguments] = {
    "allreduce": ALLREDUCE,
    "allgather": NAMED | IN_SET,
    "broadcast": NAMED | IN_SET,
    "reducescatter": NAMED | REDUCESCATTER,
    "alltoall": NAMED | IN_SET,
    "grouped_allreduce": ALLREDUCE,
    "grouped_allgather": NAMED | IN_SET,
    "grouped_reducescatter": REDUCESCATTER,
}
for _which, _arguments in TABLE.items():
    for _argument, (_value, _factor) in _arguments.items():
        check(f"{_which}({_argument})")(functools.partial(agrees, _which, _factor, **{_argument: _value}))
    if _which.startswith("grouped_"):
        check(_which, f"{_which}(tensors)")(functools.partial(agrees, _which, by="tensors"))
    else:
        check(f"{_which}(tensor)")(functools.partial(agrees, _which, by="tensor"))
for _which in ("allreduce", "allgather", "broadcast", "reducescatter"):
    check(f"{_which}(value)")(functools.partial(agrees, _which, by="value", face=keras_face))
check("broadcast(root_rank)")(functools.partial(agrees, "broadcast"))


NONE, S = hvd.Compression.none, hvd.Sum
compare(  # by their places
    {
        "allreduce": lambda: (hvd.allreduce(mine(), None, "", "", NONE, S, 0.5, 4.0, "n"), 2 * np.sum(every(), axis=0)),
        "allgather": lambda: (hvd.allgather(mine(), "n"), np.concatenate(every())),
        "broadcast": lambda: (hvd.broadcast(mine(), hvd.size() - 1, "n"), every()[-1]),
        "reducescatter": lambda: (
            hvd.reducescatter(my_row(everyone())[0], "", NONE, S, "n"),
            my_row(everyone())[1],
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
