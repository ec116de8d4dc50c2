"""How a job of `hvd_ext.run` ended: its results by rank, or one error that says which rank failed and why."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Mapping
from typing import Any

from hvd_ext.errors import HvdExtError, RankError
from hvd_ext.runner import launcher
from hvd_ext.runner.handover import Files, Outcome
from hvd_ext.runner.launcher import JobError

# "mpirun noticed that process rank 1 with PID 7 on node n exited on signal 9 (Killed)."
_SIGNAL = re.compile(r"process rank (\d+) .*exited on signal (\d+) \(([^)]*)\)")
_KILLED = 9
LINES = 15  # of a rank's output in an error


def results(files: Files, ranks: int, status: int) -> list[Any]:
    """Return the function's result on each rank.

    Raises:
        RankError: the function raised an exception on a rank.
        JobError: a rank was killed or ended without a result, or no rank has started.
        HvdExtError: a result cannot be unpickled in this process.
    """
    outcomes = {rank: outcome for rank in range(ranks) if (outcome := files.outcome(rank)) is not None}
    raised = {rank: outcome for rank, outcome in outcomes.items() if outcome.value is None}
    if raised and not all(outcome.consequence for outcome in raised.values()):
        raise _error_of(files, raised)
    said = files.launcher.read_text(errors="replace") if files.launcher.exists() else ""
    if signalled := _SIGNAL.search(said):
        raise _ended_by_signal(files, *signalled.groups())
    if raised:
        raise _error_of(files, raised)
    missing = [rank for rank in range(ranks) if rank not in outcomes]
    if missing:
        raise _without_a_word(files, missing, status)
    return [_value(rank, outcomes[rank]) for rank in range(ranks)]


def _value(rank: int, outcome: Outcome) -> Any:
    assert outcome.value is not None
    try:
        return pickle.loads(outcome.value)
    except Exception as error:
        raise HvdExtError(
            f"run: the result of rank {rank} cannot be read in this process: {error!r}; return numbers, NumPy arrays, "
            "dictionaries of them, or model.get_weights()"
        ) from error


def _error_of(files: Files, raised: Mapping[int, Outcome]) -> RankError:
    """Return the error of the rank that failed first, not of a rank that only reports that another is gone."""
    rank = min(raised, key=lambda failed: (raised[failed].consequence, raised[failed].at_s))
    outcome = raised[rank]
    error = RankError(
        f"run: rank {rank} raised {outcome.error}\nIts output is in {files.output(rank)}, that of the other ranks "
        f"beside it.\n\nOn rank {rank}:\n{outcome.traceback}",
        rank,
        outcome.traceback,
    )
    if outcome.exception is not None:
        with contextlib.suppress(Exception):  # this process may lack its class; the message has its text
            error.__cause__ = pickle.loads(outcome.exception)
    return error


def _ended_by_signal(files: Files, rank: str, number: str, name: str) -> JobError:
    memory = "; the kernel does so to a process when memory is short" if int(number) == _KILLED else ""
    return JobError(
        f"run: rank {rank} was ended by signal {number} ({name}){memory}. Its output is in {files.output(int(rank))}, "
        f"that of the other ranks beside it{_last_lines(files, int(rank))}"
    )


def _without_a_word(files: Files, missing: list[int], status: int) -> JobError:
    if not any(files.outputs.iterdir()):
        words = launcher.last_words(files.launcher)
        return JobError(f"run: no rank has started; mpirun ended with status {status}: {words}")
    first = next((rank for rank in missing if files.output(rank).exists()), missing[0])
    which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return JobError(
        f"run: {which} ended without a result, and mpirun with status {status}. The output of rank {first} is in "
        f"{files.output(first)}, that of the other ranks beside it{_last_lines(files, first)}"
    )


def _last_lines(files: Files, rank: int) -> str:
    words = launcher.last_words(files.output(rank), LINES)
    return f"; it ends with\n{words}" if words else ", it is empty" if files.output(rank).exists() else ""
