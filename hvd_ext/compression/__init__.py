"""Codecs that make gradients smaller, with error feedback: their options, densities, selectors and momentum.

A codec is a file of this folder with a `CODEC`.
"""

from __future__ import annotations

import importlib
import pkgutil

from hvd_ext.compression import any_of
from hvd_ext.compression.any_of import AnyOf
from hvd_ext.compression.codec import Codec
from hvd_ext.compression.low_rank import LowRank

__all__ = ["CODECS", "AnyOf", "Codec", "LowRank", "from_text"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
CODECS: dict[str, type[Codec]] = {module.CODEC.name: module.CODEC for module in _MODULES if hasattr(module, "CODEC")}


def from_text(text: str) -> Codec | LowRank | None:
    """Read a compression from one word of a command line; None if the word begins with no name of one.

    Args:
        text: as "topk", "topk:0.01", "topk:density=0.01,wire=bf16,warmup=100/dense", "lowrank:4" (`from_text` of their
            classes), "auto" or "auto:dense|quantized:4" (`AnyOf`).

    Raises:
        InvalidError: the codec has no such field, or a value breaks its rule.
    """
    name, _, rest = text.partition(":")
    if name == LowRank.name:
        return LowRank.from_text(rest)
    return CODECS[name].from_text(rest) if name in CODECS else any_of.from_text(text, CODECS)
