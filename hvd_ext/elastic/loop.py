"""The loop of an elastic job: train in a world until it fails or changes, join the next one, train again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvd_ext.elastic.state import HostsUpdatedInterrupt, State
from hvd_ext.job import membership, process, runtime
from hvd_ext.job.log import logger
from hvd_ext.tensorflow.failures import is_loss

# Worlds that may fail one after another without a commit; then something else is wrong.
LIMIT = 10

_HINT = "hvd_ext: a job that `python -m hvd_ext run` has started survives this (docs/elastic.md)"


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic: `elastic.run(func)(state, ...)` calls `func(state, ...)` in every world.

    Before each call all ranks receive the state of rank 0. If a peer is lost, the ranks restore the last commit; if
    workers join or leave, they keep the state of the commit at which they have met. Then they join the next world, call
    the reset callbacks, and call the function again. `init` must have been called. A worker that is started later is
    the only rank until this call, so that the others do not wait while it prepares itself.

    The supervisor ends a job with too few workers by a last world. In it the function is not called: the ranks receive
    the state and end with status 1. A job that must be resumed later saves checkpoints itself.

    In a job that the supervisor did not start, a failure is raised with a hint.

    Args:
        func: takes a state (`State`) as its first argument, and continues the training from it.

    Returns:
        The function, which returns what `func` has returned.

    Raises:
        NotInitializedError: before `init()`; the returned function raises it.
        CommunicationError: a peer is gone, and the supervisor did not start this job.
        SystemExit: the supervisor has ended this worker, or the job.
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        join = functools.partial(process.rejoin, runtime.current().options)
        session = membership.session()
        if session is not None and session.waits:
            join()
        return run_fn(func, join)(state, *args, **kwargs)

    return elastic


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Make a training function elastic, like `run`, with a way of one's own into the next world.

    Args:
        func: as for `run`.
        reset: leaves the world, and joins the next one.

    Returns:
        The function, which returns what `func` has returned.
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        joined, failures, commits = True, 0, state._commits
        while True:
            if not joined:
                reset()  # an error in it ends the worker: `init` itself tries the next world after a lost rank
            try:
                last = membership.last()
                if not joined and last is None:
                    state.on_reset()
                state.sync()
                if last is not None:
                    membership.end(last)
                joined = True
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                logger.info("elastic: workers join or leave; joining the next world")
            except Exception as error:
                if not is_loss(error):
                    raise
                failures = failures + 1 if state._commits == commits else 0
                commits = state._commits
                if membership.session() is None or failures > LIMIT:
                    if hasattr(error, "add_note") and membership.session() is None:  # Python 3.11
                        error.add_note(_HINT)
                    raise
                logger.info("elastic: the world has failed (%s); restoring the last commit", error)
                state.restore()
            joined = False

    return elastic
