"""Ctrl-C (SIGINT) while the main thread waits inside of TensorFlow for other ranks.

Python runs signal handlers on its main thread, between two bytecodes. During a `tf.function` or a step of `fit` that
thread waits in TensorFlow, and no handler runs until the step ends. The interpreter writes the number of each signal
to a descriptor at once, though (`signal.set_wakeup_fd`). A thread reads it here, and ends the ops that wait; the step
fails, and KeyboardInterrupt is raised.

From `init` to `shutdown` a handler of this module replaces Python's own; it raises KeyboardInterrupt, too. A handler of
the program stays: it may only note the signal, and the step then has to succeed. Eager calls and `init` run any handler
while they wait (tf_ops/engine/interrupt.h).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType

from hvd_ext.engine import native

LOOK_S = 0.1
_READ_NBYTES = 4096
_STOP = b"\0"  # no signal has this number


class Watch:
    """Watches for SIGINT until `stop`."""

    def __init__(self) -> None:
        """Start watching; only the main thread may."""
        self._since_s: float | None = None
        self._handled = False  # a plain value, because a handler may interrupt itself
        self._stopped = threading.Event()
        self._given_back = False
        self._library = native.load()
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's, which cannot do without
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, self._handle)
        self._thread = threading.Thread(target=self._notice, name="hvd_ext signals", daemon=True)
        self._thread.start()

    def waited_s(self) -> float:
        """Return for how many seconds the handler has not run since SIGINT; 0 without a signal."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self) -> None:
        """Stop watching. Only the main thread can give the descriptor and the handler back."""
        self._give_back()
        self._stopped.set()
        os.write(self._write, _STOP)
        self._thread.join()
        if self._given_back:
            self._close()

    def forget(self) -> None:
        """Stop in a forked child, which has no such thread, and shares the pipe with its parent."""
        self._give_back()
        self._close()

    def _give_back(self) -> None:
        with contextlib.suppress(ValueError):  # this is not the main thread
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._write):
                signal.set_wakeup_fd(before)
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self._given_back = True

    def _close(self) -> None:
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled = True
        if not self._library.hvd_ext_raise_after_error():
            signal.default_int_handler(number, frame)

    def _notice(self) -> None:
        while not self._stopped.is_set():
            select.select([self._read], [], [])
            numbers = os.read(self._read, _READ_NBYTES)
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._handle:
                self._interrupt()

    def _interrupt(self) -> None:
        """End what waits until the main thread has run the handler."""
        self._since_s = time.monotonic()
        while not self._stopped.wait(LOOK_S) and not self._handled:
            self._library.hvd_ext_interrupt()
        self._handled, self._since_s = False, None
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, _READ_NBYTES)  # the handler has run for these signals, too


_watch: Watch | None = None
_follows_forks = False


def start() -> None:
    """Watch for SIGINT until `stop`, if this is the main thread and Ctrl-C has no handler of the program's."""
    global _watch, _follows_forks
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    if not _follows_forks:
        os.register_at_fork(after_in_child=_forget)
        _follows_forks = True
    _watch = Watch()


def stop() -> None:
    """Stop watching; does nothing if it does not run."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.stop()


def waited_s() -> float:
    """Return for how many seconds Python has not handled a SIGINT that has arrived; 0 if there is none."""
    watch = _watch
    return 0.0 if watch is None else watch.waited_s()


def _forget() -> None:
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.forget()
