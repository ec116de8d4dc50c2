"""Distributed training for Keras 3 on TensorFlow: `import hvd_ext as hvd`.

The names are loaded when they are first used: importing the package needs neither TensorFlow nor MPI nor the native
library. The stub beside this file lists them with their modules.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Modules that are attributes too. `from hvd_ext import *` leaves them out, because scripts import their own `keras`.
_SUBMODULES = ("data", "keras", "runner", "state", "tensorflow")


def _listed() -> dict[str, str]:
    """Read the stub: the module of each public name."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: module for name, module in names.items() if name not in _SUBMODULES}


_NAMES = _listed()
_MODULES = {
    "callbacks": "hvd_ext.keras.callbacks",
    "elastic": "hvd_ext.elastic",
    "optimizers": "hvd_ext.keras.optimizers",
    "errors": "hvd_ext.errors",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"hvd_ext.{name}")
    if name not in _NAMES:
        from hvd_ext.options.unsupported import ABSENT

        instead = f" as Horovod has it: {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"module 'hvd_ext' has no attribute {name!r}{instead}")
    try:
        module = importlib.import_module(_MODULES.get(name, _NAMES[name]))
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise ModuleNotFoundError(
            f"hvd_ext.{name} needs {error.name}, which this Python does not have; `python -m hvd_ext doctor` says "
            "what is missing, and how to install it",
            name=error.name,
        ) from error
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})


importlib.import_module("hvd_ext.keras.saved_classes").register()
