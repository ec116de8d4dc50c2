"""The distributed optimizers of Keras 3 and Keras 2, and, as `hvd_ext.optimizers`, those for large batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_ext.keras.optimizers.lamb import LAMB as LAMB
    from hvd_ext.keras.optimizers.lars import LARS as LARS
else:
    __all__ = ["LAMB", "LARS"]

    # loaded at their first use: the other files of this folder are imported without them
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{name.lower()}"), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
