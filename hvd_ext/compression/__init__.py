"""Codecs that make gradients smaller, with error feedback: their options, densities, selectors and momentum.

A codec is a file of this folder with a `CODEC`.
"""

from __future__ import annotations

import importlib
import pkgutil

from hvd_ext.compression import any_of
from hvd_ext.compression.any_of import AnyOf
from hvd_ext.compression.codec import Codec

__all__ = ["CODECS", "AnyOf", "Codec", "from_text"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
CODECS: dict[str, type[Codec]] = {module.CODEC.name: module.CODEC for module in _MODULES if hasattr(module, "CODEC")}


def from_text(text: str) -> Codec | None:
    """Read a codec from one word of a command line; None if the word begins with no codec's name.

    Args:
        text: as "topk", "topk:0.01", "topk:density=0.01,wire=bf16,warmup=100/dense" (`Codec.from_text`), "auto" or
            "auto:dense|quantized:4" (`AnyOf`).

    Raises:
        InvalidError: the codec has no such field, or a value breaks its rule.
    """
    name, _, rest = text.partition(":")
    return CODECS[name].from_text(rest) if name in CODECS else any_of.from_text(text, CODECS)
