"""Folders of files as sources: a file is a sample, and the folder in which it lies is its class."""

from __future__ import annotations

import functools
import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.data.record_files import smallest
from hvd_ext.data.sources import Source, constants, digest_of, local_path, why_no_file
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

_NAMED_EXTENSIONS = 5  # of the files that a pattern leaves out


class _Folder(Source):
    kind = "folder"

    def __init__(self, path: str, pattern: str, labels: bool) -> None:
        self._path, self._labels = path, labels
        heads: list[bytes] = []  # of the names of each folder: what they have in common at their begin
        tails: list[bytes] = []  # ... and at their end
        first, middles, lengths, classes = [0], list[bytes](), array("q"), list[int]()
        dated, names_alone = hashlib.sha256(), hashlib.sha256()
        self.class_names = [entry.name for entry in _entries(path) if _is_folder(entry)] if labels else []
        numbers = {name: number for number, name in enumerate(self.class_names)}
        others: Counter[str] = Counter()
        for within, entries in _walk(path, pattern, others):
            if labels and not within:
                raise InvalidError(
                    f"folder ({path}): the file {entries[0].name!r} lies in no class folder, so it has no label; move "
                    "it into one, or use labels=False"
                )
            names = [os.fsencode(entry.name) for entry in entries]
            head, tail = _common(names)
            heads.append(os.fsencode(os.path.join(path, within).rstrip("/")) + b"/" + head)
            tails.append(tail)
            for entry, name in zip(entries, names, strict=True):
                state = _state(entry)
                names_alone.update(b"%s/%s\0%d\0" % (os.fsencode(within), name, state.st_size))
                dated.update(b"%d\0" % state.st_mtime_ns)
            middles.append(b"".join(name[len(head) : len(name) - len(tail)] for name in names))
            lengths.extend(len(name) - len(head) - len(tail) for name in names)
            first.append(first[-1] + len(names))
            classes.append(numbers[within.split("/", 1)[0]] if labels else 0)
        self.left_out = _left_out(pattern, others)
        if not lengths:
            raise InvalidError(
                f"folder ({path}): no file is called {pattern!r}; check the path and pattern="
                f"{self.left_out and f'; {self.left_out}'}"
            )
        self._columns = {
            "first": np.array(first, np.int64),
            "label": np.array(classes, np.int32),
            "offset": smallest(np.concatenate([[0], np.cumsum(lengths)])),
        }
        self._heads, self._tails, self._middles = heads, tails, b"".join(middles)
        self._samples = len(lengths)
        dated.update(names_alone.digest())
        described = (pattern, labels, self.class_names)  # a folder without files shifts the labels of others
        self.contents, self.digest = digest_of(names_alone, *described), digest_of(dated, *described)
        self.words = f"folder {path}: {self._samples:,} files{self.left_out and f'; {self.left_out}'}"

    samples = property(lambda self: self._samples)

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        contents = tf.TensorSpec((), tf.string)
        return (contents, tf.TensorSpec((), tf.int32)) if self._labels else contents

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        texts = {"heads": self._heads, "tails": self._tails, "middles": self._middles}
        return constants({**self._columns, **texts})

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        at = self._tensors
        folder = tf.searchsorted(at["first"], numbers, side="right") - 1
        begin, end = (tf.cast(tf.gather(at["offset"], index), tf.int64) for index in (numbers, numbers + 1))
        heads, tails = (tf.gather(at[name], folder) for name in ("heads", "tails"))
        return heads, begin, end - begin, tails, tf.gather(at["label"], folder)

    def read(self, located: Any) -> Any:
        import tensorflow as tf

        head, begin, nbytes, tail, label = located
        # here and not in `locate`, where TensorFlow would copy all names for each sample
        contents = tf.io.read_file(head + tf.strings.substr(self._tensors["middles"], begin, nbytes) + tail)
        return (contents, label) if self._labels else contents

    def place_of(self, number: int) -> str:
        folder = int(np.searchsorted(self._columns["first"], number, "right")) - 1
        begin, end = (int(at) for at in self._columns["offset"][number : number + 2])
        return os.fsdecode(self._heads[folder] + self._middles[begin:end] + self._tails[folder])


