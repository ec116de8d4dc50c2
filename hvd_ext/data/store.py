"""An open store of samples (tf_ops/cache/store.h) as Python sees it: where its places lie, what it counts and warns of.

On a disk a cache has a folder of its own, HOST/NAME-FINGERPRINT under the folder that the user has named. The host's
name is there because processes of several hosts must never write to one index: they map it, and file systems that hosts
share do not keep such mappings alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.data import native
from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import process

_LOG = logging.getLogger("hvd_ext")

ABOUT = "about.json"
MEMORY = Path("/dev/shm")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_FOLDER = re.compile(r"^(?P<name>.+)-(?P<digits>[0-9a-f]{16})$")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|[kKMGT]i?B|%)\s*$")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}IB": 1 << (10 * power) for power, letter in enumerate("KMGT", 1)
}


def check_name(name: object) -> str:
    """Check a cache's name, which is part of file names.

    Args:
        name: what the user has passed.

    Returns:
        The name.

    Raises:
        InvalidError: it has other characters than letters, digits, ".", "_" and "-", or more than 64.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidError(
            f"name ({name!r}): must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or a digit"
        )
    return name


def nbytes_of(value: int | str | None, what: str, share_of: Callable[[], int] | None = None) -> int:
    """Read a number of bytes.

    Args:
        value: a whole number; "8GB" (10^9) or "8GiB" (2^30); "50%" where `share_of` is given; None for 0.
        what: the argument, for messages.
        share_of: gives what a share is a share of.

    Returns:
        Bytes.

    Raises:
        InvalidError: the value has another form.
    """
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is not None and match[2] != "%":
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if match is not None and share_of is not None and float(match[1]) <= 100:
        return int(share_of() * float(match[1]) / 100)
    share = ', a share of the free memory such as "50%"' if share_of is not None else ""
    raise InvalidError(f'{what} ({value!r}): must be a number of bytes, a size such as "8GB" or "8GiB"{share}, or None')


def free_memory() -> int:
    """Give the bytes that the host can give without pressing others: what is left to the cgroup and to the machine."""
    nbytes = ctypes.c_int64()
    native.call("hvd_ext_cache_free_memory", None, ctypes.byref(nbytes))
    return nbytes.value


def folder_of(disk: str | os.PathLike[str], name: str, fingerprint: str) -> Path:
    """Give the folder of a cache on this host.

    Args:
        disk: the folder that the user has named.
        name: the cache's name.
        fingerprint: hexadecimal digits, of which the first 16 count.
    """
    return host_folder(disk) / f"{name}-{fingerprint[:16]}"


def host_folder(disk: str | os.PathLike[str]) -> Path:
    """Give the folder of this host's caches.

    Args:
        disk: the folder that the user has named.
    """
    return Path(os.path.abspath(os.fspath(disk))) / (socket.gethostname() or "host")


def kept_path(name: str, fingerprint: str) -> Path:
    """Give the file of memory that stays when the job has ended.

    Args:
        name: the cache's name.
        fingerprint: hexadecimal digits, of which the first 16 count.
    """
    return MEMORY / f"hvd_ext-{os.getuid()}-{name}-{fingerprint[:16]}"


@dataclasses.dataclass(frozen=True)
class Found:
    """A cache that is there already.

    Args:
        path: its folder, or the file of its memory.
        name: its name.
        digits: 16 of its fingerprint.
    """

    path: Path
    name: str
    digits: str

    @property
    def index(self) -> Path:
        """The file that holds the index."""
        return self.path / "index" if self.path.is_dir() else self.path

    def nbytes(self) -> int:
        """Give the bytes that it takes, of the disk or of memory."""
        return sum(state.st_blocks * 512 for state in self._states())

    def changed(self) -> float:
        """Give the time of its last change, in seconds since 1970."""
        return max((state.st_mtime for state in self._states()), default=0.0)

    def _states(self) -> Iterator[os.stat_result]:
        for file in self.path.iterdir() if self.path.is_dir() else [self.path]:
            with contextlib.suppress(OSError):
                yield file.stat()

    def records(self) -> tuple[int, int] | None:
        """Give the numbers of its records and of its samples; None if the file cannot be read."""
        try:
            about = native.about(self.index)
        except HvdExtError:
            return None
        return about.records, about.samples

    def clear(self) -> None:
        """Delete it; other processes may do the same. A job that uses it keeps what it has open."""
        if not self.path.is_dir():
            self.path.unlink(missing_ok=True)
        while self.path.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process was faster with one of the files
                shutil.rmtree(self.path)


def on_disk(disk: str | os.PathLike[str]) -> Iterator[Found]:
    """Yield the caches that any host has in a folder.

    Args:
        disk: the folder that the user has named, or that of a host.
    """
    root = Path(disk)
    for path in sorted([*root.glob(f"*/{ABOUT}"), *root.glob(f"*/*/{ABOUT}")]):
        match = _FOLDER.match(path.parent.name)
        if match is not None:
            yield Found(path.parent, match["name"], match["digits"])


