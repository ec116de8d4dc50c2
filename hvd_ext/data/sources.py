"""Sources of samples for a cache: folders of files, TFRecord and tar files, arrays; samples are read by number."""

from __future__ import annotations

import abc
import contextlib
import functools
import glob
import hashlib
import json
import mmap
import os
import zipfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.data import record_files
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

Columns = record_files.Columns

_FORMAT = 1  # of the kept indices
_DECODED_AS = {"bool": "uint8", "uint32": "int32", "uint64": "int64"}  # `decode_raw` does not know these
_HASHED_AT_ONCE = 64 << 20


class Source(abc.ABC):
    """Samples that can be read by their numbers, 0 to `samples` - 1, by any process at any time.

    Attributes:
        kind: what the source is, for messages: "folder", "tfrecord", "tar" or "arrays".
        words: the source in words.
    """

    kind: str
    words: str

    @property
    @abc.abstractmethod
    def samples(self) -> int:
        """The number of samples."""

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The nest of `tf.TensorSpec` that `read` gives."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """What identifies the data on this host: names, sizes and times of change of files, or the bytes of arrays."""

    @property
    @abc.abstractmethod
    def contents(self) -> str:
        """What must be the same on all ranks: names and sizes, without times, which copies on other hosts may lose."""

    def locate(self, numbers: tf.Tensor) -> Any:
        """Say where samples lie, as a pure function of TensorFlow: once for many of them, because this costs much less.

        Args:
            numbers: int64 [n].

        Returns:
            A nest of tensors with n rows, from which `read` reads.
        """
        return numbers

    @abc.abstractmethod
    def read(self, located: Any) -> Any:
        """Read a sample, as a pure function of TensorFlow.

        Args:
            located: one row of what `locate` gives.

        Returns:
            A nest of tensors as `element_spec` has it.
        """

    @abc.abstractmethod
    def place_of(self, number: int) -> str:
        """Say where a sample lies, for messages.

        Args:
            number: the sample.
        """

    def open(self, folder: Path | None = None) -> None:  # noqa: B027 - most sources have nothing to open
        """Find the samples, if that takes a walk through the data.

        Args:
            folder: where the index is kept for the next job; None: nowhere.
        """


class _Folder(Source):
    kind = "folder"

    def __init__(self, path: str, pattern: str, labels: bool) -> None:
        self._path, self._labels = path, labels
        heads: list[bytes] = []  # of the names of each folder: what they have in common at their begin
        tails: list[bytes] = []  # ... and at their end
        first, middles, lengths, classes = [0], list[bytes](), array("q"), list[int]()
        whole, names_alone = hashlib.sha256(), hashlib.sha256()
        self.class_names = _class_names(path) if labels else []
        numbers = {name: number for number, name in enumerate(self.class_names)}
        for within, entries in _walk(path, pattern):
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
                whole.update(b"%d\0" % state.st_mtime_ns)
            middles.append(b"".join(name[len(head) : len(name) - len(tail)] for name in names))
            lengths.extend(len(name) - len(head) - len(tail) for name in names)
            first.append(first[-1] + len(names))
            classes.append(numbers[within.split("/", 1)[0]] if labels else 0)
        if not lengths:
            raise InvalidError(f"folder ({path}): no file is called {pattern!r}; check the path and pattern=")
        self._columns = {
            "first": np.array(first, np.int64),
            "label": np.array(classes, np.int32),
            "offset": record_files.smallest(np.concatenate([[0], np.cumsum(lengths)])),
        }
        self._heads, self._tails, self._middles = heads, tails, b"".join(middles)
        self._samples = len(lengths)
        whole.update(names_alone.digest())
        described = (pattern, labels, self.class_names)  # a folder without files shifts the labels of others
        self._contents, self._digest = _hex(names_alone, *described), _hex(whole, *described)
        self.words = f"folder {path}: {self._samples:,} files"

    samples = property(lambda self: self._samples)
    digest = property(lambda self: self._digest)
    contents = property(lambda self: self._contents)

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        contents = tf.TensorSpec((), tf.string)
        return (contents, tf.TensorSpec((), tf.int32)) if self._labels else contents

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        texts = {"heads": self._heads, "tails": self._tails, "middles": self._middles}
        return _constants({**self._columns, **texts})

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        at = self._tensors
        folder = _found(at["first"], numbers)
        begin, end = (tf.cast(tf.gather(at["offset"], one), tf.int64) for one in (numbers, numbers + 1))
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

    The files are in the order of their names. Names that begin with a dot are left out.

    Args:
        path: the folder, on a local or mounted file system.
        pattern: which files, by their names, such as "*.jpg".
        labels: whether a sample is (contents, label), the label (int32) being the number of the folder right below
            `path` among those folders in alphabetical order; else it is the contents alone (a string scalar).

    Returns:
        The source; its `class_names` are the names of the class folders.

    Raises:
        InvalidError: the folder is not there or not local, no file has such a name, or a file lies in no class folder.
    """
    where = _local("folder", path)
    if not os.path.isdir(where):
        raise InvalidError(f"folder ({where}): there is no such folder")
    return _Folder(where, pattern, labels)


