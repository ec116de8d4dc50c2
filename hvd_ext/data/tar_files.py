"""Tar files in WebDataset's form as sources: where their members lie is found by their heads, and none is read."""

from __future__ import annotations

import dataclasses
import itertools
import os
import posixpath
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.data.record_files import Columns, RecordFiles, opened, smallest
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

_BLOCK = 512  # the unit of a tar file
_GZIP = b"\x1f\x8b"
_LARGEST_EXTENSION = 16 << 20  # bytes of an extended head, which is read whole; real ones have some kB
# The type flags of POSIX (pax, "ustar Interchange Format") and of GNU tar.
_FILE, _HARD_LINK, _SYMBOLIC_LINK, _FOLDER, _SPARSE = "0", "1", "2", "5", "S"
_FILES = (_FILE, "\0", "7")  # of old programs, and contiguous
_WITHOUT_DATA = (_SYMBOLIC_LINK, "3", "4", _FOLDER, "6")  # whatever the size in their heads
_LONG_NAME, _LONG_LINK, _SETTINGS, _COMMON_SETTINGS = "L", "K", ("x", "X"), "g"
_EXTENSIONS = (_LONG_NAME, _LONG_LINK, *_SETTINGS, _COMMON_SETTINGS)
_LABEL = "V"  # a volume's name
# WebDataset: the base name ends at the first dot behind the last slash, and the rest is the key.
_BASE_AND_KEY = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$", re.DOTALL)


