"""Makes Keras know the optimizers of hvd_ext that saved files name, wherever hvd_ext has been imported.

Keras finds a class of a file among those that were registered when their modules were loaded, and hvd_ext loads its
modules at their first use. So these are loaded together with Keras, whichever of the two comes first.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# These must need no more than Keras at their import: TensorFlow loads Keras in the middle of its own import.
_MODULES = ("hvd_ext.keras.optimizers.lars", "hvd_ext.keras.optimizers.lamb")


def register() -> None:
    """Register the optimizers with Keras, now or as soon as it has been loaded."""
    if "keras" in sys.modules:
        _load()
    else:
        sys.meta_path.insert(0, _UntilKeras())


class _UntilKeras:
    """A finder of modules that looks where the others look, and only for Keras; it ends when Keras has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "keras":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: ModuleSpec | None = next((candidate for candidate in specs if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                plain(module)  # fails where TensorFlow, half loaded itself, tries to load Keras; then it is tried again
                if self in sys.meta_path:
                    sys.meta_path.remove(self)  # type: ignore[arg-type]
                _load()

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _load() -> None:
    with contextlib.suppress(ImportError):  # without TensorFlow there are no optimizers to be loaded
        for module in _MODULES:
            importlib.import_module(module)
