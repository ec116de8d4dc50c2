"""The builds and runs that the chosen tests need begin before the first test of the session."""

from __future__ import annotations

import pytest

from tests.native import builds


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins the builds, in the order in which the tests ask for them."""
    if session.config.option.collectonly:
        return
    for item in session.items:
        if item.path == builds.TESTS:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            begin = builds.begin_tests if "native_tests_pass" in item.name else builds.begin
            begin(parameters.get("sanitize", ""))


def pytest_sessionfinish() -> None:
    """Ends builds that still run when the session is stopped before its end."""
    builds.stop()
