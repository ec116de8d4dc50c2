"""What every rank of a test job runs: sends its output to a file of its own, then becomes the given Python program."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run `python <arguments>` with stdout and stderr in the folder HVD_EXT_TEST_OUTPUT, in a file of this rank."""
    rank = next((os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if name in os.environ), "0")
    path = Path(os.environ["HVD_EXT_TEST_OUTPUT"]) / f"rank{rank}.txt"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["HVD_EXT_TEST_RANK"] = rank
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
