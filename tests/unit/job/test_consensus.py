"""What ranks exchange and compare; the exchange itself is played by a list of answers."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest

from hvd_ext.errors import HvdExtError, InvalidError, MismatchError
from hvd_ext.job import consensus


class Answers:
    """An engine whose peers have already answered; this rank's answer is put in its place."""

    def __init__(self, own_rank: int, *others: dict[str, Any]) -> None:
        self.rank, self.others = own_rank, [json.dumps(other).encode() for other in others]
        self.ranks = tuple(range(len(others) + 1))

    def exchange(self, name: str, payload: bytes) -> list[bytes]:
        return [*self.others[: self.rank], payload, *self.others[self.rank :]]


def test_values_come_by_rank() -> None:
    engine: Any = Answers(1, {"value": [1]}, {"value": [3]})
    assert consensus.exchange(engine, "x", lambda: [2]) == [[1], [2], [3]]


def test_an_error_of_ours_is_raised_on_all_ranks_in_its_class_with_its_rank() -> None:
    engine: Any = Answers(0, {"error": "InvalidError", "text": "depth (7): too deep"})
    with pytest.raises(InvalidError, match=r"^rank 1: depth \(7\): too deep$"):
        consensus.exchange(engine, "x", lambda: 1)
    with pytest.raises(MismatchError, match="^rank 1: no$"):
        consensus.exchange(Answers(1, {"value": 1}), "x", Mock(side_effect=MismatchError("no")))  # type: ignore[arg-type]


def test_ranks_of_a_process_set_have_the_numbers_of_the_job() -> None:
    engine: Any = Answers(0, {"error": "InvalidError", "text": "no"})
    engine.ranks = (2, 5)
    with pytest.raises(InvalidError, match="^rank 5: no$"):
        consensus.exchange(engine, "x", lambda: 1)
    with pytest.raises(MismatchError, match="rank 5 has 2, rank 2 has 1"):
        consensus.check_same("it", [{"a": 1}, {"a": 2}], ranks=(2, 5))
    with pytest.raises(MismatchError, match=r"rank 5 has 'c' \(float32\[\]\), rank 2 has 'b'"):
        consensus.check_tensors("it", [[["b", "float32[]"]], [["c", "float32[]"]]], ranks=(2, 5))


def test_an_error_of_another_kind_stays_as_it_is_here_and_is_named_elsewhere() -> None:
    here: Any = Answers(0, {"value": 1})
    with pytest.raises(ZeroDivisionError):
        consensus.exchange(here, "x", lambda: 1 // 0)
    there: Any = Answers(0, {"error": "ZeroDivisionError", "text": "oh"})
    with pytest.raises(HvdExtError, match="x: rank 1 failed with ZeroDivisionError: oh"):
        consensus.exchange(there, "x", lambda: 1)


def test_the_first_difference_is_named_with_both_values() -> None:
    consensus.check_same("it", [{"a": 1}, {"a": 1}])
    with pytest.raises(MismatchError, match="^it: b must be the same on all ranks; rank 2 has 5, rank 0 has 2$"):
        consensus.check_same("it", [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 5}, {"a": 9, "b": 9}])
    with pytest.raises(MismatchError, match="c must be the same on all ranks; rank 1 has 3, rank 0 has None"):
        consensus.check_same("it", [{"a": 1}, {"a": 1, "c": 3}])


def test_tensors_are_compared_by_name_then_by_text_then_by_number() -> None:
    same = [["w", "float32[2]"], ["b", "float32[]"]]
    consensus.check_tensors("it", [same, same])
    with pytest.raises(MismatchError, match=r"tensor 1.*rank 1 has 'c' \(float32\[\]\), rank 0 has 'b'"):
        consensus.check_tensors("it", [same, [same[0], ["c", "float32[]"]]])
    with pytest.raises(MismatchError, match=r"tensor 0, 'w'.*rank 1 has float64\[2\], rank 0 has float32\[2\]"):
        consensus.check_tensors("it", [same, [["w", "float64[2]"], same[1]]])
    for lists in ([same, same[:1]], [same[:1], same]):
        with pytest.raises(MismatchError, match=r"the first that only one of them has is 'b'"):
            consensus.check_tensors("it", lists)


@pytest.mark.parametrize(
    ("name", "other", "alike"),
    [
        ("sequential_11/dense_22/kernel", "dense_20/kernel", True),  # a model of a file has no name in front
        ("SGD/sequential_1_dense_2_kernel_momentum", "SGD/dense_kernel_momentum", True),
        ("kernel:0", "kernel_1:0", True),
        ("net/branch_a/kernel", "net/branch_b/kernel", False),
        ("dense/kernel", "dense/bias", False),
        ("SGD/a_kernel_momentum", "SGD/b_kernel_momentum", False),
        ("a", "b", False),
    ],
)
def test_names_may_differ_by_what_keras_adds_and_by_nothing_else(name: str, other: str, alike: bool) -> None:
    lists = [[[name, "float32[]"]], [[other, "float32[]"]]]
    if alike:
        consensus.check_tensors("it", lists)
    else:
        with pytest.raises(MismatchError, match="must have the same name"):
            consensus.check_tensors("it", lists)
