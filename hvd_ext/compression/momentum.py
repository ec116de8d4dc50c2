"""The momentum that is taken over from an optimizer, so that gradients go through it before they are selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum that is taken over from an optimizer (momentum correction; DGC, equation 4).

    Args:
        value: of the optimizer, above 0.
        nesterov: the optimizer's.
        rate: gives the learning rate of the step under way. Gradients are multiplied by it before they go through the
            momentum, as Keras does; what waits keeps the rate of its own step (Karimireddy et al., 2019, algorithm 2).
    """

    value: float
    nesterov: bool
    rate: Callable[[], Any] = dataclasses.field(default=lambda: 1.0, compare=False)
