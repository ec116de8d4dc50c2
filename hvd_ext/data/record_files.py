"""Files that hold many samples each: which files these are, and the index that says where their samples lie."""

from __future__ import annotations

import abc
import contextlib
import functools
import glob
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.data.sources import Source, constants, digest_of, local_path, why_no_file
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

Columns = dict[str, np.ndarray[Any, Any]]

_FORMAT = 2  # of the kept indices
_DIGEST_NBYTES = hashlib.sha256().digest_size


def smallest(values: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give numbers from 0 on in the smallest unsigned type that holds them: a million samples stay a few megabytes.

    Args:
        values: whole numbers.

    Returns:
        The numbers as uint8, uint16, uint32 or int64.
    """
    numbers = np.asarray(values, np.int64)
    largest = int(numbers.max(initial=0))
    for dtype in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(dtype).max:
            return numbers.astype(dtype)
    return numbers


class RecordFiles(Source):
    """Files that hold many samples each; where those lie is found by a walk through the files, once."""

    def __init__(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self._paths = _paths(self.kind, files)
        root = os.path.dirname(self._paths[0]) if len(self._paths) == 1 else os.path.commonpath(self._paths)
        names = [os.path.relpath(path, root) for path in self._paths]
        states = [os.stat(path) for path in self._paths]
        sizes = [[name, state.st_size] for name, state in zip(names, states, strict=True)]
        self.contents = digest_of(hashlib.sha256(), self.kind, sizes)
        self.digest = digest_of(hashlib.sha256(), self.kind, sizes, [state.st_mtime_ns for state in states])
        self._columns: Columns | None = None
        nbytes = sum(state.st_size for state in states)
        self.words = f"{self.kind}: {len(self._paths)} files, {nbytes / 1e6:,.0f} MB, the first {self._paths[0]}"

    @property
    def samples(self) -> int:
        """The number of samples; the files are walked through for it, once."""
        return int(self.columns["first"][-1])

    def open(self, folder: Path | None = None) -> None:
        """Find the samples: by a kept index, or by a walk through the files, whose index is then kept.

        Args:
            folder: where the index is kept for the next job; None: nowhere.
        """
        if self._columns is not None:
            return
        kept = None if folder is None else folder / f"index-{self.digest[:16]}"
        columns = None if kept is None else _kept(kept, self.digest)
        if columns is None:
            columns = self._scan(self._paths)
            if not columns["first"][-1]:
                raise InvalidError(f"{self.kind} ({self._paths[0]}): the files hold no samples")
            if kept is not None:
                _keep(kept, self.digest, columns)
        self._columns = columns

    @abc.abstractmethod
    def _scan(self, paths: Sequence[str]) -> Columns:
        """Walk through the files.

        Args:
            paths: the files, in their order.

        Returns:
            The index. Its column "first" has the number of the first sample of each file, and at its end the number of
            all samples.
        """

    @property
    def columns(self) -> Columns:
        """The index: what a walk through the files has found, or an earlier job has kept."""
        self.open()
        assert self._columns is not None
        return self._columns

    @functools.cached_property
    def tensors(self) -> dict[str, tf.Tensor]:
        """The numbers of the index, and "path", the paths of the files."""
        numbers = {name: column for name, column in self.columns.items() if column.dtype.kind in "iu"}
        return constants({**numbers, "path": [os.fsencode(path) for path in self._paths]})

    def path_of(self, numbers: tf.Tensor) -> tf.Tensor:
        """Give the paths of the files in which samples lie.

        Args:
            numbers: of the samples, int64 [n].

        Returns:
            string [n].
        """
        import tensorflow as tf

        file = tf.searchsorted(self.tensors["first"], numbers, side="right") - 1
        return tf.gather(self.tensors["path"], file)

    def place_of(self, number: int) -> str:
        """Say in which file a sample lies, and at which place of it.

        Args:
            number: the sample.
        """
        first = self.columns["first"]
        file = int(np.searchsorted(first, number, "right")) - 1
        return f"{self._paths[file]}, its sample {number - int(first[file])}"


def _paths(kind: str, files: Any) -> list[str]:
    named = [files] if isinstance(files, str | bytes | os.PathLike) else list(files)
    if not named:
        raise InvalidError(f"{kind}: no files were named")
    paths: set[str] = set()
    for name in named:
        path = local_path(kind, name)
        # the pattern as the user gave it: the working directory's own name may have brackets
        candidates = [path] if os.path.isfile(path) else map(os.path.abspath, glob.glob(os.fsdecode(os.fspath(name))))
        matches = [match for match in candidates if not os.path.isdir(match)]
        if not matches:
            raise InvalidError(f"{kind} ({path}): there is no such file")
        for match in matches:
            if not os.path.isfile(match):
                raise InvalidError(f"{kind} ({match}): {why_no_file(match)}")
        paths.update(matches)
    return sorted(paths)


@contextlib.contextmanager
def opened(kind: str, path: str) -> Iterator[int]:
    """Open a file to walk through it.

    Args:
        kind: of the source, for messages.
        path: the file.

    Yields:
        The file descriptor.

    Raises:
        InvalidError: the file cannot be opened, or cannot be read within the block.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        raise InvalidError(f"{kind} ({path}): it cannot be read: {error.strerror or error}") from error


def _kept(path: Path, digest: str) -> Columns | None:
    """Give a kept index; None where it is missing, torn, damaged or of other files."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    data = content[_DIGEST_NBYTES:]
    if hashlib.sha256(data).digest() != content[:_DIGEST_NBYTES]:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    return columns if columns.pop("about").tolist() == [str(_FORMAT), digest] else None


def _keep(path: Path, digest: str, columns: Columns) -> None:
    """Keep an index, whole or not at all; a disk that is full or read-only only means that the next job looks again."""
    buffer = io.BytesIO()
    np.savez(buffer, about=np.array([str(_FORMAT), digest]), **columns)  # type: ignore[arg-type]
    data = buffer.getvalue()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
