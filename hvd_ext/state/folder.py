"""The folders of checkpoints.

    <directory>/checkpoint-000007/    a complete checkpoint
    <directory>/.writing-...          one that is being written, or was when its job died
    <directory>/newest.txt            the name of the newest, for people and scripts

A checkpoint is written into a folder of the second kind, and renamed when it is complete; then old ones are removed. A
rename is atomic within a file system, so a folder of the first kind is complete or not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hvd_ext.errors import CheckpointError
from hvd_ext.state import manifest as manifests
from hvd_ext.state.manifest import File, Manifest

POINTER = "newest.txt"

_NAME = re.compile(r"checkpoint-(\d{6,})")
_WRITING = ".writing-"
_MARK = ".disk-"


def path_of(directory: Path, serial: int) -> Path:
    """Give the folder of the checkpoint with this number."""
    return directory / f"checkpoint-{serial:06d}"


def serials(directory: Path) -> list[int]:
    """List the numbers of the checkpoints in a directory, the newest first, complete or not; none if it is missing."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """Find the newest checkpoint whose model's file is complete; any program may call it, without other ranks.

    The folder has `model.keras` for `keras.models.load_model`, or `model.weights.h5` for `model.load_weights`.

    Args:
        directory: as given to `hvd_ext.callbacks.Checkpoint`.

    Returns:
        The checkpoint's folder, or None.

    Raises:
        OSError: the directory cannot be read.
    """
    for serial in serials(Path(directory)):
        folder = path_of(Path(directory), serial)
        try:
            manifest = manifests.read(folder)
            manifests.check(folder, manifest, [manifest.model])
        except CheckpointError:
            continue
        return folder
    return None


def prepare(directory: Path, mark: str) -> None:
    """Make the directory, and an empty file in it by which other ranks see that they share it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / (_MARK + mark)).touch()


def has_mark(directory: Path, mark: str) -> bool:
    """Tell whether the directory has this mark."""
    return (directory / (_MARK + mark)).exists()


def unmark(directory: Path, mark: str) -> None:
    """Take a mark away."""
    (directory / (_MARK + mark)).unlink(missing_ok=True)


def clean(directory: Path) -> None:
    """Remove the folders of jobs that died while they wrote."""
    for path in directory.glob(_WRITING + "*"):
        shutil.rmtree(path, ignore_errors=True)


def writing(directory: Path, serial: int, id: str) -> Path:
    """Name the folder into which a checkpoint is written."""
    return directory / f"{_WRITING}{serial:06d}-{id}"


def write(path: Path, writer: Callable[[BinaryIO], None]) -> File:
    """Write a file, flush it to the disk, and read it again. Returns what was read: its name, size and digest."""
    with path.open("wb") as file:
        writer(file)
    return settle(path)


def settle(path: Path) -> File:
    """Flush a file to the disk, and read it again; see `write`."""
    _sync(path)
    return manifests.described(path)


def publish(directory: Path, written: Path, serial: int, manifest: Manifest) -> None:
    """Make a checkpoint whose files are complete the newest; `CheckpointError` if its manifest reads back otherwise."""
    (written / manifests.FILE).write_text(manifest.text(), encoding="utf-8")
    _sync(written / manifests.FILE)
    _sync(written)
    final = path_of(directory, serial)
    written.rename(final)
    _sync(directory)
    if manifests.read(final) != manifest:
        raise CheckpointError(f"{final.name}: its manifest reads back differently from what was written")
    pointer = directory / ("." + POINTER)
    pointer.write_text(final.name + "\n", encoding="utf-8")
    _sync(pointer)
    pointer.replace(directory / POINTER)


def prune(directory: Path, keep: int) -> None:
    """Remove the oldest checkpoints until `keep` of those with a manifest remain."""
    seen = 0
    for serial in serials(directory):
        folder = path_of(directory, serial)
        if seen >= keep:
            # renamed first: if the removal is cut short, no incomplete checkpoint is left
            doomed = directory / f"{_WRITING}old-{serial:06d}"
            folder.rename(doomed)
            shutil.rmtree(doomed)
        else:
            seen += (folder / manifests.FILE).exists()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
