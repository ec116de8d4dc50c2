"""The momentum that is taken over from an optimizer, so that gradients go through it before they are selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum that is taken over from an optimizer (momentum correction; DGC, equation 4).

    Args:
        value: the optimizer's momentum, above 0.
        nesterov: whether the optimizer's momentum is Nesterov's.
        rate: returns the learning rate of the current step. As in Keras, gradients are multiplied by it before they go
            through the momentum, so that the residual has the rate of each element's own step (Karimireddy et al.,
            2019, algorithm 2).
    """

    value: float
    nesterov: bool
    rate: Callable[[], Any] = dataclasses.field(default=lambda: 1.0, compare=False)
