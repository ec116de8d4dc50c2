"""`BestModelCheckpoint`: rank 0 saves the best model so far."""

from __future__ import annotations

import os
from typing import Any, Literal

import keras

from hvd_ext.errors import InvalidError
from hvd_ext.job.process import rank
from hvd_ext.keras import base

# Metrics that are to be large have one of these in their names, as the ModelCheckpoint of tf_keras has it.
_LARGE = ("acc", "auc", "fmeasure")


class BestModelCheckpoint(base.Hooks, keras.callbacks.ModelCheckpoint):
    """Saves the model on rank 0 whenever a metric is better than ever before.

    Put it behind `MetricAverageCallback`, so that the metric is that of all ranks.

    Args:
        monitor: the metric's name in the logs.
        verbose: 1: print a line when the model is saved.
        save_weights_only: save the weights, not the model.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        filepath: a file ending in ".keras", or ".weights.h5" with save_weights_only. In Horovod there is no such
            argument: there and here the attribute `filepath` may be set before `fit`.

    Raises:
        InvalidError: when `fit` begins, there is no file path.
        ValueError: Keras does not know whether the metric is to be small or large, and `mode` is "auto"; on all ranks.
    """

    works_on_batches = True

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        *,
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        # Keras checks the path here, and users of Horovod set it later
        placeholder = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            placeholder if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that the ranks train together, and that there is a path."""
        base.refuse_plain(self.model)
        if self.filepath is None:
            raise InvalidError(
                "BestModelCheckpoint: no file to save to; pass filepath='best.keras', or set the attribute `filepath` "
                "before fit"
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save on rank 0, if save_freq says so."""
        self._find_direction()
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save on rank 0, if the metric is better than before."""
        self._find_direction()
        if rank() == 0:
            super().on_epoch_end(epoch, logs)

    def _find_direction(self) -> None:
        """Find out whether the metric is to be small or large; on all ranks, so that an error leaves none waiting."""
        if self.monitor_op is not None:
            return
        if self.mode == "auto" and not isinstance(self.model, keras.Model):
            # the rule of tf_keras, whose metrics do not know their direction
            self.mode: str = "max" if any(word in self.monitor for word in _LARGE) else "min"
        self._set_monitor_op()
