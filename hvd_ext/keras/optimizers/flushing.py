"""`flush`: what sparse training has left behind travels with the next step."""

from __future__ import annotations

from typing import Any

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, process_sets
from hvd_ext.tensorflow.gradients.reducer import Reducer


def flush(optimizer: Any) -> None:
    """Make the next step dense, so that it takes along all that `TopK` has left behind; all ranks call it.

    For a file of the model alone: flush, train one more step, save. After that step no gradient is missing from the
    weights; a momentum that `momentum_correction` has taken over stays with the ranks, and only
    `hvd_ext.callbacks.Checkpoint` saves it. A next step that is skipped because a gradient is not finite leaves
    everything as it was, and the step after it is dense.

    Args:
        optimizer: from `hvd_ext.DistributedOptimizer` with compression=hvd_ext.TopK(...); with a tape nothing can be
            flushed, as no object of the user's lasts from step to step.

    Raises:
        InvalidError: the optimizer is not one of these.
        CommunicationError: a peer is gone, or stays away.
    """
    reducer = getattr(optimizer, "_hvd_ext_reducer", None)
    if not isinstance(reducer, Reducer) or reducer.options.topk is None:
        raise InvalidError(
            f"flush ({optimizer!r}): must be an optimizer from hvd_ext.DistributedOptimizer with "
            "compression=hvd_ext.TopK(...); others leave nothing behind"
        )
    job = process_sets.runtime_of(reducer.options.process_set)
    if job is not None:
        # ranks with different densities would run different plans
        consensus.exchange(job.engine, "flush", lambda: reducer.label)
        reducer.flush()
