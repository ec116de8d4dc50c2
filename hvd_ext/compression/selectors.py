"""The selectors: ways to select k elements of a gradient. Tests enumerate this list."""

from __future__ import annotations

import dataclasses
from typing import Literal

from hvd_ext.errors import InvalidError

# The types of `TopK(selector=...)` and of the mode of `mstopk`, for editors; a test compares them with `SELECTORS`.
Native = Literal["exact", "mstopk", "dgc", "threshold", "random"]
Mode = Literal["exact", "mstopk", "dgc", "threshold", "random", "tf"]


@dataclasses.dataclass(frozen=True)
class Selector:
    """A way to select elements.

    Attributes:
        name: the value for `mode` and `TopK(selector=...)`.
        number: its number in the native code (`Selector` of tf_ops/kernels/topk.h); None if TensorFlow computes it.
        unique: whether x and k alone determine the result.
        fills: whether it selects exactly k elements from every input.
    """

    name: str
    number: int | None
    unique: bool
    fills: bool


SELECTORS: tuple[Selector, ...] = (
    # The k elements of greatest magnitude, ties by lowest index; the same on every machine; one pass over memory. A
    # lower bound from a sample, then one pass and a radix select among the candidates.
    Selector("exact", 0, unique=True, fills=True),
    # Exactly k elements: all above the upper threshold, a random run of those between the two thresholds. CommLib
    # (MLSys 2021), Algorithm 1, guarded for ties, zeros, infinities and NaN.
    Selector("mstopk", 1, unique=False, fills=True),
    # At most k elements, the greatest of those above a threshold estimated from a sample. Deep Gradient Compression
    # (ICLR 2018), section 5: hierarchical sampling.
    Selector("dgc", 2, unique=False, fills=False),
    # All elements of at least the given magnitude, the k greatest where they are more. A fixed threshold (Strom,
    # Interspeech 2015).
    Selector("threshold", 3, unique=True, fills=False),
    # k elements, each set of k equally likely. Random-k (Stich et al., NeurIPS 2018).
    Selector("random", 4, unique=False, fills=True),
    # tf.math.top_k of the magnitudes, sorted by index: as exact where there are no denormals and no NaN; for
    # comparison.
    Selector("tf", None, unique=True, fills=True),
)


def names(*, native: bool = False) -> tuple[str, ...]:
    """List the names of the selectors, or only those of the native code, for error feedback and the engine."""
    return tuple(selector.name for selector in SELECTORS if selector.number is not None or not native)


def find(name: str) -> Selector:
    """Find a selector by its name; `InvalidError` if there is no selector of this name."""
    for selector in SELECTORS:
        if selector.name == name:
            return selector
    raise InvalidError(f"selector ({name!r}): must be one of {', '.join(names())}")
