"""A library is loaded once, whatever number of threads ask for it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_ext.engine import libraries

THREADS = 4


def test_threads_that_come_first_together_load_once() -> None:
    calls: list[int] = []
    together = threading.Barrier(THREADS)

    @libraries.once
    def load() -> object:
        calls.append(1)
        threading.Event().wait(0.05)  # long enough for the others to come
        return object()

    def ask(_: int) -> object:
        together.wait()
        return load()

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, range(THREADS)))
    assert len(calls) == 1
    assert len(set(map(id, found))) == 1


def test_what_could_not_be_loaded_is_tried_again() -> None:
    answers = iter([ValueError("not yet"), None])

    @libraries.once
    def load() -> str:
        answer = next(answers)
        if answer is not None:
            raise answer
        return "loaded"

    with pytest.raises(ValueError, match="not yet"):
        load()
    assert load() == load() == "loaded"