def in_memory() -> Iterator[Found]:
    """Yield the caches of this user whose memory has stayed."""
    prefix = f"hvd_ext-{os.getuid()}-"
    for path in sorted(MEMORY.glob(f"{prefix}*")):
        match = _FOLDER.match(path.name.removeprefix(prefix))
        if match is not None and path.is_file() and not path.is_symlink():
            yield Found(path, match["name"], match["digits"])


class Store:
    """A store that this process has opened.

    Attributes:
        cache: its number, for the ops.
        folder: on the disk; None without one.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        samples: int,
        *,
        memory_bytes: int = 0,
        keep: Path | None = None,
        folder: Path | None = None,
        disk_bytes: int = 0,
        about: dict[str, Any] | None = None,
        claim_s: float = 0,
    ) -> None:
        """Open it.

        Args:
            name: of the cache.
            fingerprint: of what the records are, at least 32 hexadecimal digits.
            samples: their numbers are 0 to samples - 1.
            memory_bytes: of records in memory, at most; 0: none.
            keep: the file of memory that stays; None: the memory has no name.
            folder: on the disk, of this cache alone; None: none.
            disk_bytes: of records on the disk, at most; 0: no limit.
            about: what about.json tells people.
            claim_s: see tf_ops/cache/store.h; 0: 30 s.

        Raises:
            InvalidError: a place cannot be made, or belongs to another user.
        """
        self.name, self.samples, self.folder = name, samples, folder
        self._warned: set[str] = set()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _write_about(folder / ABOUT, {"name": name, "samples": samples, **(about or {})})
            except OSError as error:
                if error.errno not in _FULL:  # then the store does without it, with a warning
                    raise InvalidError(
                        f"disk ({folder}): it cannot be made or written: {error.strerror or error}; name another folder"
                    ) from error
        options = native.Options(
            name=name.encode(),
            fingerprint=(int(fingerprint[:16], 16), int(fingerprint[16:32], 16)),
            samples=samples,
            memory_bytes=memory_bytes,
            keep=None if keep is None else os.fsencode(keep),
            disk=None if folder is None else os.fsencode(folder),
            disk_bytes=disk_bytes,
            claim_s=claim_s,
        )
        number = ctypes.c_int64()
        native.call("hvd_ext_cache_open", ctypes.byref(options), ctypes.byref(number))
        self.cache = number.value
        self._open = True
        self._end = weakref.finalize(self, native.load().hvd_ext_cache_close, self.cache)

    def address(self) -> list[int]:
        """Give where this process's memory can be mapped, as a list that JSON can hold."""
        address = native.Address()
        native.call("hvd_ext_cache_memory_address", self.cache, ctypes.byref(address))
        return [address.pid, address.fd, address.capacity, *address.token]

    def share(self, addresses: Sequence[Sequence[int]]) -> int:
        """Map the first memory that this process can map, in place of its own.

        Args:
            addresses: of all ranks, each from `address`, in one order on all.

        Returns:
            The place of the one that was taken; -1: the store keeps its own.
        """
        memories = (native.Address * len(addresses))(
            *(native.Address(address[0], address[1], address[2], (address[3], address[4])) for address in addresses)
        )
        taken = ctypes.c_int64()
        native.call("hvd_ext_cache_share", self.cache, memories, len(addresses), ctypes.byref(taken))
        return taken.value

    def statistics(self) -> dict[str, int]:
        """Give what this process has done, and what the places hold; tf_ops/cache/store.h has the words."""
        statistics = native.Statistics()
        native.call("hvd_ext_cache_statistics", self.cache, ctypes.byref(statistics))
        return {name: getattr(statistics, name) for name, _ in native.Statistics._fields_}

    def tell_warnings(self) -> None:
        """Log what the store warns of, each text once; the first rank of a host warns, the others inform."""
        library = native.load()
        level = logging.INFO if process.is_initialized() and process.local_rank() else logging.WARNING
        while self._open and (text := library.hvd_ext_cache_warning(self.cache)):
            words = text.decode(errors="replace")
            if words not in self._warned:
                self._warned.add(words)
                _LOG.log(level, "%s", words)

    def release(self, numbers: Sequence[int] | None = None) -> None:
        """Give claims back.

        Args:
            numbers: of samples; None: all claims of this process.
        """
        values = None if numbers is None else (ctypes.c_int64 * len(numbers))(*numbers)
        native.call("hvd_ext_cache_release", self.cache, values, len(numbers or ()))

    def verify(self) -> dict[str, int]:
        """Read every record of both places, and forget those that are damaged.

        Returns:
            "memory_records", "memory_bytes", "memory_damaged", and the same of the disk.
        """
        counts = (ctypes.c_int64 * 6)()
        native.call("hvd_ext_cache_verify", self.cache, None, counts)
        names = [f"{place}_{what}" for place in ("memory", "disk") for what in ("records", "bytes", "damaged")]
        return dict(zip(names, counts, strict=True))

    def close(self) -> None:
        """Close it; a second time does nothing."""
        if self._open:
            self.tell_warnings()
            self._open = False
            self._end()


def _write_about(path: Path, about: dict[str, Any]) -> None:
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        temporary.write_text(json.dumps({**about, "made": made}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
