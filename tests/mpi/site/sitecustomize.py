"""Spares test jobs what Keras would import for its wrappers and plots: 1.2 s of 5 s of a processor in each process.

Keras does without scikit-learn and matplotlib where they are not installed. A program may import them itself. Where the
session measures its time, the process is measured too. Ranks are forked where the test asks for it (fork_server.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType

from tests import timing


class _NotForKeras:
    """The first finder of modules, which finds none."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Refuse the two packages to Keras."""
        frame: FrameType | None = sys._getframe(1) if name in ("matplotlib", "sklearn") else None
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("keras.src."):
                raise ModuleNotFoundError(f"{name} is left out for Keras in jobs of tests", name=name)
            frame = frame.f_back


sys.meta_path.insert(0, _NotForKeras())  # type: ignore[arg-type]

# rank.py only becomes the program.
if not any(argument.endswith("rank.py") for argument in sys.orig_argv[1:2]):
    timing.begin()
    _launched = os.environ.pop("HVD_EXT_TEST_RANK", "") or os.environ.get("OMPI_COMM_WORLD_RANK", "")
    if _launched and "HVD_EXT_TEST_SERVER" in os.environ:
        from tests.mpi import fork_server

        fork_server.become(int(_launched), sys.orig_argv[1:])