def _class_names(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _walk(root: str, pattern: str) -> Iterable[tuple[str, list[os.DirEntry[str]]]]:
    """Yield the folders that hold such files, by their paths below the root, in order, each of them once."""
    seen: set[tuple[int, int]] = set()  # a link to a folder further up would never end

    def inside(within: str) -> Iterable[tuple[str, list[os.DirEntry[str]]]]:
        path = os.path.join(root, within)
        state = os.stat(path)
        if (state.st_dev, state.st_ino) in seen:
            return
        seen.add((state.st_dev, state.st_ino))
        try:
            with os.scandir(path) as entries:
                ordered = sorted((one for one in entries if not one.name.startswith(".")), key=lambda one: one.name)
        except OSError as error:
            raise InvalidError(f"folder ({path}): it cannot be read: {error.strerror or error}") from error
        files = [one for one in ordered if fnmatchcase(one.name, pattern) and one.is_file()]
        if files:
            yield within, files
        for one in ordered:
            if one.is_dir():
                yield from inside(f"{within}/{one.name}" if within else one.name)

    yield from inside("")


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


class _Files(Source):
    """Files that hold many samples each; where those lie is found by a walk through the files, once."""

    def __init__(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self._paths = _paths(self.kind, files)
        root = os.path.dirname(self._paths[0]) if len(self._paths) == 1 else os.path.commonpath(self._paths)
        names = [os.path.relpath(path, root) for path in self._paths]
        states = [os.stat(path) for path in self._paths]
        sizes = [[name, state.st_size] for name, state in zip(names, states, strict=True)]
        self._contents = _hex(hashlib.sha256(), self.kind, sizes)
        self._digest = _hex(hashlib.sha256(), self.kind, sizes, [state.st_mtime_ns for state in states])
        self._columns: Columns | None = None
        self._keys: tuple[str, ...] = ()
        nbytes = sum(state.st_size for state in states)
        self.words = f"{self.kind}: {len(self._paths)} files, {nbytes / 1e6:,.0f} MB, the first {self._paths[0]}"

    digest = property(lambda self: self._digest)
    contents = property(lambda self: self._contents)

    @property
    def samples(self) -> int:
        return int(self._known()["first"][-1])

    def open(self, folder: Path | None = None) -> None:
        if self._columns is not None:
            return
        kept = None if folder is None else folder / f"index-{self._digest[:16]}.npz"
        columns = None if kept is None else _kept(kept, self._digest)
        if columns is None:
            columns, keys = self._scanned()
            if not columns["first"][-1]:
                raise InvalidError(f"{self.kind} ({self._paths[0]}): the files hold no samples")
            columns["keys"] = np.array(keys, np.str_)
            if kept is not None:
                _keep(kept, self._digest, columns)
        self._keys = tuple(map(str, columns.pop("keys")))
        self._columns = columns

    @abc.abstractmethod
    def _scanned(self) -> tuple[Columns, tuple[str, ...]]:
        """Walk through the files."""

    def _known(self) -> Columns:
        self.open()
        assert self._columns is not None
        return self._columns

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        return _constants({**self._known(), "path": [os.fsencode(path) for path in self._paths]})

    def place_of(self, number: int) -> str:
        first = self._known()["first"]
        file = int(np.searchsorted(first, number, "right")) - 1
        return f"{self._paths[file]}, its sample {number - int(first[file])}"


class _TFRecord(_Files):
    kind = "tfrecord"

    def _scanned(self) -> tuple[Columns, tuple[str, ...]]:
        return record_files.tfrecord_columns(self._paths), ()

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        return tf.TensorSpec((), tf.string)

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        at = self._tensors
        path = tf.gather(at["path"], _found(at["first"], numbers))
        return path, *(tf.cast(tf.gather(at[name], numbers), tf.int64) for name in ("offset", "nbytes"))

    def read(self, located: Any) -> Any:
        from hvd_ext.data import native

        return native.read_range(*located, checked=True)


def tfrecord(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Source:
    """Take each record of TFRecord files as a sample: its bytes, a string scalar.

    Args:
        files: a file, a pattern such as "train/*.tfrecord", or a list of them, on a local or mounted file system. They
            are taken in the order of their names, each once, and must not be compressed.

    Returns:
        The source.

    Raises:
        InvalidError: there are no such files, or they are not local. When the records are first looked for: a file is
            torn, compressed, or no TFRecord file.
    """
    return _TFRecord(files)


class _Tar(_Files):
    kind = "tar"

    def _scanned(self) -> tuple[Columns, tuple[str, ...]]:
        return record_files.tar_columns(self._paths)

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        self.open()
        return {key: tf.TensorSpec((), tf.string) for key in self._keys}

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        at = self._tensors

        def of(name: str) -> tf.Tensor:
            return tf.cast(tf.gather(at[name], numbers), tf.int64)

        begin = of("block")
        ranges = {key: ((begin + of(f"block.{key}")) * 512, of(f"nbytes.{key}")) for key in self._keys}
        return tf.gather(at["path"], _found(at["first"], numbers)), ranges

    def read(self, located: Any) -> Any:
        from hvd_ext.data import native

        path, ranges = located
        return {key: native.read_range(path, offset, nbytes) for key, (offset, nbytes) in ranges.items()}


def tar(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Source:
    """Take samples from tar files in WebDataset's form: the members that follow each other and have one base name.

    A sample is a dictionary: of "shard/000123.jpg" and "shard/000123.cls" the contents, as string scalars, under the
    keys "jpg" and "cls".

    Args:
        files: a file, a pattern such as "train-*.tar", or a list of them, on a local or mounted file system. They are
            taken in the order of their names, each once, and must not be compressed.

    Returns:
        The source.

    Raises:
        InvalidError: there are no such files, or they are not local. When the samples are first looked for: a file is
            torn, compressed or no tar file, or a sample has not the members that the others have.
    """
    return _Tar(files)


class _Arrays(Source):
    kind = "arrays"

    def __init__(self, arrays: Any) -> None:
        import tensorflow as tf

        self._arrays = tf.nest.map_structure(_array, _as_tuples(arrays))
        self._flat: list[np.ndarray[Any, Any]] = tf.nest.flatten(self._arrays)
        lengths = sorted({len(one) for one in self._flat})
        if len(lengths) != 1:
            raise InvalidError(
                "arrays: they must have the same number of rows; they have "
                f"{', '.join(map(str, lengths)) or 'no arrays'}"
            )
        if not lengths[0]:
            raise InvalidError("arrays: they must have at least one row; they have none")
        self._samples = lengths[0]
        shapes = ", ".join(f"{one.dtype} {one.shape}" for one in self._flat)
        self.words = f"arrays: {shapes}"

    samples = property(lambda self: self._samples)

    @functools.cached_property
    def _digests(self) -> tuple[str, str]:
        import tensorflow as tf

        structure = repr(tf.nest.map_structure(lambda one: None, self._arrays))
        whole, alone = [structure], [structure]
        for one in self._flat:
            described = f"{one.dtype.str} {one.shape}"
            file = _file_of(one)
            state = None if file is None else os.stat(file[0])
            if file is None:
                bytes_ = _hex(_hashed(one), described)
                whole.append(bytes_)
                alone.append(bytes_)
            else:  # an array in a file may be larger than memory: its file stands for its bytes
                assert state is not None
                place = (described, os.path.basename(file[0]), file[1], state.st_size)
                whole.append(_hex(hashlib.sha256(), *place, state.st_mtime_ns))
                alone.append(_hex(hashlib.sha256(), *place))
        return _hex(hashlib.sha256(), *whole), _hex(hashlib.sha256(), *alone)

    digest = property(lambda self: self._digests[0])
    contents = property(lambda self: self._digests[1])

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        return tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape[1:], _dtype(one)), self._arrays)

    @functools.cached_property
    def _readers(self) -> list[Callable[[tf.Tensor], tf.Tensor]]:
        return [_reader(one) for one in self._flat]

    def read(self, located: Any) -> Any:
        import tensorflow as tf

        return tf.nest.pack_sequence_as(self._arrays, [reader(located) for reader in self._readers])

    def place_of(self, number: int) -> str:
        return f"row {number} of the arrays"


def arrays(data: Any) -> Source:
    """Take the rows of arrays as samples. An array that `np.memmap` or `np.load(mmap_mode="r")` gave stays in its file.

    Args:
        data: an array, or a nest (tuples, lists, dictionaries) of arrays that are equal in their first dimension.

    Returns:
        The source.

    Raises:
        InvalidError: it holds something else, no rows, or unequal numbers of rows.
    """
    return _Arrays(data)


def as_source(value: Any) -> Source:
    """Give what a user passed as a source: itself, or that of arrays.

    Args:
        value: a source or arrays.

    Returns:
        The source.

    Raises:
        InvalidError: it is neither.
    """
    import tensorflow as tf

    if isinstance(value, Source):
        return value
    if isinstance(value, tf.data.Dataset):
        raise InvalidError(
            "source (a tf.data.Dataset): its samples cannot be read by number; put the cache behind it instead: "
            "dataset.apply(hvd.data.cached(name))"
        )
    if isinstance(value, str | bytes | os.PathLike):
        raise InvalidError(
            f"source ({os.fspath(value)!r}): say what lies there: hvd.data.folder(path), hvd.data.tfrecord(files) or "
            "hvd.data.tar(files)"
        )
    return arrays(value)


def _as_tuples(data: Any) -> Any:
    """Make lists tuples, because a list of arrays is no array."""
    if isinstance(data, Mapping):
        return {name: _as_tuples(one) for name, one in data.items()}
    return tuple(map(_as_tuples, data)) if isinstance(data, list | tuple) else data


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not hasattr(value, "shape"):
        raise InvalidError(
            f"arrays ({type(value).__name__}): must be arrays, or tuples, lists or dictionaries of arrays; other data "
            "come from hvd.data.folder, hvd.data.tfrecord or hvd.data.tar, or go through "
            "dataset.apply(hvd.data.cached(name))"
        )
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if not array.shape:
        raise InvalidError("arrays (a scalar): each array needs a first dimension, the samples")
    return array


def _dtype(array: np.ndarray[Any, Any]) -> tf.DType:
    import tensorflow as tf

    return tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype.newbyteorder("="))


def _reader(array: np.ndarray[Any, Any]) -> Callable[[tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    file = _file_of(array)
    if file is None:
        rows = _constants({"rows": array})["rows"]
        return lambda number: tf.gather(rows, number)

    from hvd_ext.data import native

    path, begin = file
    nbytes, shape, dtype = array.nbytes // len(array), array.shape[1:], _dtype(array)

    def read(number: tf.Tensor) -> tf.Tensor:
        data = native.read_range(tf.constant(path), begin + number * nbytes, tf.constant(nbytes, tf.int64))
        raw = tf.io.decode_raw(data, _DECODED_AS.get(dtype.name, dtype))
        return tf.reshape(tf.cast(raw, dtype) if dtype == tf.bool else tf.bitcast(raw, dtype), shape)

    return read


def _file_of(array: np.ndarray[Any, Any]) -> tuple[str, int] | None:
    """Give the file of an array that lies in one, and where its rows begin there; None for all other arrays."""
    mapped = getattr(array, "_mmap", None)
    name = getattr(array, "filename", None)
    plain = array.dtype.kind in "biuf" and array.dtype.isnative and array.flags.c_contiguous and array.size
    if not isinstance(array, np.memmap) or not isinstance(mapped, mmap.mmap) or name is None or not plain:
        return None
    if array.mode == "c":  # the array may differ from its file
        return None
    # A slice keeps the offset of the whole array: its place follows from where its bytes lie in the mapping.
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    within = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    return os.path.abspath(name), start + within


def _hashed(array: np.ndarray[Any, Any]) -> Any:
    whole = hashlib.sha256()
    if array.dtype.kind == "O":
        for value in array.ravel():
            if not isinstance(value, str | bytes):
                raise InvalidError(f"arrays (an array of {type(value).__name__}): must hold numbers or strings")
            data = value.encode() if isinstance(value, str) else value
            whole.update(b"%d\0" % len(data) + data)
        return whole
    rows = max(1, _HASHED_AT_ONCE // max(1, array.nbytes // len(array)))
    for begin in range(0, len(array), rows):
        whole.update(np.ascontiguousarray(array[begin : begin + rows]).tobytes())
    return whole


def _local(kind: str, path: Any) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidError(f"{kind} ({path!r}): must be a path") from None
    text = os.fsdecode(text)
    scheme, found, _ = text.partition("://")
    if found and scheme.isalnum():
        raise InvalidError(
            f"{kind} ({text}): must be on a local or mounted file system; for others give the cache an array of paths "
            "and read them in load, with tf.io.read_file"
        )
    return os.path.abspath(text)


def _paths(kind: str, files: Any) -> list[str]:
    given = [files] if isinstance(files, str | bytes | os.PathLike) else list(files)
    if not given:
        raise InvalidError(f"{kind}: no files were named")
    found: set[str] = set()
    for one in given:
        path = _local(kind, one)
        matches = [path] if os.path.isfile(path) else [name for name in glob.glob(path) if os.path.isfile(name)]
        if not matches:
            raise InvalidError(f"{kind} ({path}): there is no such file")
        found.update(matches)
    return sorted(found)


def _constants(columns: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Make eager tensors in the CPU's memory, which graphs capture and do not copy."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("CPU:0"):
        return {name: tf.constant(column) for name, column in columns.items()}


def _found(first: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Find the files of samples, by the numbers of the files' first samples."""
    import tensorflow as tf

    return tf.searchsorted(first, numbers, side="right") - 1


def _hex(whole: Any, *more: Any) -> str:
    """Give the digest of what was hashed and of further values that JSON can hold."""
    whole = whole.copy()
    whole.update(json.dumps(more).encode())
    return str(whole.hexdigest())


def _kept(path: Path, digest: str) -> Columns | None:
    """Give a kept index; None where it is missing, torn or of other files."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    about = columns.pop("about", None)
    return columns if about is not None and about.tolist() == [str(_FORMAT), digest] else None


def _keep(path: Path, digest: str, columns: Columns) -> None:
    """Keep an index, whole or not at all; a disk that is full or read-only only means that the next job looks again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                np.savez(file, about=np.array([str(_FORMAT), digest]), **columns)  # type: ignore[arg-type]
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
