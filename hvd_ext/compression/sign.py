"""Signs with error feedback: one bit an element, and one scale for each bucket."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hvd_ext.compression.codec import DenseFirst

BITS = 1 / 32  # the share of float32's bytes that signs have: the density of a step that sends them


@dataclasses.dataclass(frozen=True)
class Sign(DenseFirst):
    """Send only the signs of the gradients between hosts, with one scale a bucket; the rest enters later steps.

    Pass it to `hvd_ext.DistributedOptimizer` or a tape as `compression`. Inside a host whole gradients are added up.
    Each rank adds its residual to its share of the host's sum, sends the sign of each element and the mean of their
    absolute values, and keeps the difference as its new residual (EF-signSGD; Karimireddy et al., ICML 2019, algorithm
    1). Hosts exchange a 32nd of the bytes of float32. `TopK(0.01)` sends fewer bytes where there are few hosts, and
    keeps the momentum of SGD in its residuals; signs cost no search for the largest elements.

    Args:
        dense_steps: the number of first update steps that send whole gradients.
        height: the levels of the topology in which whole gradients are added up first: 1 for hosts, 2 for racks of
            hosts, and so on; None for the fastest by the cost model.
        min_elements: tensors with fewer elements stay dense.
        vectors: also send the signs of tensors of rank 1 and 0 (biases, scales).
        clip: before anything else, scale a rank's gradients down to a norm of clip / sqrt(number of ranks); None for no
            clipping.

    Raises:
        InvalidError: a value breaks its rule.
    """

    name: ClassVar[str] = "sign"
    density: ClassVar[float] = BITS

    dense_steps: int = 0
    height: int | None = 1
    min_elements: int = 4096
    vectors: bool = False
    clip: float | None = None


CODEC = Sign
