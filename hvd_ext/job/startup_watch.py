"""Names the ranks that are missing while `init()` waits; MPI waits for all ranks, and cannot say which have not come.

Before a rank starts MPI, it leaves a mark in the folder that the launcher (Open MPI, PRRTE) keeps for the job on each
host. The ranks of a host see each other's marks while they wait, and the launcher removes the marks with the folder.
A second process with the environment of one rank finds the mark of the first and is refused (`one_process.py`).
The folder lies in the temporary folder, and its name can be guessed, so marks are written and read only if the folder
belongs to this user.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvd_ext.job import interrupts, log, one_process, owned
from hvd_ext.options import Options

LOOK_S = 0.1
EXIT_CODE = 1
INTERRUPTED = 130  # the exit code by which shells know SIGINT
GRACE_S = 1.0  # after SIGINT, in which the start may end and Python raise KeyboardInterrupt
_MOST_NBYTES = 64  # of a mark, which holds the number of a rank and that of its process
_starts = 0  # how often this process has called init()


class Arrivals:
    """The marks of one start of the job on this host; none if the environment names no folder of the launcher."""

    def __init__(self, environ: Mapping[str, str], start: int = 1) -> None:
        folder, job = environ.get("PMIX_SERVER_TMPDIR", ""), environ.get("PMIX_NAMESPACE", "")
        self.rank = environ.get("OMPI_COMM_WORLD_RANK", environ.get("PMIX_RANK", "?"))
        self.place = _number(environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
        self.size = _number(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
        known = folder and job and self.place is not None and self.size is not None
        self._folder = Path(folder) if known else None
        self._stem = f"hvd_ext-{job.replace('/', '-')}-{start}"

    def mark(self) -> None:
        """Leave this rank's mark if it can be written; `InvalidError` if another process has left it."""
        try:
            other = self._marked()
        except OSError:
            self._folder = None
            return
        if other:
            raise one_process.refusal(self.rank, other)

    def here(self) -> dict[int, str]:
        """Return the ranks of this host that have come, by their place on the host."""
        ranks = {}
        for place in range(self.size or 0) if self._folder is not None else ():
            with contextlib.suppress(OSError):
                ranks[place] = self._read(place)[0]
        return ranks

    def _marked(self) -> str:
        """Leave the mark; return the number of the process that has left it before, or an empty text."""
        try:
            with self._opened(self.place, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                os.write(file, f"{self.rank} {os.getpid()}".encode())
        except FileExistsError:
            return self._read(self.place)[1]
        return ""

    def _read(self, place: int | None) -> tuple[str, str]:
        """Return the number of the rank that has left a mark, and that of its process."""
        with self._opened(place, os.O_RDONLY) as file:
            rank, _, process = os.read(file, _MOST_NBYTES).decode(errors="replace").partition(" ")
        return rank or "?", process or "?"

    @contextlib.contextmanager
    def _opened(self, place: int | None, flags: int) -> Iterator[int]:
        if self._folder is None:
            raise FileNotFoundError("the launcher names no folder for the job")
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
        """Return whether this rank reports for its host: it is the first of the ranks that have come."""
        arrived = self.here()
        return not arrived or min(arrived) == self.place

    def words(self) -> str:
        """Say which ranks are missing, as far as this host knows."""
        arrived = self.here()
        if self._folder is None or not arrived:
            return f"rank {self.rank} has called init(); under this launcher the missing ranks cannot be named"
        missing = [place for place in range(self.size or 0) if place not in arrived]
        if not missing:
            return f"all {self.size} ranks of host {platform.node()} have called init(): a rank of another host has not"
        # Ranks are assumed to be numbered in the order of the hosts, unless the marks contradict that.
        firsts = {int(rank) - place for place, rank in arrived.items() if rank.isdigit()}
        first = firsts.pop() if len(firsts) == 1 else None
        names = [f"local rank {p}" if first is None else f"rank {first + p} (local rank {p})" for p in missing]
        have = "has" if len(names) == 1 else "have"
        return f"{', '.join(names)} of host {platform.node()} {have} not called init()"


@contextlib.contextmanager
def watch(options: Options, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Warn of missing ranks while MPI starts in the `with` block; end a start that takes too long or is interrupted.

    Args:
        options: `stall_warn_s` and `stall_fatal_s` are the limits; 0 means never.

    Raises:
        InvalidError: another process has started MPI as this rank.
    """
    global _starts
    _starts += 1
    arrivals = Arrivals(os.environ if environ is None else environ, _starts)
    arrivals.mark()
    ended = threading.Event()
    # A daemon thread, because MPI_Init cannot be interrupted: the watch must not keep a process alive that ends
    # for another reason.
    watcher = threading.Thread(target=_look, args=(arrivals, options, ended), name="hvd_ext init", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _look(arrivals: Arrivals, options: Options, ended: threading.Event) -> None:
    begin, warnings, last_words = time.monotonic(), 0, ""
    while not ended.wait(LOOK_S):
        waited_s = time.monotonic() - begin
        fatal = 0 < options.stall_fatal_s <= waited_s
        if fatal or 0 < options.stall_warn_s * (warnings + 1) <= waited_s:
            warnings += 1
            words = arrivals.words()
            if fatal or (arrivals.speaks() and words != last_words):  # a warning is not repeated
                last_words = words
                limit = f", longer than the limit ({options.stall_fatal_s:g} s, HVD_EXT_STALL_FATAL_S)" if fatal else ""
                waited = f"init() has waited {waited_s:.0f} s for the other ranks{limit}"
                log.write(f"hvd_ext: [rank {arrivals.rank}] {waited}: {words}\n")
        if fatal:
            os._exit(EXIT_CODE)  # the waiting thread is inside MPI_Init, where no exception reaches it
        if interrupts.waited_s() > GRACE_S:
            words = f"init() was interrupted (SIGINT) while it waited for the other ranks: {arrivals.words()}"
            log.write(f"hvd_ext: [rank {arrivals.rank}] {words}\n")
            os._exit(INTERRUPTED)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