def folder(path: str | os.PathLike[str], pattern: str = "*", *, labels: bool = True) -> Source:
    """Take each file of a folder and of the folders in it as a sample: its bytes, and the label of its class folder.

    The files are in the order of their names. Names that begin with a dot are left out. Links to files and folders are
    followed.

    Args:
        path: the folder, on a local or mounted file system.
        pattern: which files, by their names, such as "*.jpg" or "*.[jJ][pP][gG]". The log says how many files it leaves
            out, by their extensions.
        labels: whether a sample is (contents, label), the label (int32) being the number of the folder right below
            `path` among those folders in alphabetical order; else it is the contents alone (a string scalar).

    Returns:
        The source; its `class_names` are the names of the class folders.

    Raises:
        InvalidError: the folder is not there or not local, no file has such a name, a file lies in no class folder, or
            a link leads nowhere or to a folder that holds it.
    """
    where = local_path("folder", path)
    if not os.path.isdir(where):
        raise InvalidError(f"folder ({where}): there is no such folder")
    return _Folder(where, pattern, labels)


def _walk(root: str, pattern: str, left_out: Counter[str]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield the folders that hold matching files, by their paths below the root, in order; links are followed.

    Args:
        root: the folder.
        pattern: of the files' names.
        left_out: counts the files whose names do not match, by their extensions.
    """

    def inside(within: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        path = os.path.join(root, within)
        state = os.stat(path)
        identity = (state.st_dev, state.st_ino)
        if identity in above:
            raise InvalidError(
                f"folder ({path}): it is a link to a folder that holds it, so its files would never end; remove it"
            )
        files: list[os.DirEntry[str]] = []
        folders: list[str] = []
        for entry in _entries(path):
            matches = fnmatchcase(entry.name, pattern)
            if _is_folder(entry):
                folders.append(f"{within}/{entry.name}" if within else entry.name)
            elif not entry.is_file() and (matches or entry.is_symlink()):
                raise InvalidError(f"folder ({entry.path}): {why_no_file(entry.path)}")
            elif matches:
                files.append(entry)
            else:
                left_out[os.path.splitext(entry.name)[1]] += 1
        if files:
            yield within, files
        for folder in folders:
            yield from inside(folder, above | {identity})

    yield from inside("", frozenset())


def _entries(path: str) -> list[os.DirEntry[str]]:
    """Give what a folder holds, in the order of names, without names that begin with a dot."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise InvalidError(f"folder ({path}): it cannot be read: {error.strerror or error}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        raise InvalidError(f"folder ({entry.path}): {why_no_file(entry.path)}") from None


def _left_out(pattern: str, left_out: Counter[str]) -> str:
    """Say how many files a pattern leaves out, by their extensions; "" where there are none."""
    if not left_out:
        return ""
    named = left_out.most_common(_NAMED_EXTENSIONS)
    words = [f"{number:,} {f'*{extension}' if extension else 'without an extension'}" for extension, number in named]
    others = left_out.total() - sum(number for _, number in named)
    return f"{pattern!r} leaves out {', '.join(words)}{f' and {others:,} others' if others else ''}"


def _state(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as error:
        raise InvalidError(f"folder ({entry.path}): it cannot be read: {error.strerror or error}") from error


def _common(names: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Give what names have in common at their begin and at their end, such that the two never overlap."""
    head = _prefix(names)
    return head, _prefix([name[len(head) :][::-1] for name in names])[::-1]


def _prefix(names: Sequence[bytes]) -> bytes:
    least, largest = min(names), max(names)
    return least[: next((at for at, byte in enumerate(least) if largest[at : at + 1] != bytes([byte])), len(least))]
