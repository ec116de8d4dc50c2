"""Write an image set with several processes: what is there stays, what is missing is drawn, no file is half there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL

from images.classes import classes
from images.manifest import DRAWING, NAME, SPLITS, ImageSetError, Recipe, read_manifest, write_manifest, write_whole
from images.scene import jpeg

LOCK = ".lock"
# Images per piece of work: half a second of drawing, so that the progress bar moves and processes end together.
PIECE = 100
SAMPLES = 24
PR_SET_PDEATHSIG = 1


class _Piece(NamedTuple):
    """Images [begin, end) of one split."""

    folder: Path
    recipe: Recipe
    split: str
    begin: int
    end: int


class _Written(NamedTuple):
    piece: _Piece
    digests: bytes
    nbytes: int
    drawn: int


def _whole_jpeg(path: Path) -> bytes | None:
    """The bytes of an image that is there and whole: a machine that lost power can leave an empty file behind."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data if data[:2] == b"\xff\xd8" and data[-2:] == b"\xff\xd9" else None


def _write_piece(piece: _Piece) -> _Written:
    digests, nbytes, drawn = [], 0, 0
    for index in range(piece.begin, piece.end):
        path = piece.folder / piece.recipe.path(piece.split, index)
        data = _whole_jpeg(path)
        if data is None:
            data = jpeg(piece.recipe.class_of(index), piece.recipe.pixels, piece.recipe.key(piece.split, index))
            write_whole(path, data)
            drawn += 1
        digests.append(hashlib.sha256(data).digest())
        nbytes += len(data)
    return _Written(piece, b"".join(digests), nbytes, drawn)


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group: the parent decides. A parent that is killed must not leave workers behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _pieces(folder: Path, recipe: Recipe) -> list[_Piece]:
    return [
        _Piece(folder, recipe, split, begin, min(begin + PIECE, recipe.count(split)))
        for split in SPLITS
        for begin in range(0, recipe.count(split), PIECE)
    ]


def _run(pieces: list[_Piece], workers: int) -> Iterator[_Written]:
    if workers == 1:
        yield from map(_write_piece, pieces)
        return
    with multiprocessing.get_context("spawn").Pool(min(workers, len(pieces)), _start_worker) as pool:
        yield from pool.imap_unordered(_write_piece, pieces)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ImageSetError(
                f"image set ({folder}) is being written by another process; wait for it to end"
            ) from None
        yield


def _check_folder(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """The manifest of a set that was begun before; empty for a new folder."""
    if folder.exists() and not folder.is_dir():
        raise ImageSetError(f"output ({folder}) must be a folder, it is a file; choose another --output")
    if not (folder / NAME).exists():
        if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
            raise ImageSetError(f"output ({folder}) is not empty and holds no image set; choose another --output")
        return {}
    found = read_manifest(folder, complete=False)
    there, asked = ({"drawing": found.get("drawing"), **found["recipe"]}, {"drawing": DRAWING, **asdict(recipe)})
    for name, value in asked.items():
        if there.get(name) != value:
            seen = f"{name} {there.get(name)}, this call asks for {value}"
            raise ImageSetError(
                f"image set ({folder}) was made with {seen}; choose another --output or remove the folder"
            )
    return found


def space_needed(folder: Path, recipe: Recipe) -> int:
    """Bytes on disk that the images still to be drawn will take.

    Args:
        folder: where the set lies or will lie; it must exist.
        recipe: how it is made.

    Returns:
        An estimate from a few drawn images, in whole blocks of the file system.
    """
    block = max(1, os.statvfs(folder).f_frsize)
    step = max(1, recipe.train // SAMPLES)
    samples = [
        len(jpeg(recipe.class_of(i), recipe.pixels, recipe.key("train", i))) for i in range(0, recipe.train, step)
    ]
    blocks = np.mean([-(-nbytes // block) for nbytes in samples])
    there = sum(1 for _ in folder.glob("*/*/*.jpg"))
    return int(blocks * block * max(0, recipe.train + recipe.test - there))


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def _check_space(folder: Path, recipe: Recipe) -> None:
    needed, free = space_needed(folder, recipe), shutil.disk_usage(folder).free
    if needed > free:
        raise ImageSetError(
            f"disk of ({folder}) is too small: the images still to be drawn need about {_megabytes(needed)}, "
            f"{_megabytes(free)} are free; free some space, or ask for fewer or smaller images"
        )


def _remove_partial(folder: Path) -> None:
    for partial in folder.rglob("*.part"):
        partial.unlink(missing_ok=True)


def _no_space(folder: Path, recipe: Recipe, error: OSError) -> ImageSetError:
    needed = space_needed(folder, recipe)
    return ImageSetError(
        f"disk of ({folder}) cannot take more: {error.strerror}; the images still to be drawn need about "
        f"{_megabytes(needed)} more, {_megabytes(shutil.disk_usage(folder).free)} are free; whole images were kept: "
        "free some space and give the same command again"
    )


def _digest(written: list[_Written]) -> str:
    order = sorted(written, key=lambda one: (SPLITS.index(one.piece.split), one.piece.begin))
    return hashlib.sha256(b"".join(one.digests for one in order)).hexdigest()


def write(folder: Path, recipe: Recipe, workers: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Make an image set, or finish one that was begun.

    Args:
        folder: where it lies; train/CLASS/NUMBER.jpg, test/CLASS/NUMBER.jpg and manifest.json come into it.
        recipe: how it is made; the same recipe gives the same bytes whatever the number of processes.
        workers: number of processes that draw.
        progress: called with the number of images that a piece of work has added.

    Returns:
        The manifest, and under "drawn" the number of images that this call drew.

    Raises:
        ImageSetError: for a recipe or a folder that cannot be used, a full disk, or a set whose files were changed.
    """
    recipe.check()
    if workers < 1:
        raise ImageSetError(f"workers ({workers}) must be at least 1; choose the number of cores")
    found = _check_folder(folder, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImageSetError(f"output ({folder}) cannot be made: {error.strerror}; choose another --output") from None
    written: list[_Written] = []
    with _locked(folder):
        try:
            _remove_partial(folder)
            _check_space(folder, recipe)
            for split in SPLITS:
                for one in classes(recipe.classes):
                    (folder / split / one.name).mkdir(parents=True, exist_ok=True)
            if not found:
                write_manifest(folder, recipe, complete=False)
            for piece in _run(_pieces(folder, recipe), workers):
                written.append(piece)
                progress(piece.piece.end - piece.piece.begin)
            return _finish(folder, recipe, found, written)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(folder, recipe, error) from None
            raise ImageSetError(
                f"image set ({folder}) cannot be written: {error}; check the folder and its rights"
            ) from None
        finally:
            _remove_partial(folder)


def _finish(folder: Path, recipe: Recipe, found: dict[str, Any], written: list[_Written]) -> dict[str, Any]:
    digest, drawn = _digest(written), sum(one.drawn for one in written)
    if found.get("complete") and found["sha256"] != digest:
        raise ImageSetError(
            f"image set ({folder}) differs from its manifest: files were changed; remove the folder and make it again"
        )
    nbytes = {split: sum(one.nbytes for one in written if one.piece.split == split) for split in SPLITS}
    versions = {"numpy": np.__version__, "pillow": PIL.__version__}
    content = (
        found
        if found.get("complete")
        else write_manifest(folder, recipe, complete=True, sha256=digest, nbytes=nbytes, versions=versions)
    )
    return {**content, "drawn": drawn}
