"""The manifest of a checkpoint: how far training was, and which files there must be, with sizes and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_ext.errors import CheckpointError

FILE = "manifest.json"
VERSION = 1

_CHUNK_NBYTES = 1 << 20


class File(BaseModel):
    """A file of a checkpoint: its name in the folder, its size and its SHA-256."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[\w.-]+$")
    nbytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """A checkpoint's manifest.

    Attributes:
        version: of this schema.
        id: the same text in the folders of all ranks, and in no other checkpoint.
        created: date and time, ISO 8601, UTC.
        epoch: the epoch to go on with, from 0.
        step: the number of its batches that are done.
        hosts: the number of ranks on each host, in the order of the hosts' first ranks.
        versions: of hvd_ext, Python, NumPy, TensorFlow and Keras.
        variables: path, dtype and shape of the variables of the model and of its optimizers.
        own: the paths of those variables of which some rank has other values than rank 0.
        states: the owners in `hvd_ext.state`, of all ranks.
        data: how the shuffled data of `fit` are divided, by their names (`hvd_ext.data.cursor`).
        swapped: whether weights and their moving averages had changed places (`keras.callbacks.SwapEMAWeights`).
        model: the name of the model's file.
        files: the files of all ranks; a rank's disk need not have those of the others.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    id: str
    reason: str
    created: str
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    hosts: list[int]
    versions: dict[str, str]
    variables: list[str]
    own: list[str]
    states: list[str]
    data: dict[str, dict[str, int]] = {}
    swapped: bool = False
    model: str
    files: list[File]

    @property
    def position(self) -> tuple[int, int]:
        """The epoch to go on with, and the number of its batches that are done."""
        return self.epoch, self.step

    def text(self) -> str:
        """Give the manifest as it is written."""
        return self.model_dump_json(indent=1) + "\n"


def rank_file(rank: int) -> str:
    """Name the file of a rank's own state."""
    return f"rank-{rank:05d}.npz"


def parse(text: str, subject: str) -> Manifest:
    """Read a manifest from JSON; `CheckpointError` if the text is no manifest, or one of a later version."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the text"
        raise CheckpointError(f"{subject}: not a manifest of version {VERSION}: {where}: {first['msg']}") from error


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint's folder; `CheckpointError` if it is missing or damaged."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder.name}: no manifest can be read: {_words(error)}") from error
    return parse(text, folder.name)


def described(path: Path) -> File:
    """Read a file and describe it."""
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return File(name=path.name, nbytes=nbytes, sha256=digest.hexdigest())


def check(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files of a checkpoint with its manifest; `CheckpointError` if a file is missing or differs."""
    entries = {entry.name: entry for entry in manifest.files}
    for name in names:
        expected = entries.get(name)
        if expected is None:
            raise CheckpointError(f"{folder.name}: the manifest names no {name}")
        try:
            nbytes = (folder / name).stat().st_size
            if nbytes != expected.nbytes:
                raise CheckpointError(
                    f"{folder.name}: {name} is torn: it must have {expected.nbytes} bytes, it has {nbytes}"
                )
            seen = described(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder.name}: {name} cannot be read: {_words(error)}") from error
        if seen != expected:
            raise CheckpointError(f"{folder.name}: {name} is damaged: its SHA-256 is not the one in the manifest")


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
