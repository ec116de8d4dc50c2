"""The words about gradients that were in no round at the end of a job."""

from __future__ import annotations

import pytest

from hvd_ext.job.partial_rounds import lost


@pytest.mark.parametrize(
    ("given", "step", "words"),
    [(4, 5, "gradients of step 5 on"), (4, 7, "gradients of steps 5 to 7 on"), (5, 5, "gradients it held on")],
)
def test_the_steps_are_named_whose_gradients_are_lost(given: int, step: int, words: str) -> None:
    assert words in lost(given, step)
