"""Where the samples of TFRecord and tar files lie, found by their heads: no sample is read, without TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_ext.errors import InvalidError

Columns = dict[str, np.ndarray[Any, Any]]

# The framing of a TFRecord (tensorflow/core/lib/io/record_writer.h): uint64 length, masked CRC-32C of the length, the
# data, masked CRC-32C of the data.
_HEAD = struct.Struct("<QI")
_FOOT_NBYTES = 4
_CHECKED_AT_ONCE = 1 << 16
_GZIP = b"\x1f\x8b"

_BLOCK = 512  # the unit of a tar file
# WebDataset: the base name ends at the first dot behind the last slash, and the rest is the key.
_BASE_AND_KEY = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")


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


def tfrecord_columns(paths: Sequence[str]) -> Columns:
    """Find the records of TFRecord files.

    Args:
        paths: the files, in their order.

    Returns:
        "first": the number of the first record of each file, and at its end the number of all records; "offset": where
        the data of each record begin in its file; "nbytes": their length.

    Raises:
        InvalidError: a file cannot be read, is torn, compressed, or no TFRecord file.
    """
    offsets: list[np.ndarray[Any, Any]] = []
    sizes: list[np.ndarray[Any, Any]] = []
    first = [0]
    for path in paths:
        with _opened(path) as file:
            begins, lengths = _records(path, file.fileno())
        offsets.append(begins)
        sizes.append(lengths)
        first.append(first[-1] + len(begins))
    return {
        "first": np.array(first, np.int64),
        "offset": smallest(np.concatenate(offsets)),
        "nbytes": smallest(np.concatenate(sizes)),
    }


def _records(path: str, descriptor: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    end, at, unpack = os.fstat(descriptor).st_size, 0, _HEAD.unpack
    # arrays and not lists, whose objects would take ten times as much memory for a million records
    begins, lengths, heads = array("q"), array("q"), list[bytes]()
    while at < end:
        head = os.pread(descriptor, _HEAD.size, at)
        if len(head) < _HEAD.size:
            _check_heads(path, heads, begins)
            raise InvalidError(
                f"tfrecord ({path}): it is torn: a record begins at byte {at:,}, and the file ends there"
            )
        length, _ = unpack(head)
        begins.append(at + _HEAD.size)
        lengths.append(length)
        heads.append(head)
        at += _HEAD.size + length + _FOOT_NBYTES
        if len(heads) == _CHECKED_AT_ONCE:
            _check_heads(path, heads, begins)
            heads.clear()
    _check_heads(path, heads, begins)
    if at > end:
        raise InvalidError(
            f"tfrecord ({path}): it is torn: the record at byte {begins[-1] - _HEAD.size:,} has {lengths[-1]:,} bytes, "
            f"and the file ends at byte {end:,}; write the file again"
        )
    return np.array(begins, np.int64), np.array(lengths, np.int64)


def _check_heads(path: str, heads: list[bytes], begins: array[int]) -> None:
    if not heads:
        return
    rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _HEAD.size)
    kept = np.ascontiguousarray(rows[:, 8:]).view("<u4").ravel()
    wrong = np.flatnonzero(_masked_crc(rows[:, :8]) != kept)
    if not len(wrong):
        return
    at = begins[len(begins) - len(heads) + int(wrong[0])] - _HEAD.size
    if at == 0 and heads[0].startswith(_GZIP):
        raise InvalidError(f"tfrecord ({path}): it is compressed (gzip), and its records cannot be found; unpack it")
    raise InvalidError(
        f"tfrecord ({path}): the head of the record at byte {at:,} is damaged, or this is no TFRecord file: the "
        "checksum of its length is wrong"
    )


def _crc_table() -> np.ndarray[Any, Any]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give the masked CRC-32C (Castagnoli) of each row of bytes."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(rows.shape[1]):
        crc = _CRC_TABLE[(crc ^ rows[:, column]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


@dataclasses.dataclass(frozen=True)
class Member:
    """A file inside of a tar file.

    Args:
        name: its name.
        offset: where its bytes begin.
        nbytes: their number.
    """

    name: str
    offset: int
    nbytes: int


def tar_columns(paths: Sequence[str]) -> tuple[Columns, tuple[str, ...]]:
    """Find the samples of tar files in WebDataset's form: members that follow each other and have one base name.

    Args:
        paths: the files, in their order.

    Returns:
        The columns, and the keys of a sample, sorted. "first": as in `tfrecord_columns`; "block": the block of 512
        bytes at which the first member's bytes begin; for each key K "block.K", the blocks from there to the member's
        bytes, and "nbytes.K", their number.

    Raises:
        InvalidError: a file cannot be read, is torn or no tar file; or the members of a sample are not those of all.
    """
    first, blocks = [0], array("q")
    keys: tuple[str, ...] = ()
    later: dict[str, array[int]] = {}
    sizes: dict[str, array[int]] = {}
    for path in paths:
        for base, members in _samples(path):
            found = tuple(sorted(members))
            if not keys:
                keys = found
                later, sizes = {key: array("q") for key in keys}, {key: array("q") for key in keys}
            if found != keys:
                raise InvalidError(_unlike(path, base, found, keys))
            begin = min(member.offset for member in members.values()) // _BLOCK
            blocks.append(begin)
            for key, member in members.items():
                later[key].append(member.offset // _BLOCK - begin)
                sizes[key].append(member.nbytes)
        first.append(len(blocks))
    columns = {"first": np.array(first, np.int64), "block": smallest(blocks)}
    for key in keys:
        columns[f"block.{key}"], columns[f"nbytes.{key}"] = smallest(later[key]), smallest(sizes[key])
    return columns, keys


def _unlike(path: str, base: str, found: tuple[str, ...], keys: tuple[str, ...]) -> str:
    missing = [f"{base}.{key}" for key in keys if key not in found]
    more = [f"{base}.{key}" for key in found if key not in keys]
    seen = " and ".join(
        words
        for words in (
            f"{', '.join(missing)} is missing" if missing else "",
            f"{', '.join(more)} is there" if more else "",
        )
        if words
    )
    return (
        f"tar ({path}): all samples must have the same members; the first sample of the data has {', '.join(keys)}, "
        f"and in sample {base!r} {seen}"
    )


def _samples(path: str) -> Iterator[tuple[str, dict[str, Member]]]:
    base, members = "", dict[str, Member]()
    for member in tar_members(path):
        match = _BASE_AND_KEY.match(member.name)
        if match is None:  # folders' notes, such as README, are no samples
            continue
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


def tar_members(path: str) -> Iterator[Member]:
    """Walk through the files inside of a tar file, in their order, by their heads.

    Args:
        path: a tar file that is not compressed: ustar, GNU or pax.

    Yields:
        The members that are plain files.

    Raises:
        InvalidError: the file cannot be read, is torn, compressed, or no tar file.
    """
    with _opened(path) as file:
        descriptor = file.fileno()
        end, at = os.fstat(descriptor).st_size, 0
        name, size = "", -1  # from an extended head, for the member that follows it
        while at < end:
            head = os.pread(descriptor, _BLOCK, at)
            if head.count(0) == _BLOCK:
                return
            length = _checked_length(path, head, at)
            kind, data = head[156:157], at + _BLOCK
            length = size if size >= 0 and kind not in b"xgLK" else length
            if data + length > end:
                raise InvalidError(
                    f"tar ({path}): it is torn: the member at byte {at:,} has {length:,} bytes, and the file ends at "
                    f"byte {end:,}; write the file again"
                )
            if kind == b"L":
                name = os.pread(descriptor, length, data).rstrip(b"\0").decode(errors="surrogateescape")
            elif kind == b"x":
                settings = _pax(os.pread(descriptor, length, data))
                name, size = settings.get("path", name), int(settings.get("size", size))
            elif kind not in b"gK":
                if kind in b"0\0" and kind:
                    yield Member(name or _own_name(head), data, length)
                name, size = "", -1
            at = data + -(-length // _BLOCK) * _BLOCK
        if at > end:
            raise InvalidError(f"tar ({path}): it is torn: it ends at byte {end:,}, within a block; write it again")


def _checked_length(path: str, head: bytes, at: int) -> int:
    """Check the sum of a head, and give the length of its member."""
    if len(head) == _BLOCK:
        # the checksum's own eight bytes count as spaces
        total = sum(head) - sum(head[148:156]) + 8 * ord(" ")
        try:
            if total == int(head[148:156].strip(b"\0 ") or b"-1", 8):
                field = head[124:136]
                if field[0] & 0x80:  # a length from 8 GiB on, as a number of base 256
                    return int.from_bytes(field, "big") & ((1 << 88) - 1)
                return int(field.strip(b"\0 ") or b"0", 8)
        except ValueError:
            pass
    if at == 0 and head.startswith(_GZIP):
        raise InvalidError(f"tar ({path}): it is compressed (gzip), and its members cannot be found; unpack it")
    raise InvalidError(f"tar ({path}): the head at byte {at:,} is damaged, or this is no tar file")


def _own_name(head: bytes) -> str:
    name = head[:100].split(b"\0", 1)[0]
    prefix = head[345:500].split(b"\0", 1)[0] if head[257:262] == b"ustar" and head[263:265] == b"00" else b""
    return (prefix + b"/" + name if prefix else name).decode(errors="surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """Give the settings of an extended head: lines of "length key=value"."""
    found: dict[str, str] = {}
    while data.strip(b"\0"):
        length = int(data.split(b" ", 1)[0])
        key, _, value = data[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        found[key.decode()] = value.decode(errors="surrogateescape")
        data = data[length:]
    return found


def _opened(path: str) -> Any:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise InvalidError(f"{path}: it cannot be read: {error.strerror or error}") from error
