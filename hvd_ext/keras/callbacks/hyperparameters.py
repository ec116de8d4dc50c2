"""Equal hyper-parameters at the end of each epoch: what callbacks set must be the same on all ranks."""

from __future__ import annotations

from typing import Any

from hvd_ext.errors import MismatchError
from hvd_ext.job import process_sets, rank_lists
from hvd_ext.job.process import size
from hvd_ext.keras.callbacks import base
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.comparable import current
from hvd_ext.tensorflow.collectives.objects import allgather_object

_NAME = "SameHyperparameters"


class SameHyperparameters(base.Callback):
    """Compares the ranks' learning rates, momenta, loss scales and other settings of optimizers after each epoch.

    A callback that sets them from a value of its own rank gives each rank another value, and the weights then differ.
    `SameHyperparameters` must come after such callbacks. It compares the wrapped optimizers of the model; those for a
    process set are compared within the set.

    Raises:
        MismatchError: at the end of an epoch, on all ranks: a value differs; the message has the values by rank.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare."""
        if size() == 1:
            return
        settings: dict[tuple[tuple[int, ...], str], str] = {}
        wrapped = models.distributed(self.model)
        for number, optimizer in enumerate(wrapped):
            reducer = optimizer._hvd_ext.reducer
            job = process_sets.runtime_of(reducer.options.process_set)
            if job is not None:
                subject = f"optimizer {reducer.label!r}" + (f" ({number + 1} of {len(wrapped)})" if wrapped[1:] else "")
                settings |= {
                    (job.engine.ranks, f"{subject}: {key}"): value for key, value in current(optimizer).items()
                }
        by_rank = allgather_object(settings, name=_NAME)
        for ranks, what in {key: None for of_rank in by_rank for key in of_rank}:
            values = {rank: by_rank[rank].get((ranks, what), "none") for rank in ranks}
            having = {value: [rank for rank in values if values[rank] == value] for value in values.values()}
            if len(having) > 1:
                words = "; ".join(
                    f"{value} on rank{'s' * (len(ranks_with) > 1)} {rank_lists.listed(ranks_with)}"
                    for value, ranks_with in having.items()
                )
                raise MismatchError(
                    f"fit: {what} must be the same on all ranks at the end of epoch {epoch + 1}; it is {words}; a "
                    "callback must set it from a value that is equal on all ranks: from a metric in the logs, or from "
                    "hvd_ext.allreduce(value)"
                )
