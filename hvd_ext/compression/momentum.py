"""The momentum that is taken over from an optimizer, so that gradients go through it before they are selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _ones(variables: Sequence[Any]) -> list[float]:
    return [1.0] * len(variables)


def _nothing(velocities: Mapping[Any, NDArray[np.float32]]) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum that is taken over from an optimizer (momentum correction; DGC, equation 4).

    Args:
        value: the optimizer's momentum, above 0.
        nesterov: whether the optimizer's momentum is Nesterov's.
        rates: takes variables and returns the learning rate of the current step for each, a number or a scalar
            tensor, equal on all ranks. As in Keras, gradients are multiplied by it before they go through the momentum,
            so that the residual has the rate of each element's own step (Karimireddy et al., 2019, algorithm 2).
        give_back: takes the velocities of variables, by their keys, and adds them to the optimizer's slots. They have
            the variables' shapes and the scale of reduced gradients.
    """

    value: float
    nesterov: bool
    rates: Callable[[Sequence[Any]], Sequence[Any]] = dataclasses.field(default=_ones, compare=False, repr=False)
    give_back: Callable[[Mapping[Any, NDArray[np.float32]]], None] = dataclasses.field(
        default=_nothing, compare=False, repr=False
    )
