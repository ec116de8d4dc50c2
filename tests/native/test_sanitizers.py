"""Builds and runs the native tests under sanitizers."""

from __future__ import annotations

import pytest

from tests.native import builds

pytestmark = pytest.mark.slow  # the first run builds for minutes


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_the_native_tests_pass(sanitize: str) -> None:
    builds.run_tests(sanitize)
