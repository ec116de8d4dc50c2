"""Equal moving statistics on all ranks at the end of each epoch, where each rank has gathered its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError, MismatchError
from hvd_ext.keras import base
from hvd_ext.keras.checkpoint import callback_states, model_state
from hvd_ext.keras.optimizers import models
from hvd_ext.options import Average
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.collectives.grouped import grouped_allreduce
from hvd_ext.tensorflow.collectives.objects import allgather_object
from hvd_ext.tensorflow.gradients import kinds

_NAME = "AverageStatistics"
# Classes of hvd_ext, Keras 3 and Keras 2 that save the model, or exchange something at the end of an epoch.
_LATER = ("Checkpoint", "ModelCheckpoint", "BackupAndRestore", "MetricAverageCallback", "StopTogether")


class AverageStatistics(base.Callback):
    """Averages moving statistics over the ranks when the batches of an epoch are done: before validation and saving.

    Each rank gathers the moving means and variances of `BatchNormalization` from its own batches, so that without this
    callback each rank validates another model, and rank 0's is saved. Averaged are the floating-point variables that
    are not trained and that differ between the ranks; all ranks get the same bits. So those of
    `hvd_ext.SyncBatchNormalization`, frozen weights, counters and seed generators stay as they are, and so do those of
    the optimizer's local layers.

    It stands in front of `MetricAverageCallback` and of callbacks that save; `synchronized` puts it there.

    Raises:
        InvalidError: when `fit` begins, it stands behind such a callback.
        MismatchError: the ranks' models have different variables; on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse a plain optimizer, and a place in the list where something is saved before it is averaged."""
        base.refuse_plain(self.model)
        for before in callback_states.beside(self):
            if before is self:
                break
            if any(kind.__name__ in _LATER for kind in type(before).__mro__):
                raise InvalidError(
                    f"{_NAME}: must stand in front of {type(before).__name__} in the list of callbacks; "
                    "hvd_ext.callbacks.synchronized([...]) puts it there"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that batches follow."""
        self._under_way = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average before the validation of an epoch."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, on ranks that do not validate."""
        self._average()

    def _average(self) -> None:
        if not self._under_way:
            return
        self._under_way = False
        statistics = _statistics(self.model)
        described = [f"{variable.dtype} {tuple(variable.shape)}" for variable in statistics]
        ranks = allgather_object((described, model_state.digests(statistics)), name=_NAME)
        for rank, (shapes, _) in enumerate(ranks):
            if shapes != ranks[0][0]:
                raise MismatchError(
                    f"{_NAME}: all ranks must have the same variables that are not trained; rank {rank} has {shapes}, "
                    f"rank 0 has {ranks[0][0]}"
                )
        differing = [
            variable
            for variable, *digests in zip(statistics, *(digests_of for _, digests_of in ranks), strict=True)
            if len(set(digests)) > 1
        ]
        averages = grouped_allreduce([tf.convert_to_tensor(variable) for variable in differing], op=Average, name=_NAME)
        for variable, average in zip(differing, averages, strict=True):
            variable.assign(average)
        if differing:
            layers.refresh(self.model)


def _statistics(model: Any) -> list[Any]:
    """List the floating-point variables of a model of Keras 3 or Keras 2 that are not trained and not local."""
    local: set[Any] = set()
    for optimizer in models.distributed(model):
        local |= optimizer._hvd_ext.reducer.local_keys
        local |= {kinds.key(weight) for layer in optimizer._hvd_ext.local_layers for weight in layer.weights}
    return [
        variable
        for variable in model.non_trainable_weights
        if hasattr(variable, "assign")  # no vocabulary
        and tf.as_dtype(variable.dtype).is_floating
        and kinds.key(variable) not in local
    ]
