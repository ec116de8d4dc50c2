"""The ways to keep samples that several parts of the data benchmark compare: ours, and those of tf.data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.studies.data.goals import OURS

if TYPE_CHECKING:
    import tensorflow as tf

# Beside the bytes of the samples, what records and their index take at most, per sample.
OVERHEAD = 128
_numbers = itertools.count()


def ours(
    source: Any,
    load: Callable[..., Any],
    nbytes: int,
    disk: Path | None = None,
    keep: bool = False,
    name: str = "",
    version: str = "",
) -> Any:
    """Open a cache of ours.

    Args:
        source: an array, a nest of arrays, or a source of `hvd_ext.data`.
        load: makes a sample.
        nbytes: the most memory.
        disk: a folder; None for memory alone.
        keep: whether the memory stays for the next job.
        name: of the cache; "" for one that this process has not had yet.
        version: as for `DataCache`.
    """
    from hvd_ext.data.cache import DataCache

    name = name or f"bench-{next(_numbers)}"
    return DataCache(name, source, load, memory=nbytes, disk=disk, keep=keep, version=version, progress=False)


def room(count: int, sample_bytes: int) -> int:
    """Give the memory in which so many samples surely find room."""
    return count * (sample_bytes + OVERHEAD) + (64 << 20)


def theirs(way: str, samples: tf.data.Dataset, folder: Path) -> tf.data.Dataset:
    """Keep samples as tf.data does.

    Args:
        way: "cache", "cache-file", "snapshot", or anything else for not at all.
        samples: what is kept.
        folder: for files.
    """
    if way.startswith(OURS):
        raise ValueError(f"way ({way}): it is not one of tf.data")
    if way == "cache":
        return samples.cache()
    if way == "cache-file":
        folder.mkdir(parents=True, exist_ok=True)
        return samples.cache(str(folder / "cache"))
    if way == "snapshot":
        return samples.snapshot(str(folder / "snapshot"), compression=None)
    return samples


def photographs(
    way: str, paths: list[str], load: Callable[[Any], Any], batch: int, folder: Path, read: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Make the pipeline of tf.data that keeps or decodes files, shuffled anew in each epoch.

    Args:
        way: see `theirs`.
        paths: of the files.
        load: makes a sample of a file's contents.
        batch: samples of a batch.
        folder: for what is kept.
        read: gives the contents of a path.
    """
    import tensorflow as tf

    def loaded(path: tf.Tensor) -> Any:
        return load(read(path))

    data = tf.data.Dataset.from_tensor_slices(paths)
    kept = way in ("cache", "cache-file", "snapshot")
    # what is kept must not be shuffled before, or every epoch has the order of the first one
    data = data if kept else data.shuffle(len(paths))
    data = theirs(way, data.map(loaded, num_parallel_calls=tf.data.AUTOTUNE), folder)
    data = data.shuffle(len(paths)) if kept else data
    return data.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
