"""The planner's answer: the plan for a buffer, and the reason."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ext.planning.model import LogicalPlan


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and the reason for it. A plan with a selection has a dense companion.

    Args:
        candidates: the name of every schedule with its price in seconds, or with the reason why it does not apply;
            empty if the schedule was asked for by name. For a sparse choice the last one is "dense", with the price of
            the plan `dense`.
        dense: the plan of a step in which nothing is selected, with the same residuals as `plan`; None for a dense
            choice.
        dense_above: the density in (0, 1] from which `dense` is cheaper.
    """

    plan: LogicalPlan
    algorithm: str
    why: str
    candidates: tuple[tuple[str, float | str], ...] = ()
    dense: LogicalPlan | None = None
    dense_above: float = 1.0

    @property
    def selects(self) -> bool:
        """Whether `plan` selects; on one host it does not, because all elements are reduced there."""
        return any(call.kind == "select" for level in self.plan.levels for call in level.calls)
