"""Several calls under way with one name, or without names: an error on all ranks, never a wrong pairing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError
from tests.ranks.conftest import LAUNCHED_SIZE

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank waits for no other"),
]


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(InvalidError) as caught:
        call()
    return str(caught.value)


def in_threads(call: Callable[[], Any]) -> list[str]:
    words: list[str] = []
    threads = [threading.Thread(target=lambda: words.append(error_of(call))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return words


def kinds() -> dict[str, Callable[..., Any]]:
    return {
        "allreduce": lambda **more: hvd.allreduce(tf.zeros(2), **more),
        "allgather": lambda **more: hvd.allgather(tf.zeros(2), **more),
        "grouped_allreduce": lambda **more: hvd.grouped_allreduce([tf.zeros(2)], **more),
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("named", [True, False])
def test_two_at_once_on_one_rank_are_an_error_on_all(kind: str, named: bool, rank: int, size: int) -> None:
    arguments = {"name": "twice"} if named else {}

    def call() -> Any:
        return kinds()[kind](**arguments)

    # The last rank's two threads wait for nobody: the second call ends both, whatever the others do.
    words = in_threads(call) if rank == size - 1 else []
    hvd.allgather_object(0)
    if rank != size - 1:
        words = [error_of(call) for _ in range(2)]
    assert len(words) == 2
    for text in words:
        assert text.startswith(f"{kind} '{'twice' if named else kind}")
        assert f"rank {size - 1} has called it while {kind} '" in text
        assert "calls of several threads must each have a name of their own" in text
    hvd.allgather_object(0)
    call()  # the next use works


def test_threads_with_names_of_their_own_may_call_at_once(rank: int, size: int) -> None:
    sums: dict[str, float] = {}

    def calls(name: str) -> None:
        for _ in range(5):
            sums[name] = float(hvd.allreduce(float(rank + len(name)), op=hvd.Sum, name=name))

    names = ["a", "bb", "ccc", "dddd"]
    threads = [threading.Thread(target=calls, args=(name,)) for name in (names if rank % 2 else names[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {name: size * (size - 1) / 2 + size * len(name) for name in names}


def test_a_refused_root_of_an_object_does_not_leave_the_others_waiting(rank: int, size: int) -> None:
    kind = InvalidError if rank == size - 1 else MismatchError
    with pytest.raises(kind, match=rf"root_rank \({size}\): must be a rank"):
        hvd.broadcast_object(1, size if rank == size - 1 else 0)
    assert hvd.broadcast_object(rank, 0) == 0
