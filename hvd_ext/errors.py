"""The exceptions of hvd_ext, and the one place where the engine's status codes become exceptions.

Inside a running `tf.function` or session TensorFlow raises its own exception with our words in it; `TENSORFLOW_CODES`
says which. Elsewhere, where TensorFlow is loaded, our exception is TensorFlow's of the same meaning too: a program
catches a mismatch by `MismatchError` or, as under Horovod, by `tf.errors.FailedPreconditionError`.
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
    """Anything that hvd_ext itself found wrong; raised as it is for a broken invariant (a bug of hvd_ext)."""

    if not TYPE_CHECKING:
        # AutoGraph raises an error of a traced function again as what it was only where it knows the constructor
        __init__ = Exception.__init__
    _in_tensorflow = ""  # the name of the class of `tf.errors` that means the same

    def __new__(cls, *args: Any) -> HvdExtError:
        """Make the error; where TensorFlow is loaded, of a class that is TensorFlow's too."""
        theirs = getattr(getattr(sys.modules.get("tensorflow"), "errors", None), cls._in_tensorflow, None)
        if theirs is None:
            return super().__new__(cls, *args)
        error = super().__new__(_both(cls, theirs), *args)  # type: ignore[arg-type]
        theirs.__init__(error, None, None, str(Exception(*args)))
        return error


class InvalidError(HvdExtError, ValueError):
    """An argument or a setting that breaks a rule; nothing was sent."""

    _in_tensorflow = "InvalidArgumentError"


class PlanError(HvdExtError, ValueError):
    """A plan that does not compute its collective, or an algorithm that cannot plan for the topology."""


class TopologyError(HvdExtError, ValueError):
    """A topology that contradicts itself, the file's rules or the number of ranks."""


class MismatchError(HvdExtError, ValueError):
    """Ranks called one collective with different arguments; raised on all of them, the next collective works."""

    _in_tensorflow = "FailedPreconditionError"


class CommunicationError(HvdExtError):
    """A peer is gone or stays away; `shutdown()` and `init()` start afresh."""

    _in_tensorflow = "UnknownError"


class NotInitializedError(HvdExtError, ValueError):
    """`init()` has not been called, or what is used belongs to an engine that has been shut down."""


class CheckpointError(HvdExtError):
    """A checkpoint that cannot be written, or a file that cannot be read; older checkpoints are as they were."""


class RankError(HvdExtError):
    """A function that `hvd_ext.run` called failed on a rank; its exception is the `__cause__` where it pickles.

    Attributes:
        rank: the rank that failed first.
        remote_traceback: of its exception, as text.
    """

    def __init__(self, message: str, rank: int = -1, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class NativeLibraryError(HvdExtError, ImportError):
    """The native library is missing, does not load, or was built for another version."""


@functools.cache
def _both(ours: type[HvdExtError], theirs: type[Exception]) -> type[HvdExtError]:
    """Join a class of ours and one of `tf.errors`; a pickle names ours, since it may be read without TensorFlow."""
    members = {"__doc__": ours.__doc__, "__module__": ours.__module__, "__reduce__": lambda self: (ours, self.args)}
    return type(ours.__name__, (ours, theirs), members)


# tf_ops/base/status.h, Code
OK, INVALID, MISMATCH, COMMUNICATION, INTERNAL, STOPPED = range(6)

_EXCEPTIONS: dict[int, type[HvdExtError]] = {
    INVALID: InvalidError,
    MISMATCH: MismatchError,
    COMMUNICATION: CommunicationError,
    INTERNAL: HvdExtError,
    STOPPED: NotInitializedError,
}

# How a code leaves a TensorFlow op: the number of TensorFlow's error code (tf_ops/ops/status.h) to ours.
# invalid argument, failed precondition, unknown (as in Horovod), internal, aborted.
TENSORFLOW_CODES: dict[int, int] = {3: INVALID, 9: MISMATCH, 2: COMMUNICATION, 13: INTERNAL, 10: STOPPED}


def raise_for(code: int, message: str) -> None:
    """Raise the exception of a status code of the engine.

    Args:
        code: a `Code` of tf_ops/base/status.h; 0 returns at once.
        message: the engine's words.

    Raises:
        InvalidError, MismatchError, CommunicationError, HvdExtError, NotInitializedError: for the codes 1 to 5.
    """
    if code != OK:
        raise _EXCEPTIONS.get(code, HvdExtError)(message)
