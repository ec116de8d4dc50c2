"""Signals are noted while training runs, and do what they did before when it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.state import signals
from hvd_ext.state.signals import Watch


def runs(frame: FrameType | None) -> bool:
    return True


def test_a_signal_is_noted_and_the_second_says_nothing_new() -> None:
    watch = Watch(("SIGUSR1", "SIGUSR2"), runs)
    assert watch.start()
    try:
        assert watch.seen is None
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert watch.seen == "SIGUSR2"
    finally:
        watch.stop()


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that the handler of the program has got."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_what_was_there_before_is_back_after_the_end(came: list[int]) -> None:
    watch = Watch(("SIGUSR1",), runs)
    watch.start()
    watch.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    watch.stop()
    assert came == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert came == [signal.SIGUSR1]


def test_a_signal_after_training_has_failed_does_what_it_did_before(came: list[int]) -> None:
    watch = Watch(("SIGUSR1",), lambda frame: False)
    watch.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    watch.stop()
    assert came == [signal.SIGUSR1]
    assert watch.seen is None


def test_other_threads_cannot_note_signals() -> None:
    answers: list[bool] = []
    watching = [Watch(("SIGUSR1",), runs), Watch((), runs)]
    thread = threading.Thread(target=lambda: answers.extend(watch.start() for watch in watching))
    thread.start()
    thread.join()
    assert answers == [False, True]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("SIGTERM", "must be a sequence of names"),
        ([15], "must be a sequence of names"),
        (["TERM"], r"signals \('TERM'\): must be a name of a signal"),
        (["SIGNOTHING"], "must be a name of a signal"),
        (["SIG_DFL"], "must be a name of a signal"),
        (["SIGKILL"], "no program can handle this signal"),
    ],
)
def test_names_that_are_no_signals_are_refused(names: object, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        signals.check(names)  # type: ignore[arg-type]


def test_names_of_signals_are_taken() -> None:
    assert signals.check(["SIGTERM", "SIGUSR2"]) == ("SIGTERM", "SIGUSR2")
    assert signals.check([]) == ()
