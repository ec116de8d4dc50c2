"""Codecs that make gradients smaller, with error feedback: their options, densities, selectors and momentum."""

from __future__ import annotations

from hvd_ext.compression.codec import Codec
from hvd_ext.compression.sign import Sign
from hvd_ext.compression.topk import TopK

__all__ = ["CODECS", "Codec", "Sign", "TopK", "from_text"]

CODECS: dict[str, type[Codec]] = {"topk": TopK, "sign": Sign}


def from_text(text: str) -> Codec | None:
    """Read a codec from one word of a command line; None if the word begins with no codec's name.

    Args:
        text: as "topk", "topk:0.01" or "topk:density=0.01,wire=bf16,warmup=100/dense" (`Codec.from_text`).

    Raises:
        InvalidError: the codec has no such field, or a value breaks its rule.
    """
    name, _, rest = text.partition(":")
    return CODECS[name].from_text(name, rest) if name in CODECS else None
