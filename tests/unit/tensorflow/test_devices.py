"""Which GPU a rank takes, from what all ranks say."""

from __future__ import annotations

import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow.devices import Seen, choose


def seen(host: str, gpus: int, visible: str | None = None, initialized: bool = False) -> Seen:
    return Seen(host, gpus, visible, initialized)


@pytest.mark.parametrize(
    ("answers", "places"),
    [
        ([seen("a", 2), seen("a", 2), seen("b", 2), seen("b", 2)], [0, 1, 0, 1]),
        ([seen("a", 2), seen("b", 1), seen("a", 2)], [0, 0, 1]),
        ([seen("a", 4), seen("a", 4)], [0, 1]),
        ([seen("a", 0), seen("b", 1)], [None, 0]),
        ([seen("a", 1, "2"), seen("a", 1, "3")], [0, 0]),  # the launcher has given each its own
        ([seen("a", 1, "0"), seen("b", 1, "0")], [0, 0]),
        ([seen("a", 2, "0,1"), seen("a", 2, "0,1")], [0, 1]),
        ([seen("a", 1, "0")], [0]),
    ],
)
def test_each_rank_gets_a_gpu_of_its_own(answers: list[Seen], places: list[int | None]) -> None:
    assert choose(answers) == places


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([seen("a", 1), seen("a", 1)], r"host a has 1 GPUs for 2 ranks, none for rank 1 \(local rank 1\)"),
        ([seen("b", 1), seen("a", 1, "0"), seen("a", 1, "0")], r"ranks 1, 2 of host a share one GPU \(.*=0\)"),
        ([seen("a", 2), seen("a", 2, initialized=True)], r"rank 1 of host a uses its 2 GPUs already.*right after init"),
    ],
)
def test_what_cannot_be_is_said_in_words(answers: list[Seen], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        choose(answers)
