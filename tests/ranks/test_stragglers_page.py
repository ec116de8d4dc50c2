"""The examples of docs/stragglers.md, one after the other in one program."""

from __future__ import annotations

import pytest

from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_examples_run_and_leave_equal_weights() -> None:
    names = pages.run("docs/stragglers.md", 3)
    assert_same_bits_on_all_ranks([names["variable"]])
    assert_same_bits_on_all_ranks(names["model"].weights)
