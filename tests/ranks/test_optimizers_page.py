"""The examples of docs/optimizers.md, one after the other in one program, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests import pages
from tests.ranks.training import assert_same_bits_on_all_ranks

pytestmark = pytest.mark.ranks(2)


def test_the_examples_run_and_leave_equal_models() -> None:
    names = pages.run("docs/optimizers.md", 5)
    assert_same_bits_on_all_ranks([*names["model"].weights, *names["sparse"].weights])
    assert abs(float(names["model"].optimizer.momentum) - 0.94) < 1e-6
    assert [float(one[0, 0]) for one in names["inverses"]] == [1 / 4, 1 / 32, 1 / 16, 1 / 8]
    np.testing.assert_allclose(names["recipe"].momentum, 0.98, rtol=1e-6)
