"""Calls of the native engine: errors become exceptions, and prepared calls are checked once."""

from __future__ import annotations

import ctypes

import pytest

from hvd_ext.engine import native
from hvd_ext.errors import NotInitializedError

CLOSE = "hvd_ext_channel_close"


def test_a_prepared_call_raises_what_the_call_raises() -> None:
    with pytest.raises(NotInitializedError) as called:
        native.call(CLOSE, -1)
    prepared = native.prepared(CLOSE, ctypes.c_int64(-1), owners=None)
    for _ in range(2):
        with pytest.raises(type(called.value), match=str(called.value)[:20]):
            prepared()


def test_a_prepared_call_checks_its_arguments_and_leaves_other_calls_as_they_are() -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        native.prepared(CLOSE, owners=None)
    with pytest.raises(TypeError):
        native.prepared(CLOSE, "channel", owners=None)
    native.prepared(CLOSE, ctypes.c_int64(-1), owners=None)
    with pytest.raises(ctypes.ArgumentError):
        native.call(CLOSE, "channel")
