"""The exceptions of hvd_ext, and the one place where the engine's status codes become exceptions.

Inside a running `tf.function` or session, TensorFlow raises its own exception with our message; `TENSORFLOW_CODES` says
which one. Elsewhere, once TensorFlow is loaded, an exception of ours is also an instance of TensorFlow's exception of
the same meaning: a program can catch a mismatch as `MismatchError` or, as with Horovod, as
`tf.errors.FailedPreconditionError`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "HvdExtError",
    "InvalidError",
    "MismatchError",
    "NativeLibraryError",
    "NotInitializedError",
    "PlanError",
    "RankError",
    "TopologyError",
    "raise_for",
]


class HvdExtError(RuntimeError):
    """The base class of all errors of hvd_ext; raised itself only for a broken invariant (a bug of hvd_ext)."""

    if not TYPE_CHECKING:
        # AutoGraph keeps the class of an error that a traced function raises only if it knows the constructor.
        __init__ = Exception.__init__
    _in_tensorflow = ""  # the name of the class of `tf.errors` that means the same

    def __new__(cls, *args: Any) -> HvdExtError:
        """Make the error, which is an instance of TensorFlow's class too if TensorFlow is loaded."""
        tensorflow_class = getattr(getattr(sys.modules.get("tensorflow"), "errors", None), cls._in_tensorflow, None)
        if tensorflow_class is None:
            return super().__new__(cls, *args)
        error = super().__new__(_both(cls, tensorflow_class), *args)  # type: ignore[arg-type]
        tensorflow_class.__init__(error, None, None, str(Exception(*args)))
        return error


class InvalidError(HvdExtError, ValueError):
    """An argument or a setting breaks a rule; nothing was sent."""

    _in_tensorflow = "InvalidArgumentError"


class PlanError(HvdExtError, ValueError):
    """A plan does not compute its collective, or an algorithm is unknown or cannot plan for the topology."""


class TopologyError(HvdExtError, ValueError):
    """A topology contradicts itself, breaks the rules of its file, or has another number of ranks than the job."""


class MismatchError(HvdExtError, ValueError):
    """Ranks disagree, for example on the arguments of a collective; raised on all ranks. The next collective works."""

    _in_tensorflow = "FailedPreconditionError"


class CommunicationError(HvdExtError):
    """A peer is gone or stays away; everything fails until `shutdown()` and `init()` start afresh."""

    _in_tensorflow = "UnknownError"


class NotInitializedError(HvdExtError, ValueError):
    """`init()` has not been called, or an object belongs to an engine that has been shut down."""


class CheckpointError(HvdExtError):
    """A checkpoint cannot be written, or a file of it cannot be read; older checkpoints stay as they were."""


class RankError(HvdExtError):
    """A function that `hvd_ext.run` called failed on a rank; its exception is the `__cause__` if it pickles.

    Attributes:
        rank: the rank that failed first.
        remote_traceback: the traceback of its exception, as text.
    """

    def __init__(self, message: str, rank: int = -1, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class NativeLibraryError(HvdExtError, ImportError):
    """The native library is missing, does not load, or was built for another version."""


@functools.cache
def _both(base: type[HvdExtError], tensorflow_class: type[Exception]) -> type[HvdExtError]:
    """Make a subclass of our class and one of `tf.errors`; it pickles as our class, which needs no TensorFlow."""
    members = {"__doc__": base.__doc__, "__module__": base.__module__, "__reduce__": lambda self: (base, self.args)}
    return type(base.__name__, (base, tensorflow_class), members)


# The values of `Code` in tf_ops/base/status.h.
OK, INVALID, MISMATCH, COMMUNICATION, INTERNAL, STOPPED = range(6)

_EXCEPTIONS: dict[int, type[HvdExtError]] = {
    INVALID: InvalidError,
    MISMATCH: MismatchError,
    COMMUNICATION: CommunicationError,
    INTERNAL: HvdExtError,
    STOPPED: NotInitializedError,
}

# TensorFlow's error code of a failed op (tf_ops/ops/status.h) -> our code. In order: invalid argument, failed
# precondition, unknown (as in Horovod), internal, aborted.
TENSORFLOW_CODES: dict[int, int] = {3: INVALID, 9: MISMATCH, 2: COMMUNICATION, 13: INTERNAL, 10: STOPPED}


def raise_for(code: int, message: str) -> None:
    """Raise the exception that belongs to a status code of the engine.

    Args:
        code: a `Code` of tf_ops/base/status.h; 0 raises nothing.
        message: the engine's message.

    Raises:
        InvalidError, MismatchError, CommunicationError, HvdExtError, NotInitializedError: for the codes 1 to 5.
    """
    if code != OK:
        raise _EXCEPTIONS.get(code, HvdExtError)(message)
