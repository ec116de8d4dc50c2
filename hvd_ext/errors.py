"""The exceptions of hvd_ext, and the one place where the engine's status codes become exceptions.

Inside a running `tf.function` TensorFlow raises its own exception with our words in it; `TENSORFLOW_CODES` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "HvdExtError",
    "InvalidError",
    "MismatchError",
    "NativeLibraryError",
    "NotInitializedError",
    "PlanError",
    "TopologyError",
    "raise_for",
]


class HvdExtError(RuntimeError):
    """Anything that hvd_ext itself found wrong; raised as it is for a broken invariant (a bug of hvd_ext)."""

    if not TYPE_CHECKING:
        # AutoGraph raises an error of a traced function again as what it was only where it knows the constructor
        __init__ = Exception.__init__


class InvalidError(HvdExtError, ValueError):
    """An argument or a setting that breaks a rule; nothing was sent."""


class PlanError(HvdExtError, ValueError):
    """A plan that does not compute its collective, or an algorithm that cannot plan for the topology."""


class TopologyError(HvdExtError, ValueError):
    """A topology that contradicts itself, the file's rules or the number of ranks."""


class MismatchError(HvdExtError, ValueError):
    """Ranks called one collective with different arguments; raised on all of them, the next collective works."""


class CommunicationError(HvdExtError):
    """A peer is gone or stays away; `shutdown()` and `init()` start afresh."""


class NotInitializedError(HvdExtError, ValueError):
    """`init()` has not been called, or what is used belongs to an engine that has been shut down."""


class CheckpointError(HvdExtError):
    """A checkpoint that cannot be written, or a file that cannot be read; older checkpoints are as they were."""


class NativeLibraryError(HvdExtError, ImportError):
    """The native library is missing, does not load, or was built for another version."""


# tf_ops/engine/status.h, Code
OK, INVALID, MISMATCH, COMMUNICATION, INTERNAL, STOPPED = range(6)

_EXCEPTIONS: dict[int, type[HvdExtError]] = {
    INVALID: InvalidError,
    MISMATCH: MismatchError,
    COMMUNICATION: CommunicationError,
    INTERNAL: HvdExtError,
    STOPPED: NotInitializedError,
}

# How a code leaves a TensorFlow op: the number of TensorFlow's error code (tf_ops/ops/status.h) to ours.
# invalid argument, failed precondition, unavailable, internal, aborted.
TENSORFLOW_CODES: dict[int, int] = {3: INVALID, 9: MISMATCH, 14: COMMUNICATION, 13: INTERNAL, 10: STOPPED}


def raise_for(code: int, message: str) -> None:
    """Raise the exception of a status code of the engine.

    Args:
        code: a `Code` of tf_ops/engine/status.h; 0 returns at once.
        message: the engine's words.

    Raises:
        InvalidError, MismatchError, CommunicationError, HvdExtError, NotInitializedError: for the codes 1 to 5.
    """
    if code != OK:
        raise _EXCEPTIONS.get(code, HvdExtError)(message)
