"""What a job says of its partial rounds when it ends: who was late, and which gradients were in no round."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hvd_ext.errors import HvdExtError
from hvd_ext.job import banner, log
from hvd_ext.trace import rounds

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime


def say(job: Runtime) -> None:
    """Sum up on rank 0, and warn on each rank, of the open channels of an ending job and of its process sets."""
    for owner in (job, *job.subsets.values()):
        with contextlib.suppress(HvdExtError):  # of an engine that has failed
            _say_of_channels(owner)


def _say_of_channels(owner: Runtime) -> None:
    engine = owner.engine
    for handle, channel in engine.open_channels().items():
        if not channel.is_partial:
            continue
        recorded = engine.rounds(handle)
        summary = rounds.of_engine(recorded, engine.rank, engine.ranks)
        if summary is not None:
            banner.say(owner, f"{channel.name}: {summary.line()}")
        if engine.holds(handle):
            newest = int(recorded.arrived[-1, engine.rank]) if len(recorded.arrived) else 0
            log.logger.warning("%s: %s", channel.name, lost(newest, engine.progress(handle).step))


def lost(sent: int, step: int) -> str:
    """Say which gradients of this rank are lost.

    Args:
        sent: the newest step whose gradient was in a round.
        step: the newest step of this rank.

    Returns:
        The words of a warning; without numbers if what is held is older: of a round that was not finite, or of a
        checkpoint.
    """
    steps = f"of step {step}" if step == sent + 1 else f"of steps {sent + 1} to {step}" if step > sent else "it held"
    return (
        f"it ends, and gradients {steps} on this rank were in no round and are lost; call hvd_ext.flush(optimizer) "
        "before the last step"
    )
