"""The callbacks at Horovod's place: `from hvd_ext.tensorflow.keras.callbacks import MetricAverageCallback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_ext.keras import callbacks

if TYPE_CHECKING:
    from hvd_ext.keras.callbacks import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(callbacks, name)

    def __dir__() -> list[str]:
        return dir(callbacks)
