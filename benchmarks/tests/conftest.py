"""What the tests of benchmarks and studies share with those of the package."""

from __future__ import annotations

from tests.mpi.conftest import pytest_sessionfinish as pytest_sessionfinish
from tests.unit.conftest import seen as seen
