"""Callbacks for `fit` on several ranks: those of Horovod, checkpoints, and what keeps Keras' own callbacks in step.

`synchronized([...])` prepares a whole list of callbacks; docs/training.md tells which faults it prevents.
"""

from __future__ import annotations

from hvd_ext.keras.base import verbose
from hvd_ext.keras.callbacks.best import BestModelCheckpoint
from hvd_ext.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvd_ext.keras.callbacks.caches import CacheLogs
from hvd_ext.keras.callbacks.callback_list import synchronized
from hvd_ext.keras.callbacks.ending import EndTogether
from hvd_ext.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvd_ext.keras.callbacks.metrics import MetricAverageCallback, joined_metrics
from hvd_ext.keras.callbacks.statistics import AverageStatistics
from hvd_ext.keras.callbacks.stopping import StopTogether
from hvd_ext.keras.checkpoint.callback import Checkpoint
from hvd_ext.keras.elastic_fit.callback import Elastic

__all__ = [
    "AverageStatistics",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CacheLogs",
    "Checkpoint",
    "Elastic",
    "EndTogether",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StopTogether",
    "joined_metrics",
    "synchronized",
    "verbose",
]


def __dir__() -> list[str]:
    return sorted(__all__)
