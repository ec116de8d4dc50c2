"""Horovod 0.28.1's public names: how they are found where it is installed, and what was found."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

FACES = ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
PARTS = ("callbacks", "elastic")
# What the modules import for themselves, or use inside: no part of what users call.
INSIDE = {
    "check_extension",
    "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility",
    "is_version_greater_equal_than",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
}
# Names that no module shows by itself: classes that are made at the call, methods that are made of C functions.
CLASSES = {
    "ProcessSet": ("size", "rank", "included", "process_set_id", "ranks", "mpi_comm"),
    "Compression": ("none", "fp16"),
}
# Of the build, of Spark, names of dtypes and status codes in C: nothing that a training script or its job sets.
NOT_SETTINGS = re.compile(
    r"HOROVOD_((WITH|WITHOUT|BUILD|GPU|NCCL|CUDA|SPARK|PROCESS_SET_ERROR)_.*|BOOL|U?INT\d+|FLOAT\d+)$"
)
FROZEN = Path(__file__).with_name("horovod_0_28_1.json")


def frozen() -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Give what `public` and `variables` found in Horovod 0.28.1, for machines that have none."""
    kept = json.loads(FROZEN.read_text(encoding="utf-8"))
    return {name: tuple(arguments.split()) for name, arguments in kept["public"].items()}, set(kept["variables"])


def public() -> dict[str, tuple[str, ...]]:
    """Give the public names of the installed Horovod, each with the names of its arguments over all its modules."""
    found: dict[str, dict[str, None]] = {}
    for face in FACES:
        module = importlib.import_module(face)
        _add(found, module, "")
        for part in PARTS:
            if hasattr(module, part):
                _add(found, getattr(module, part), f"{part}.")
    for name, members in CLASSES.items():
        found.update({f"{name}.{member}": {} for member in members})
    found["init"] = dict.fromkeys(("comm", "process_sets"))  # its own signature says *args
    return {name: tuple(arguments) for name, arguments in sorted(found.items())}


def _add(found: dict[str, dict[str, None]], module: ModuleType, prefix: str) -> None:
    known = {f"elastic.{name}" for name in ("init", "rank", "shutdown")}
    known |= {f"elastic.{name}" for name in ("broadcast_object", "broadcast_object_fn", "broadcast_variables")}
    for name, value in vars(module).items():
        full = prefix + name
        if name.startswith("_") or name in INSIDE or inspect.ismodule(value) or full in known:
            continue
        arguments = found.setdefault(full, {})
        # elastic is refused whole, and the helper of backward_passes_per_step is a class of the inside
        if callable(value) and prefix != "elastic." and name not in ("Compression", "LocalGradientAggregationHelper"):
            parameters = inspect.signature(value).parameters.values()
            arguments.update({p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)})


def variables() -> set[str]:
    """Give the environment variables that the installed Horovod's TensorFlow part, core and launcher name."""
    import horovod

    folder = Path(horovod.__file__).parent
    files = [*folder.glob("tensorflow/mpi_lib*.so")]
    for part in ("common", "tensorflow", "keras", "_keras", "runner"):
        files += folder.joinpath(part).rglob("*.py")
    names = set()
    for file in files:
        # a name in the library ends with a byte 0; others are parts of messages
        pattern = rb"HOROVOD_[A-Z0-9_]*[A-Z0-9](?=\0)" if file.suffix == ".so" else rb"HOROVOD_[A-Z0-9_]*[A-Z0-9]"
        names |= {match.decode() for match in re.findall(pattern, file.read_bytes())}
    return {name for name in names if not NOT_SETTINGS.match(name)}
