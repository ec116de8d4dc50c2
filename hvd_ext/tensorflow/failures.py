"""Which exceptions mean that a rank is gone, in eager calls and in running graphs."""

from __future__ import annotations

import tensorflow as tf

from hvd_ext import errors
from hvd_ext.errors import CommunicationError


def is_loss(error: BaseException) -> bool:
    """Tell whether an exception means that a rank is gone: ours, or that of a running graph with one of our ops."""
    if isinstance(error, CommunicationError):
        return True
    if not isinstance(error, tf.errors.OpError):
        return False
    code = errors.TENSORFLOW_CODES.get(error.error_code)
    return code == errors.COMMUNICATION and "HvdExt>" in (error.message or "")
