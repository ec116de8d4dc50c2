"""A plan that was chosen for a buffer, and why."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_ext.planning.model import LogicalPlan


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and how it was found; for selected elements it has a dense companion.

    Args:
        plan: of an allreduce.
        algorithm: its schedule.
        why: one line.
        candidates: for every schedule its name and its price in seconds, or the reason why it does not apply; empty
            where the schedule was asked for by name. Of a sparse choice last "dense", the price of `dense`.
        dense: of a step in which nothing is selected; its residuals are those of `plan`. None where `plan` never
            selects.
        dense_above: from this density on `dense` is the cheaper one, in (0, 1].
    """

    plan: LogicalPlan
    algorithm: str
    why: str
    candidates: tuple[tuple[str, float | str], ...] = ()
    dense: LogicalPlan | None = None
    dense_above: float = 1.0

    @property
    def selects(self) -> bool:
        """Whether `plan` selects at all; on one host there is nothing to leave out."""
        return any(call.kind == "select" for level in self.plan.levels for call in level.calls)