class _Tar(RecordFiles):
    kind = "tar"

    def _scan(self, paths: Sequence[str]) -> Columns:
        """Find the samples.

        Returns:
            "keys": the keys of a sample, sorted; "first"; "block": the block of 512 bytes at which the first bytes of a
            sample's members begin; for each key K "block.K", the blocks from there to the member's bytes, and
            "nbytes.K", their number.
        """
        first, keys = [0], tuple[str, ...]()
        numbers: dict[str, array[int]] = defaultdict(lambda: array("q"))
        for path in paths:
            for base, members in _samples(path):
                present = tuple(sorted(members))
                keys = keys or present
                if present != keys:
                    raise InvalidError(_unlike(path, base, present, keys))
                begin = min(member.offset for member in members.values()) // _BLOCK
                numbers["block"].append(begin)
                for key, member in members.items():
                    numbers[f"block.{key}"].append(member.offset // _BLOCK - begin)
                    numbers[f"nbytes.{key}"].append(member.nbytes)
            first.append(len(numbers["block"]))
        columns = {name: smallest(column) for name, column in numbers.items()}
        return {"keys": np.array(keys, np.str_), "first": np.array(first, np.int64), **columns}

    @property
    def _keys(self) -> list[str]:
        return list(map(str, self.columns["keys"]))

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        return {key: tf.TensorSpec((), tf.string) for key in self._keys}

    def locate(self, numbers: tf.Tensor) -> Any:
        import tensorflow as tf

        def of(name: str) -> tf.Tensor:
            return tf.cast(tf.gather(self.tensors[name], numbers), tf.int64)

        begin = of("block")
        ranges = {key: ((begin + of(f"block.{key}")) * _BLOCK, of(f"nbytes.{key}")) for key in self._keys}
        return self.path_of(numbers), ranges

    def read(self, located: Any) -> Any:
        from hvd_ext.data import native

        path, ranges = located
        return {key: native.read_range(path, offset, nbytes) for key, (offset, nbytes) in ranges.items()}


def tar(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> _Tar:
    """Take samples from tar files in WebDataset's form: the members that follow each other and have one base name.

    A sample is a dictionary: of "shard/000123.jpg" and "shard/000123.cls" the contents, as string scalars, under the
    keys "jpg" and "cls". A member that is a link, hard or symbolic, has the contents of the member before it that the
    link leads to. Archives that follow each other in one file are read as one.

    Args:
        files: a file, a pattern such as "train-*.tar", or a list of them, on a local or mounted file system. They are
            taken in the order of their names, each once, and must not be compressed.

    Returns:
        The source.

    Raises:
        InvalidError: there are no such files, or they are not local. When the samples are first looked for: a file is
            torn, damaged, compressed or no tar file, a sample has not the members that the others have, or a member is
            sparse, a device, or a link that leads to no file before it.
    """
    return _Tar(files)


@dataclasses.dataclass(frozen=True)
class _Member:
    """A member of a tar file.

    Args:
        name: its name.
        kind: its type flag; `_FILE` for all plain files.
        at: where its head begins.
        offset: where its bytes begin.
        nbytes: their number.
        target: the name that a link leads to.
    """

    name: str
    kind: str
    at: int
    offset: int
    nbytes: int
    target: str


def _unlike(path: str, base: str, present: tuple[str, ...], keys: tuple[str, ...]) -> str:
    missing = [f"{base}.{key}" for key in keys if key not in present]
    more = [f"{base}.{key}" for key in present if key not in keys]
    differences = ((missing, "is missing"), (more, "is there"))
    seen = " and ".join(f"{', '.join(names)} {words}" for names, words in differences if names)
    return (
        f"tar ({path}): all samples must have the same members; the first sample of the data has {', '.join(keys)}, "
        f"and in sample {base!r} {seen}"
    )


def _samples(path: str) -> Iterator[tuple[str, dict[str, _Member]]]:
    base, members = "", dict[str, _Member]()
    for member in _followed(path):
        match = _BASE_AND_KEY.match(member.name)
        if match is None or member.kind in (_FOLDER, _LABEL):  # folders' notes, such as README, are no samples
            continue
        _check_file(path, member)
        key = match[2].lower()
        if match[1] != base:
            if members:
                yield base, members
            base, members = match[1], {}
        if key in members:
            raise InvalidError(f"tar ({path}): the member {member.name!r} is there twice in one sample")
        members[key] = member
    if members:
        yield base, members


def _check_file(path: str, member: _Member) -> None:
    """Refuse a member that has no bytes to read."""
    if member.kind in (_HARD_LINK, _SYMBOLIC_LINK):
        raise InvalidError(
            f"tar ({path}): the member {member.name!r} is a link to {member.target!r}, which is no file before it in "
            "the archive; write the archive with the file in its place (tar --hard-dereference --dereference)"
        )
    if member.kind != _FILE:
        raise InvalidError(
            f"tar ({path}): the member {member.name!r} is no file: its type flag is {member.kind!r}; write the archive "
            "without it"
        )
    try:
        member.name.encode()
    except UnicodeEncodeError:
        raise InvalidError(
            f"tar ({path}): the member {member.name!r}: its name must be UTF-8, because its end is a key of the sample"
        ) from None


def _followed(path: str) -> Iterator[_Member]:
    """Yield the members of a tar file; links that lead to a file before them have its bytes."""
    files: dict[str, _Member] | None = None  # by name, from the first link on: most archives have none
    for member in _members(path):
        if member.kind in (_HARD_LINK, _SYMBOLIC_LINK):
            if files is None:
                before = itertools.takewhile(lambda earlier, end=member.at: earlier.at < end, _members(path))
                files = {_plain(earlier.name): earlier for earlier in before if earlier.kind == _FILE}
            target = files.get(_target(member))
            if target is not None:
                member = dataclasses.replace(target, name=member.name, at=member.at)
        if files is not None and member.kind == _FILE:
            files[_plain(member.name)] = member
        yield member


def _plain(name: str) -> str:
    """Give a name in the form in which names are compared: "./a//b" is "a/b"."""
    return posixpath.normpath(name.lstrip("/"))


def _target(link: _Member) -> str:
    """Give the name that a link leads to, in the form in which names are compared."""
    if link.kind == _HARD_LINK:
        return _plain(link.target)
    # from its folder on; what begins with "/" lies outside of the archive
    return posixpath.normpath(posixpath.join(posixpath.dirname(link.name.lstrip("/")), link.target))


def _members(path: str) -> Iterator[_Member]:
    """Walk through a tar file by its heads: ustar, GNU or pax, and archives that follow each other."""
    with opened("tar", path) as descriptor:
        end, at, ended = os.fstat(descriptor).st_size, 0, False
        common: dict[str, str] = {}  # settings of all members from here on
        settings: dict[str, str] = {}  # of the next member
        while at < end:
            head = os.pread(descriptor, _BLOCK, at)
            if not head.strip(b"\0"):  # the mark at the end of an archive; another archive may follow
                at, ended = at + _BLOCK, True
                continue
            ended = False
            kind, length = _checked(path, head, at)
            offset, name = at + _BLOCK, settings.get("path", common.get("path")) or _name(head)
            if kind not in _EXTENSIONS:
                _check_form(path, name, kind, common | settings)
                length = _length(path, name, kind, length, common | settings)
            if offset + length > end:
                raise InvalidError(
                    f"tar ({path}): it is torn: the member at byte {at:,} has {length:,} bytes, and the file ends at "
                    f"byte {end:,}; write the file again"
                )
            if kind in _EXTENSIONS:
                extension = _extension(path, descriptor, kind, at, length)
                if kind == _COMMON_SETTINGS:
                    common |= extension
                else:
                    settings |= extension
            else:
                target = settings.get("linkpath", common.get("linkpath")) or _text(head[157:257])
                yield _Member(name, _FILE if kind in _FILES else kind, at, offset, length, target)
                settings = {}
            at = offset + -(-length // _BLOCK) * _BLOCK
        if settings or not ended:
            raise InvalidError(
                f"tar ({path}): it is torn: no mark of the archive's end follows its last member; write it again, or "
                "append 1,024 zero bytes if it is complete"
            )


def _checked(path: str, head: bytes, at: int) -> tuple[str, int]:
    """Check the sum of a head, and give the type flag and the length of its member."""
    if len(head) == _BLOCK:
        # the checksum's own eight bytes count as spaces
        total = sum(head) - sum(head[148:156]) + 8 * ord(" ")
        length = _number(head[124:136])
        if length is not None and total == _number(head[148:156]):
            return head[156:157].decode("latin-1"), length
    if at == 0 and head.startswith(_GZIP):
        raise InvalidError(f"tar ({path}): it is compressed (gzip), and its members cannot be found; unpack it")
    raise InvalidError(f"tar ({path}): the head at byte {at:,} is damaged, or this is no tar file")


def _number(field: bytes) -> int | None:
    """Give the number in a field of a head; None where it is none."""
    if field[0] == 0x80:  # a length from 8 GiB on, as a number of base 256
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:262] == b"ustar" and head[263:265] == b"00" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _check_form(path: str, name: str, kind: str, settings: dict[str, str]) -> None:
    """Refuse a member whose bytes do not lie in the file as they are."""
    if kind == _SPARSE or any(key.startswith("GNU.sparse.") or key == "SCHILY.realsize" for key in settings):
        name = settings.get("GNU.sparse.name", name)
        raise InvalidError(
            f"tar ({path}): the member {name!r} is stored without its holes (a sparse file); write the archive again "
            "without --sparse"
        )


def _length(path: str, name: str, kind: str, length: int, settings: dict[str, str]) -> int:
    """Give the number of bytes that follow the head of a member."""
    if kind in _WITHOUT_DATA:
        return 0
    size = settings.get("size")
    if size is not None:
        if not re.fullmatch(r"[0-9]{1,18}", size):
            raise InvalidError(f"tar ({path}): the member {name!r}: its extended head is damaged: its size is {size!r}")
        length = int(size)
    if kind == _HARD_LINK and length:
        raise InvalidError(
            f"tar ({path}): the member {name!r} is a hard link of {length:,} bytes, and programs differ in whether "
            "those follow; write the archive again (tar --hard-dereference)"
        )
    return length


def _extension(path: str, descriptor: int, kind: str, at: int, length: int) -> dict[str, str]:
    """Read an extended head, which tells more of members that follow it."""
    if length > _LARGEST_EXTENSION:
        raise InvalidError(
            f"tar ({path}): the extended head at byte {at:,} is damaged: it has {length:,} bytes, and real ones have "
            f"at most {_LARGEST_EXTENSION:,}"
        )
    data = os.pread(descriptor, length, at + _BLOCK)
    if kind in (_LONG_NAME, _LONG_LINK):
        return {"path" if kind == _LONG_NAME else "linkpath": _text(data)}
    settings: dict[str, str] = {}
    data = data.rstrip(b"\0")
    while data:  # lines of "length key=value"
        match = re.match(rb"([0-9]{1,9}) ([^=]+)=", data)
        line = data[: int(match[1])] if match is not None else b""
        if match is None or len(line) < max(int(match[1]), len(match[0]) + 1) or line[-1:] != b"\n":
            raise InvalidError(f"tar ({path}): the extended head at byte {at:,} is damaged")
        key, value = (part.decode(errors="surrogateescape") for part in (match[2], line[len(match[0]) : -1]))
        if "\0" in value and key in ("path", "linkpath"):
            raise InvalidError(f"tar ({path}): the extended head at byte {at:,} is damaged: {key} holds a zero byte")
        settings[key] = value
        data = data[len(line) :]
    return settings
