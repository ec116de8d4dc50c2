"""Exchange and comparison of what ranks must agree on; every rank comes to the same verdict in the same words.

The functions that compare are pure: they take the values of all ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext import errors
from hvd_ext.errors import HvdExtError, InvalidError, MismatchError

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine

# Keras appends this to a name that the process has used before.
_NUMBER = re.compile(r"_\d+(?=_|:|/|$)")


def exchange(engine: Engine, name: str, make: Callable[[], Any]) -> list[Any]:
    """Send a value to all ranks and receive theirs; an error on one rank is raised on all, so that no rank waits.

    Args:
        name: the exchange's name, for messages; the same on all ranks.
        make: returns this rank's value, which JSON must be able to hold.

    Returns:
        The values, by rank.

    Raises:
        HvdExtError: `make` raised it on some rank. All ranks raise the same class, with the message of the lowest rank
            that failed. If `make` raises any other exception, its rank raises it unchanged, and the other ranks raise
            `HvdExtError`.
        InvalidError: a rank has joined (`hvd_ext.join`).
        CommunicationError: a peer is gone or stayed away.
    """
    return _exchanged(engine, name, make)[0]


def exchange_in_step(engine: Engine, name: str, make: Callable[[], Any]) -> tuple[list[Any], list[int]]:
    """Send a value to all ranks and receive theirs, as `exchange`, in steps that continue while some ranks have joined.

    Returns:
        The values, by rank: a rank that has joined counts as one that agrees with the lowest rank that has not. And the
        ranks that have joined, which takes note of nothing; the same on all ranks that call it.
    """
    return _exchanged(engine, name, make, agrees=True)


def _exchanged(engine: Engine, name: str, make: Callable[[], Any], **attributes: bool) -> tuple[list[Any], list[int]]:
    failure: Exception | None = None
    try:
        message: dict[str, Any] = {"value": make()}
    except Exception as error:  # whatever the error is, the other ranks must learn of it
        failure = error
        message = {"error": type(error).__name__, "text": str(error)}
    payload = json.dumps(message).encode()
    payloads = engine.exchange(name, payload, **attributes)
    answers = {rank: json.loads(answer) for rank, answer in enumerate(payloads) if answer}
    failed = [(rank, answer) for rank, answer in answers.items() if "error" in answer]
    if not failed:
        agreed = answers[min(answers)]
        joined = [rank for rank in range(len(payloads)) if rank not in answers]
        return [answers.get(rank, agreed)["value"] for rank in range(len(payloads))], joined
    if failure is not None and not isinstance(failure, HvdExtError):
        raise failure
    rank, answer = failed[0]
    exception = getattr(errors, answer["error"], None)
    if isinstance(exception, type) and issubclass(exception, HvdExtError):
        raise exception(_with_rank(engine.ranks[rank], answer["text"], len(payloads))) from failure
    raise HvdExtError(f"{name}: rank {engine.ranks[rank]} failed with {answer['error']}: {answer['text']}") from failure


def place_of_root(engine: Engine, root_rank: object) -> int:
    """Return the place of a root, a rank of the job, among the ranks of an engine; `InvalidError` if it has none."""
    if isinstance(root_rank, int) and not isinstance(root_rank, bool) and root_rank in engine.ranks:
        return engine.ranks.index(root_rank)
    words = f"a rank, 0 to {engine.size - 1}"
    if engine.ranks != tuple(range(engine.size)):
        words = f"one of the ranks {', '.join(map(str, engine.ranks))} of its process set"
    raise InvalidError(f"root_rank ({root_rank!r}): must be {words}")


def check_same(subject: str, values: Sequence[dict[str, Any]], ranks: Sequence[int] | None = None) -> None:
    """Check that all ranks have equal values under equal keys.

    Args:
        values: one flat dictionary per rank.
        ranks: the ranks' numbers in the job, for a process set; None for 0, 1, ...

    Raises:
        MismatchError: two values differ; the message has the first key that differs, the first rank that differs from
            rank 0, and both values.
    """
    for rank, value in zip(_numbers(ranks, values), values, strict=True):
        for key in [*values[0], *(key for key in value if key not in values[0])]:
            if value.get(key) != values[0].get(key):
                raise MismatchError(
                    f"{subject}: {key} must be the same on all ranks; rank {rank} has {value.get(key)!r}, "
                    f"rank {_numbers(ranks, values)[0]} has {values[0].get(key)!r}"
                )


def check_tensors(subject: str, lists: Sequence[Sequence[Sequence[str]]], ranks: Sequence[int] | None = None) -> None:
    """Check that all ranks have the same tensors in the same order.

    Names need not match letter for letter: Keras numbers a layer by how many the process has made before, and the
    variables of a model that was loaded from a file lack the model's name in front.

    Args:
        lists: for each rank the tensors as pairs (name, dtype and shape as text).

    Raises:
        MismatchError: two tensors differ; the message has the first tensor that differs, the first rank that differs
            from rank 0, and both values.
    """
    first, rank_0 = lists[0], _numbers(ranks, lists)[0]
    for rank, tensors in zip(_numbers(ranks, lists), lists, strict=True):
        for index, ((name, text), (name_0, text_0)) in enumerate(zip(tensors, first, strict=False)):
            if not alike(name, name_0):
                raise MismatchError(
                    f"{subject}: tensor {index} must have the same name on all ranks; rank {rank} has {name!r} "
                    f"({text}), rank {rank_0} has {name_0!r} ({text_0}); build the model in the same order on all ranks"
                )
            if text != text_0:
                raise MismatchError(
                    f"{subject}: tensor {index}, {name!r}, must have the same shape and dtype on all ranks; "
                    f"rank {rank} has {text}, rank {rank_0} has {text_0}"
                )
        if len(tensors) != len(first):
            longer = tensors if len(tensors) > len(first) else first
            extra = longer[min(len(tensors), len(first))][0]
            raise MismatchError(
                f"{subject}: all ranks must have the same tensors; rank {rank} has {len(tensors)}, "
                f"rank {rank_0} has {len(first)}; the first that only one of them has is {extra!r}"
            )


def _with_rank(rank: int, text: str, size: int) -> str:
    return text if size == 1 else f"rank {rank}: {text}"


def _numbers(ranks: Sequence[int] | None, values: Sequence[Any]) -> Sequence[int]:
    return range(len(values)) if ranks is None else ranks


def unnumbered(name: str) -> str:
    """Return a name without the numbers that Keras appends to names that the process has used before."""
    return _NUMBER.sub("", name)


def numbers(name: str) -> list[int]:
    """Return the number that Keras has appended to each part of a variable's name; 0 where it has not."""
    suffixes = [_NUMBER.findall(part) for part in name.split("/")]
    return [int(last[-1][1:]) if last else 0 for last in suffixes]


def alike(name: str, other: str) -> bool:
    """Whether two names, such as "model/dense_20/kernel" and "dense/kernel", mean the same variable or slot."""
    parts, others = (unnumbered(text).split("/")[-2:] for text in (name, other))
    return len(parts) == len(others) and all(
        f"_{part}".endswith(f"_{same}") or f"_{same}".endswith(f"_{part}")
        for part, same in zip(parts, others, strict=True)
    )
