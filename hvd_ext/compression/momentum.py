"""The momentum that is taken over from an optimizer, so that gradients go through it before they are selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum that is taken over from an optimizer (momentum correction; DGC, equation 4).

    For the reduced gradient g of a variable w, what goes through it is rate * (g + decay * w), as in Keras, so that the
    residual has the rate of each element's own step (Karimireddy et al., 2019, algorithm 2). Here rates are 1 and
    decays 0; an optimizer's momentum derives from this class. What its methods return is equal on all ranks.

    Args:
        value: the optimizer's momentum, at least 0 and below 1, where `now` gives none.
    """

    value: float
    nesterov: bool

    @property
    def measures(self) -> bool:
        """Whether its rates follow from the gradients of the step before: then a step measures its gradients."""
        return False

    def now(self) -> Any:
        """Give the momentum of the step under way, a scalar tensor; None: it is `value`, in all steps."""
        return None

    def rates(self, variables: Sequence[Any]) -> Sequence[Any]:
        """Give the rate of the step under way for each variable, a number or a scalar tensor."""
        return [1.0] * len(variables)

    def decays(self, variables: Sequence[Any]) -> Sequence[float]:
        """Give the decay of each variable."""
        return [0.0] * len(variables)

    def measured(self, variables: Sequence[Any], gradients: Sequence[Any], reduced: Callable[[Any], Any]) -> Any:
        """Measure this rank's gradients together with those of the other ranks; all ranks call it.

        Args:
            gradients: tensors, without decays and rates.
            reduced: reduces a float32 tensor over the ranks, as gradients are reduced.

        Returns:
            A number for each gradient, a float64 vector.
        """
        raise NotImplementedError

    def keep(self, variables: Sequence[Any], measured: Any, ok: Any) -> None:
        """Keep what a step has measured for the rates of the next one.

        Args:
            measured: a number for each; 0: it is not known.
            ok: whether the step is applied, a boolean tensor; otherwise all stays as it was.
        """

    def give_back(self, velocities: Mapping[Any, NDArray[np.float32]]) -> None:
        """Add velocities, by the variables' keys and on the scale of reduced gradients, to the slots."""

    def save(self, keys: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Copy what it keeps from step to step for the variables with these keys."""
        return {}

    def load(self, keys: Sequence[Any], saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `save` returned; values that are missing stay as they are."""
