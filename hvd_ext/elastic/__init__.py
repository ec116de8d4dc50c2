"""Jobs that survive the loss of workers and take new ones: Horovod's `elastic` (docs/elastic.md).

`run` makes a training function of a state: something that is committed, restored and sent to new workers.
"""

from __future__ import annotations

from hvd_ext.elastic.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from hvd_ext.elastic.loop import run, run_fn
from hvd_ext.elastic.state import HostsUpdatedInterrupt, ObjectState, State
from hvd_ext.elastic.variables import KerasState, TensorFlowKerasState, TensorFlowState
from hvd_ext.errors import CommunicationError as HorovodInternalError

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


def __dir__() -> list[str]:
    return sorted(__all__)
