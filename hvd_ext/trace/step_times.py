"""The times of a training's steps: medians of what the engine notes on each rank, and the model that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_ext.errors import InvalidError
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor

if TYPE_CHECKING:
    from hvd_ext.engine.channels import RecentSteps
    from hvd_ext.planning.layout import Layout

WARM_UP = 3  # the first steps of a channel, whose times are not used
STEPS = 10  # the newest steps, whose medians are the times of arrival
SAMPLE = 16  # tensors whose arrivals in each step are compared between ranks


@dataclasses.dataclass(frozen=True)
class Measured:
    """The steps of one rank, or of the latest of several ranks; all times are medians in seconds.

    Args:
        ready_s: for each of a channel's tensors the time from the step's begin to its arrival.
        step_s: the time from the begin of a step to that of the next one; None if there were no two steps in sequence.
        update_s: the time from the end of a step's last bucket to the begin of the next step; None likewise.
        arrivals_s: for each of the newest 10 steps the times from the end of the last bucket of the step before to the
            arrivals of a sample of the tensors, and to the last arrival; empty likewise, and in old traces.
    """

    ready_s: tuple[float, ...]
    step_s: float | None
    update_s: float | None
    arrivals_s: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """Read what `dataclasses.asdict` has made of a value, after JSON; other keys are ignored."""
        arrivals_s = tuple(tuple(of_step) for of_step in values.get("arrivals_s", ()))
        return cls(tuple(values["ready_s"]), values["step_s"], values["update_s"], arrivals_s)


def measured(steps: RecentSteps, first_step: int = 1) -> Measured | None:
    """Take the medians of one rank's steps.

    The times of arrival are those of the newest 10 steps, and the other times those of all steps in the layout of the
    newest; the first 3 steps of a channel do not count.

    Returns:
        The medians; None if no step counts.
    """
    warm = steps.steps > WARM_UP
    if not warm.any():
        return None
    numbers, begins_s, ends_s = steps.steps[warm], steps.begins_s[warm], steps.ends_s[warm]
    following = np.flatnonzero((np.diff(numbers) == 1) & (numbers[:-1] >= first_step))
    whole_s = (begins_s[following + 1] - begins_s[following]).tolist()
    updates_s = (begins_s[following + 1] - ends_s[following]).tolist()
    arrivals_s = steps.arrival_offset_s[warm]
    sampled_s = _with_last(arrivals_s[following + 1]) + np.array(updates_s)[:, np.newaxis]
    return Measured(
        tuple(np.median(arrivals_s[-STEPS:], axis=0).tolist()),
        float(np.median(whole_s)) if whole_s else None,
        max(float(np.median(updates_s)), 0.0) if updates_s else None,
        tuple(map(tuple, sampled_s[-STEPS:].tolist())),
    )


def _with_last(arrivals_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Take the arrivals of a sample of the tensors, and the last arrival, of each step: [steps, sample + 1]."""
    count = arrivals_s.shape[-1]
    places = np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).round().astype(int))
    return np.column_stack([arrivals_s[:, places], arrivals_s.max(axis=1, initial=0.0)])


def latest(ranks: Sequence[Measured]) -> Measured:
    """Take each time of the rank on which it is longest.

    All ranks have a step's last bucket at about the same time, and begin the next step when they have made their
    update. So the update is that of the quickest rank, and what other ranks need longer for theirs delays their
    gradients.

    A bucket waits for the rank that is the latest in its step, which is often another one than in the step before. So
    the times of arrival are delayed as `_delay` says.
    """
    steps_s = [of_rank.step_s for of_rank in ranks if of_rank.step_s is not None]
    updates_s = [of_rank.update_s for of_rank in ranks if of_rank.update_s is not None]
    quickest_s = min(updates_s, default=0.0)
    late_s = [0.0 if of_rank.update_s is None else of_rank.update_s - quickest_s for of_rank in ranks]
    ready_s = [[late + ready for ready in of_rank.ready_s] for late, of_rank in zip(late_s, ranks, strict=True)]
    latest_s = np.array([max(times) for times in zip(*ready_s, strict=True)])
    return Measured(
        tuple((latest_s + _delay(latest_s, ranks, quickest_s)).tolist()),
        max(steps_s, default=None),
        min(updates_s, default=None),
    )


def _delay(
    latest_s: npt.NDArray[np.float64], ranks: Sequence[Measured], update_s: float
) -> npt.NDArray[np.float64] | float:
    """Return how much longer the median over steps of the latest rank's time is than the longest median of a rank.

    It is known for a sample of the tensors, and interpolated for times between theirs. If the ranks have not noted as
    many steps it is 0.

    Args:
        latest_s: for each tensor the longest median of a rank.
        update_s: of the quickest rank.
    """
    arrivals_s = [np.array(of_rank.arrivals_s) for of_rank in ranks]
    if not arrivals_s[0].size or len({of_rank.shape for of_rank in arrivals_s}) > 1:
        return 0.0
    in_steps_s = np.median(np.max(arrivals_s, axis=0), axis=0) - update_s
    medians_s = _with_last(latest_s[np.newaxis])[0]
    order = np.argsort(medians_s, kind="stable")
    return np.interp(latest_s, medians_s[order], np.maximum(in_steps_s - medians_s, 0.0)[order])


def model(tensors: Sequence[Tensor], sent_tensors: Sequence[int], times: Measured) -> StepTimes:
    """Make the model of a training.

    The engine does not see where the forward pass ends; the model has it end when the first gradient is ready.

    Args:
        sent_tensors: the places of those that travel, to which the times belong. The others are ready at once.
    """
    ready_s = [0.0] * len(tensors)
    for place, seconds in zip(sent_tensors, times.ready_s, strict=True):
        ready_s[place] = seconds
    return StepTimes(tuple(tensors), tuple(ready_s), min(times.ready_s, default=0.0), times.update_s)


def described(name: str, layout: Layout, times: Measured) -> dict[str, Any]:
    """Describe the steps of a channel on one rank as a value for JSON, for the rank's file of a trace."""
    return {
        "channel": name,
        "tensors": [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in layout.engine_tensors],
        **dataclasses.asdict(times),
    }


def of_trace(ranks: Mapping[int, Mapping[str, Any]]) -> StepTimes:
    """Make the model of a traced training, of the channel with the most bytes.

    Args:
        ranks: the "otherData" of each rank's file (`merge.Merged.ranks`), whose "channels" come from `described`.

    Returns:
        The tensors that travelled, ready when they were on the latest rank.

    Raises:
        InvalidError: no rank has noted a step, or ranks have other tensors than the first.
    """
    noted = {rank: about["channels"] for rank, about in sorted(ranks.items()) if about.get("channels")}
    if not noted:
        raise InvalidError(
            f"the trace has no times of steps: a training must make more than {WARM_UP} steps before its trace ends"
        )
    first, *_ = noted

    def tensors_of(channel: Mapping[str, Any]) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, tuple(shape), dtype) for name, shape, dtype in channel["tensors"])

    sizes = [sum(tensor.nbytes for tensor in tensors_of(channel)) for channel in noted[first]]
    number = sizes.index(max(sizes))
    tensors = tensors_of(noted[first][number])
    measured_on_ranks = []
    for rank, channels in noted.items():
        if number >= len(channels) or tensors_of(channels[number]) != tensors:
            raise InvalidError(f"the trace of rank {rank} has other tensors than that of rank {first}")
        measured_on_ranks.append(Measured.from_json(channels[number]))
    return model(tensors, range(len(tensors)), latest(measured_on_ranks))
