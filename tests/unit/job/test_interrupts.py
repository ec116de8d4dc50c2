"""Ctrl-C: the handler of the package stands for Python's own, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_ext.engine import native
from hvd_ext.job import interrupts


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """The handler and the descriptor as Python has them."""
    interrupts.stop()
    handler, descriptor = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    interrupts.stop()
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(descriptor)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_behind() -> None:
    before = open_descriptors()
    for _ in range(2):
        interrupts.start()
        interrupts.start()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        interrupts.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "hvd_ext signals"]


def test_ctrl_c_ends_a_sleep_as_before() -> None:
    interrupts.start()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)


def test_the_handler_of_a_program_and_the_descriptor_of_an_event_loop_stay() -> None:
    def handler(number: int, frame: object) -> None:
        """Note nothing."""

    signal.signal(signal.SIGINT, handler)
    interrupts.start()
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    interrupts.start()
    interrupts.stop()
    assert signal.set_wakeup_fd(-1) == writes
    os.close(reads)
    os.close(writes)


def test_other_threads_install_nothing() -> None:
    thread = threading.Thread(target=interrupts.start)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_child_gives_the_descriptor_back() -> None:
    interrupts.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_exception_in_the_constructor_of_an_error_waits_until_it_is_over() -> None:
    steps: list[str] = []
    source = "def make():\n    kill()\n    steps.append('inside')\n"
    scope: dict[str, Any] = {"kill": lambda: os.kill(os.getpid(), signal.SIGINT), "steps": steps}
    exec(compile(source, "tensorflow/python/framework/errors_impl.py", "exec"), scope)

    def call() -> None:
        scope["make"]()
        after()  # Python raises a kept exception at the latest where a function begins

    def after() -> None:
        steps.append("after")

    native.load()
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    assert steps == ["inside"]
