"""Folders and files with known names in places that all users share, such as the temporary folder.

Another user may have put anything at such a name: a link to somewhere else, a pipe that blocks whoever opens it, or a
folder of theirs. This module opens only files that belong to this user, in a folder that no other user can write to. It
checks what it has opened, not the name.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = 0o700
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotOwnedError(OSError):
    """The file is of another kind, belongs to another user, or is open to others; the message says which."""


def open_folder(path: Path) -> int:
    """Open this user's folder of mode 0700, not a link to it; `NotOwnedError` for another, `OSError` if missing."""
    descriptor = _open(path, os.O_RDONLY | os.O_DIRECTORY, stat.S_IFDIR)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o777  # without the set-group-ID bit, which folders inherit
    if mode != _PRIVATE:
        os.close(descriptor)
        raise NotOwnedError(f"has the mode {mode:04o}, not {_PRIVATE:04o}")
    return descriptor


def open_file(name: str, folder: int, flags: int) -> int:
    """Open a file that belongs to this user; never blocks.

    Args:
        folder: from `open_folder`.
        flags: as for `os.open`, with O_CREAT if the file may be created.

    Raises:
        NotOwnedError: the file is not a regular one, or belongs to another user.
        FileExistsError: the flags have O_EXCL, and there is something of this name.
        OSError: the file does not exist, or cannot be created.
    """
    return _open(name, flags, stat.S_IFREG, folder)


def _open(path: Path | str, flags: int, kind: int, folder: int | None = None) -> int:
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o600, dir_fd=folder)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        # Only the error message uses this, because the name may stand for something else by now.
        seen = os.stat(path, dir_fd=folder, follow_symlinks=False)
        words = _fault(seen, kind) or f"cannot be opened: {os.strerror(error.errno or errno.EIO)}"
        raise NotOwnedError(words) from error
    fault = _fault(os.fstat(descriptor), kind)
    if fault:
        os.close(descriptor)
        raise NotOwnedError(fault)
    return descriptor


def _fault(seen: os.stat_result, kind: int) -> str:
    if stat.S_IFMT(seen.st_mode) != kind:
        return f"is {_KINDS[stat.S_IFMT(seen.st_mode)]}, not {_KINDS[kind]}"
    return "" if seen.st_uid == os.geteuid() else f"belongs to user {seen.st_uid}"
