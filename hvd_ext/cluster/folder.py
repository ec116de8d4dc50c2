"""The folder of a rehearsal: locked while its owner lives, so that folders of killed rehearsals can be removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hvd_ext.errors import InvalidError
from hvd_ext.job import owned

PREFIX = "hvd_ext-cluster-"
# A folder that is not locked is stale, unless it is so young that its owner may be about to lock it.
YOUNG_S = 60.0
MOST_NAMED = 5  # folders that one line names: other users can leave any number of them


def make() -> tuple[Path, IO[bytes]]:
    """Make a folder and lock it.

    Returns:
        The folder, and the open file that holds the lock; closing it frees the lock.

    Raises:
        InvalidError: the temporary folder's name has a blank, at which mpirun would split the path of its agent.
    """
    place = tempfile.gettempdir()
    if any(letter.isspace() for letter in place):
        raise InvalidError(f"temporary folder ({place}): must have a name without blanks; set TMPDIR to another folder")
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (folder / "lock").open("xb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _to_stderr(line: str) -> None:
    print(f"hvd_ext cluster: {line}", file=sys.stderr, flush=True)


def remove_stale(tell: Callable[[str], None] = _to_stderr) -> list[Path]:
    """Remove the folders of killed rehearsals of this user, and return those that were removed.

    The temporary folder is open to all users. This function looks only into folders that belong to this user and have
    the mode that `make` gives them, and it creates nothing. It tells, in one line, which folders were left alone.
    """
    removed, left = [], []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            if _remove(folder):
                removed.append(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # it is in use, or another process is removing it
        except OSError as error:
            # Another user chose the name, which may hold anything, such as a terminal's escape sequences.
            left.append(f"{ascii(folder.name)[1:-1]} {error.strerror or error}")
    if left:
        more = f"; and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        tell(f"left alone in {tempfile.gettempdir()}: {'; '.join(left[:MOST_NAMED])}{more}")
    return removed


def _remove(folder: Path) -> bool:
    """Remove a folder, unless it is too young to tell whether it is stale."""
    place = owned.open_folder(folder)
    try:
        lock = _lock(place)
        try:
            if time.time() - os.fstat(place).st_ctime < YOUNG_S and "state.json" not in os.listdir(place):
                return False
            _empty(place)
            folder.rmdir()
        finally:
            if lock is not None:
                os.close(lock)
    finally:
        os.close(place)
    return True


def _lock(folder: int) -> int | None:
    """Lock a folder; None if its owner died before it created the lock file."""
    try:
        lock = owned.open_file("lock", folder, os.O_RDWR)
    except FileNotFoundError:
        return None
    except owned.NotOwnedError as error:
        raise owned.NotOwnedError(f"has a lock that {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _empty(folder: int) -> None:
    """Empty an open folder without following links; a path through the descriptor does not look its name up again."""
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(f"/proc/self/fd/{folder}/{entry.name}")
            else:
                os.unlink(entry.name, dir_fd=folder)
