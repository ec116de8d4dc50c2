"""Plans that the engine holds, with the planner's choice that led to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_ext.planning.planner import Chosen, SparseChosen


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A plan that the engine holds.

    Args:
        plan: the engine's handle.
        digest: of the plan, equal on all ranks.
        segment_nbytes: the grain of pipelining for the size it was prepared for.
        algorithm: its name.
        chosen: the planner's choice with its reason; None for a plan without alternatives.
    """

    plan: int
    digest: int
    segment_nbytes: int
    algorithm: str
    chosen: Chosen | None = None


@dataclasses.dataclass(frozen=True)
class PreparedSparse:
    """The two plans of a buffer whose elements are selected; each runs as one segment, on float32.

    Args:
        sparse: the plan of the selected elements.
        dense: the plan of a step in which nothing is selected.
        dense_above: steps of this density and above take `dense`, in (0, 1].
        chosen: the planner's choice with its reason.
    """

    sparse: Prepared
    dense: Prepared
    dense_above: float
    chosen: SparseChosen
