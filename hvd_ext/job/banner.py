"""The lines with which a job says what runs: at its start, at an optimizer's first step, and at its end."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hvd_ext
from hvd_ext.errors import HvdExtError
from hvd_ext.job import log
from hvd_ext.job.log import logger
from hvd_ext.trace import rounds

if TYPE_CHECKING:
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.options.gradients import GradientOptions
    from hvd_ext.planning.layout import Layout

MOST_HOSTS = 4
_logged: set[str] = set()  # what this process has said; init() after shutdown() does not repeat it


def job_line(hosts: Sequence[str], between: str = "") -> str:
    """Describe version and hosts, as in "version 0.1.0, 4 ranks on 2 hosts: a (2), b (2); TCP between hosts"."""
    counts = Counter(hosts)
    named = [f"{host} ({count})" for host, count in list(counts.items())[:MOST_HOSTS]]
    more = f" and {len(counts) - MOST_HOSTS} more" if len(counts) > MOST_HOSTS else ""
    return f"version {hvd_ext.__version__}, {_many(len(hosts), 'rank')} on {_many(len(counts), 'host')}: " + (
        ", ".join(named) + more + (f"; {between} between hosts" if between and len(counts) > 1 else "")
    )


def optimizer_line(name: str, layout: Layout, options: GradientOptions) -> str:
    """Describe an optimizer's buckets, their algorithms (of the largest with the reason), TopK, and partial steps."""
    if layout.largest is None:
        return f"{name}: no rank has a gradient to reduce"
    text = f"{name}: {_many(len(layout.buckets), 'bucket')}, {sum(layout.nbytes) / 1e6:.3g} MB of gradients"
    counts = Counter(bucket.choice.algorithm for bucket in layout.buckets if bucket.choice is not None)
    if layout.largest.choice is not None:
        names = [
            algorithm if len(counts) == 1 else f"{algorithm} ({count})" for algorithm, count in counts.most_common()
        ]
        text += f"; algorithm {', '.join(names)}: {layout.largest.choice.why}"
    codec = options.codec
    if codec is not None:
        selecting = sum(bucket.selection is not None and bucket.selection.dense_above > 0 for bucket in layout.buckets)
        form = f"{layout.forms[0][0]}, {layout.form_reason}" if layout.forms else codec.label
        text += f"; {form}" + (f" in {_many(selecting, 'bucket')}" if selecting or not layout.forms else "")
        text += "" if codec.until is None else f" until update step {codec.until}"
    if options.low_rank is not None:
        text += f"; {options.low_rank.label}"
    if options.partial:
        quorum = "" if options.quorum is None else f" of {options.quorum}"
        text += f"; steps do not wait for all ranks: {options.sync}{quorum}, staleness {options.staleness}"
    return text + ("; results come one step late" if options.delay else "")


def say(job: Runtime, line: str) -> None:
    """Print a line once, on rank 0 of several ranks, unless `Options.quiet` is set.

    The line goes to the logger if that is enabled for INFO, and to stderr otherwise.
    """
    if job.engine.rank == 0 and job.engine.size > 1 and not job.options.quiet and line not in _logged:
        _logged.add(line)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", line)
        else:
            log.write(log.line(line))


def sum_up(job: Runtime) -> None:
    """Sum up the partial rounds of an ending job and of its process sets on rank 0, and warn on each rank of losses."""
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
            say(owner, f"{channel.name}: {summary.line()}")
        if engine.holds(handle):
            newest = int(recorded.arrived[-1, engine.rank]) if len(recorded.arrived) else 0
            logger.warning("%s: %s", channel.name, lost(newest, engine.progress(handle).step))


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


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")
