"""Who is missing while `init()` waits: MPI starts only when all ranks have come, and cannot say who has not.

Each rank leaves a mark in the folder that the launcher keeps for the job on its host (Open MPI, PRRTE), before it
starts MPI. The ranks of a host see each other's marks while they wait, and the launcher removes them with the folder.
It lies in the temporary folder, where its name can be guessed: marks are written and read only where it is this user's.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvd_ext.job import log, owned
from hvd_ext.options import Options

LOOK_S = 0.1
EXIT_CODE = 1
_MOST_NBYTES = 64  # of a mark: the number of a rank
_starts = 0  # of this process: shutdown() and init() again


class Arrivals:
    """The marks of one start of the job on this host.

    Args:
        environ: the environment of a rank; a launcher that does not tell its folder gives no marks.
        start: number of this `init()` in its process.
    """

    def __init__(self, environ: Mapping[str, str], start: int = 1) -> None:
        folder, job = environ.get("PMIX_SERVER_TMPDIR", ""), environ.get("PMIX_NAMESPACE", "")
        self.rank = environ.get("OMPI_COMM_WORLD_RANK", environ.get("PMIX_RANK", "?"))
        self.place = _number(environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
        self.size = _number(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
        known = folder and job and self.place is not None and self.size is not None
        self._folder = Path(folder) if known else None
        self._stem = f"hvd_ext-{job.replace('/', '-')}-{start}"

    def mark(self) -> None:
        """Say that this rank has come; where that cannot be written nobody will know."""
        try:
            with self._opened(self.place, os.O_WRONLY | os.O_CREAT) as file:
                os.ftruncate(file, 0)
                os.write(file, self.rank.encode())
        except OSError:
            self._folder = None

    def here(self) -> dict[int, str]:
        """The ranks of this host that have come, by their place on the host."""
        found = {}
        for place in range(self.size or 0) if self._folder is not None else ():
            try:
                with self._opened(place, os.O_RDONLY) as file:
                    found[place] = os.read(file, _MOST_NBYTES).decode(errors="replace") or "?"
            except OSError:
                continue
        return found

    @contextmanager
    def _opened(self, place: int | None, flags: int) -> Iterator[int]:
        if self._folder is None:
            raise FileNotFoundError("the launcher tells no folder")
        folder = owned.open_folder(self._folder)
        try:
            file = owned.open_file(f"{self._stem}-{place}", folder, flags)
        finally:
            os.close(folder)
        try:
            yield file
        finally:
            os.close(file)

    def speaks(self) -> bool:
        """Whether this rank speaks for its host: the first of those that have come."""
        here = self.here()
        return not here or min(here) == self.place

    def words(self) -> str:
        """Who is missing, as far as this host knows."""
        here = self.here()
        if self._folder is None or not here:
            return f"rank {self.rank} is here; this launcher does not tell which rank is not"
        missing = [place for place in range(self.size or 0) if place not in here]
        if not missing:
            return f"all {self.size} of host {platform.node()} are here: a rank of another host has not called init()"
        # Ranks in the order of hosts, unless the marks say otherwise.
        firsts = {int(rank) - place for place, rank in here.items() if rank.isdigit()}
        first = firsts.pop() if len(firsts) == 1 else None
        names = [f"local rank {p}" if first is None else f"rank {first + p} (local rank {p})" for p in missing]
        have = "has" if len(names) == 1 else "have"
        return f"{', '.join(names)} of host {platform.node()} {have} not called init()"


@contextmanager
def watch(options: Options, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Around the start of MPI: warn who is missing, and end this process when it waits too long.

    Args:
        options: its `stall_warn_s` and `stall_fatal_s` hold here too; 0 is never.
        environ: the environment of this rank; None for that of the process.
    """
    global _starts
    _starts += 1
    arrivals = Arrivals(os.environ if environ is None else environ, _starts)
    arrivals.mark()
    ended = threading.Event()
    # A daemon: MPI_Init cannot be called back, and must not keep a process that ends otherwise.
    watcher = threading.Thread(target=_look, args=(arrivals, options, ended), name="hvd_ext init", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _look(arrivals: Arrivals, options: Options, ended: threading.Event) -> None:
    begin, warnings, said = time.monotonic(), 0, ""
    while not ended.wait(LOOK_S):
        waited_s = time.monotonic() - begin
        fatal = 0 < options.stall_fatal_s <= waited_s
        if fatal or 0 < options.stall_warn_s * (warnings + 1) <= waited_s:
            warnings += 1
            words = arrivals.words()
            if fatal or (arrivals.speaks() and words != said):  # the same words again would be no news
                said = words
                limit = f", longer than the limit ({options.stall_fatal_s:g} s, HVD_EXT_STALL_FATAL_S)" if fatal else ""
                waited = f"init() has waited {waited_s:.0f} s for the other ranks{limit}"
                log.write(f"hvd_ext: [rank {arrivals.rank}] {waited}: {words}\n")
        if fatal:
            os._exit(EXIT_CODE)  # the thread that waits is inside MPI_Init and hears nothing


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
