"""Tests. `tests/ranks` is right on any number of ranks; `tests/mpi` starts processes; `tests/unit` needs neither."""

from __future__ import annotations
