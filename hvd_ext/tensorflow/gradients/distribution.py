"""What a wrapped optimizer has of ours, in its one attribute `_hvd_ext`."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

from hvd_ext.tensorflow.gradients.reducer import Reducer
from hvd_ext.tensorflow.gradients.step import Step


@dataclasses.dataclass(eq=False)
class Distribution:
    """The reduction of an optimizer's gradients. The optimizer inside of a loss-scale optimizer shares the outer one's.

    Attributes:
        step: the step under way; None between two steps.

    Args:
        outer: refers to the wrapped optimizer.
        local_layers: the layers whose gradients are not reduced.
    """

    reducer: Reducer
    outer: weakref.ref[Any]
    local_layers: tuple[Any, ...] = ()
    step: Step | None = dataclasses.field(default=None, init=False)

    @contextlib.contextmanager
    def within(self, step: Step) -> Iterator[Step]:
        """Make a step the one under way: Keras' methods between `apply` and the update take no argument for it."""
        before, self.step = self.step, step
        try:
            yield step
        finally:
            self.step = before


def of(optimizer: Any) -> Distribution | None:
    """Return what an optimizer has of ours; None for a plain one."""
    distribution = getattr(optimizer, "_hvd_ext", None)
    return distribution if isinstance(distribution, Distribution) else None


def reducer_of(optimizer: Any) -> Reducer | None:
    """Return what reduces the gradients of an optimizer; None for a plain one."""
    distribution = of(optimizer)
    return None if distribution is None else distribution.reducer
