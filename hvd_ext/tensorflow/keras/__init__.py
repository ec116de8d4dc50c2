"""The names of `hvd_ext.keras`, for scripts that had `import horovod.tensorflow.keras as hvd`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.keras import *  # noqa: F403
    from hvd_ext.keras import callbacks as callbacks
else:

    def __getattr__(name: str) -> Any:
        from hvd_ext import keras

        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(keras, name)

    def __dir__() -> list[str]:
        from hvd_ext import keras

        return dir(keras)
