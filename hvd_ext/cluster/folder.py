"""The folder of a rehearsal: locked while its owner lives, so that those of killed rehearsals are known and removed."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from hvd_ext.errors import InvalidError

PREFIX = "hvd_ext-cluster-"
# A folder that is not locked is stale, unless its owner has just made it and comes to lock it.
YOUNG_S = 60.0


def make() -> tuple[Path, IO[bytes]]:
    """Make a folder and lock it.

    Returns:
        The folder, and the open file that holds the lock; closing it frees the lock.

    Raises:
        InvalidError: the temporary folder's name has a blank, at which mpirun would part the path of its agent.
    """
    place = tempfile.gettempdir()
    if any(letter.isspace() for letter in place):
        raise InvalidError(f"temporary folder ({place}): must have a name without blanks; set TMPDIR to another")
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (folder / "lock").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def remove_stale() -> list[Path]:
    """Remove the folders of rehearsals that were killed.

    Returns:
        Those that are gone now.
    """
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                young = time.time() - folder.stat().st_ctime < YOUNG_S and not (folder / "state.json").exists()
                if not young:
                    shutil.rmtree(folder)
                    removed.append(folder)
        except OSError:
            continue  # it is in use, or another user's, or another process removes it
    return removed
