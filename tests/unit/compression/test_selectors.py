"""The list of selectors is the one of the native code, and the one that options accept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_ext.compression import selectors
from hvd_ext.errors import InvalidError

HEADER = Path(__file__).resolve().parents[3] / "tf_ops" / "kernels" / "topk.h"


def test_the_numbers_are_those_of_the_native_code():
    listed = re.findall(r"^  k(\w+) = (\d+)", HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    native = {name.lower(): int(number) for name, number in listed}
    assert native == {s.name: s.number for s in selectors.SELECTORS if s.number is not None}


def test_options_take_what_the_native_code_has():
    from hvd_ext.compression.topk import TopK

    for name in selectors.names(native=True):
        TopK(selector=name, threshold=1.0 if name == "threshold" else 0.0)
    with pytest.raises(InvalidError, match="selector"):
        TopK(selector="tf")


def test_an_unknown_name_is_refused():
    with pytest.raises(InvalidError, match=r"selector \('all'\): must be one of exact, mstopk, dgc"):
        selectors.find("all")
