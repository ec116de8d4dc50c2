"""The two files of an entry to DAWNBench's ImageNet training, and what an entry lacks.

The rules are those of github.com/stanford-futuredata/dawn-bench-entries, README.md and tests/test_submissions.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.bench.results import machine, versions

from .rows import Row, start_s
from .settings import Network, Settings

REQUIRED = ("version", "author", "authorEmail", "framework", "model", "hardware", "timestamp")
COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
TARGET = 0.93  # of the top-5 share
# What stands where the settings have nothing.
AUTHOR, EMAIL = "(set entry.author)", "(set entry.author_email)"


def tsv(rows: Sequence[Row]) -> str:
    """Give the progress: a line for each validated epoch, with hours, and accuracies in percent."""
    lines = ["\t".join(COLUMNS)]
    for row in rows:
        if "top5" in row:
            right = (f"{100 * row[name]:.3f}" for name in ("top1", "top5"))
            lines.append("\t".join([str(row["epoch"] + 1), f"{row['hours']:.7f}", *right]))
    return "\n".join(lines) + "\n"


def place() -> dict[str, Any]:
    """Describe where this job trains, and with what, as this rank sees it."""
    return {
        "hardware": hardware(),
        "framework": f"hvd_ext {hvd.__version__} + TensorFlow {tf.__version__}",
        "ranks": hvd.size(),
        "versions": versions(),
    }


def record(settings: Settings, kinds: Sequence[str], trained: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Give the description.

    Args:
        settings: of the training.
        kinds: "topk" or "dense" for each phase.
        trained: what `place` said where the epochs were trained.
        rows: of the epochs.
    """
    entry = settings.entry
    found: dict[str, Any] = {
        "version": "v1.0",
        "author": entry.author or AUTHOR,
        "authorEmail": entry.author_email or EMAIL,
        "framework": entry.framework or trained["framework"],
        "codeURL": entry.code_url,
        "model": entry.model or _model(settings.network),
        "hardware": entry.hardware or trained["hardware"],
        "costPerHour": entry.cost_per_hour,
        "timestamp": date.today().isoformat(),
        "logFilename": entry.log_url,
        "misc": _misc(settings, kinds, trained, rows),
        "usedBlacklist": entry.used_blacklist,
    }
    return {name: value for name, value in found.items() if value not in ("", None)}


def lacks(found: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Name what an entry still lacks.

    Args:
        found: from `record`.
        rows: of the epochs.
    """
    missing = [f"{name} is required" for name in REQUIRED if not found.get(name)]
    missing += [
        value.strip("()") for value in (found.get("author"), found.get("authorEmail")) if value in (AUTHOR, EMAIL)
    ]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(found.get("timestamp"))):
        missing.append("timestamp must be yyyy-mm-dd")
    best = max((row["top5"] for row in rows if "top5" in row), default=None)
    if best is None:
        missing.append("no epoch was validated")
    elif best < TARGET:
        missing.append(f"top-5 accuracy must reach {TARGET:.0%}, the best is {best:.1%}")
    return missing


def name(settings: Settings) -> str:
    """Give the name under which the rules want both files, without its ending."""
    entry = settings.entry
    words = (
        entry.author or "author",
        entry.model or _model(settings.network),
        entry.hardware_tag or "hardware",
        "tensorflow",
    )
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)


def hardware() -> str:
    """Name the hosts, ranks and devices that are there, as this rank sees them."""
    hosts, ranks, here = hvd.cross_size(), hvd.size(), machine()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        device = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    else:
        device = f"{here['processor']}, {here['cores']} cores"
    each = f" x {_counted(hvd.local_size(), 'rank')}" if hvd.is_homogeneous() else f", {ranks} ranks"
    return f"{_counted(hosts, 'host')}{each}: {device}; {here['memory_gib']:g} GiB"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _model(network: Network) -> str:
    if network == Network(classes=network.classes):
        return "ResNet50-v1.5"
    return f"ResNet-v1.5 of {'-'.join(map(str, network.blocks))} blocks"


def _misc(settings: Settings, kinds: Sequence[str], trained: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    images = [
        {
            "image_size": phase.pixels,
            "epochs": phase.epochs,
            "batch_size": phase.batch,
            "rect_val": phase.rectangular,
            "min_scale": phase.smallest_crop,
            "gradients": kind,
        }
        for phase, kind in zip(settings.phases, kinds, strict=True)
    ]
    compression = {"topk": settings.topk, "algorithm": settings.sparse_algorithm} if "topk" in kinds else None
    return {
        "schedule": settings.optimizer.model_dump(mode="json"),
        "imageSize": images,
        "label_smoothing": settings.smoothing,
        "mixed_precision": settings.mixed_precision,
        "algorithm": settings.algorithm,
        **({"compression": compression} if compression else {}),
        "seed": settings.seed,
        "ranks": trained["ranks"],
        "versions": trained["versions"],
        "hours count": "all but validation and checkpoints: starts, loading, and what killed jobs have lost too",
        "start_seconds": round(start_s(rows), 1),
        "wall_hours": rows[-1]["wall_hours"] if rows else 0.0,
    }
