"""The model file: what is written is read again, and a wrong line is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning.step_times import StepTimes, parse, read, ready_order, write
from hvd_ext.planning.tensors import Tensor

MODEL = """forward_seconds,0.5
update_seconds,0.25

name,elements,backward_seconds
dense/kernel,1000,0.125
"bias, last",10,0
conv,200,0.375
"""


def test_a_model_is_read_in_the_order_of_its_layers() -> None:
    found = parse(MODEL)
    assert [tensor.name for tensor in found.tensors] == ["conv", "bias, last", "dense/kernel"]
    assert [tensor.text for tensor in found.tensors] == ["float32[200]", "float32[10]", "float32[1000]"]
    assert found.ready_s == (1.0, 0.625, 0.625)
    assert (found.forward_s, found.update_s, found.computed_s) == (0.5, 0.25, 1.0)
    assert found.order == (2, 1, 0)
    assert parse("forward_seconds,1\nname,elements,backward_seconds\n").computed_s == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read_again(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tensors = tuple(Tensor(f'v{n},"{n}', (rng.randint(0, 9),), "float32") for n in range(rng.randint(0, 20)))
    ready_s = tuple(sorted((0.5 + rng.randint(0, 30) / 64 for _ in tensors), reverse=True))
    times = StepTimes(tensors, ready_s, 0.5, rng.choice([None, 0.25]))
    write(times, tmp_path / "model.csv")
    assert read(tmp_path / "model.csv") == times


def test_other_dtypes_are_written_by_their_bytes_and_early_gradients_at_the_end_of_the_forward_pass(
    tmp_path: Path,
) -> None:
    tensors = (Tensor("half", (3,), "float16"), Tensor("double", (3,), "float64"))
    write(StepTimes(tensors, (0.25, 0.75), 0.5), tmp_path / "model.csv")
    found = read(tmp_path / "model.csv")
    assert [(tensor.name, tensor.elements) for tensor in found.tensors] == [("double", 6), ("half", 2)]
    assert found.ready_s == (0.75, 0.5)


def test_the_ready_order_takes_the_later_layer_first_where_times_are_equal() -> None:
    assert ready_order([2.0, 1.0, 1.0, 3.0]) == (2, 1, 0, 3)
    assert ready_order([0.0] * 4) == (3, 2, 1, 0)


HEAD = "forward_seconds,1\nname,elements,backward_seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model file m.csv: the header 'name,elements,backward_seconds' is missing"),
        ("forward_seconds,x", r"line 1: forward_seconds \('x'\): must be a finite number of seconds, 0 or more"),
        ("forward_seconds,1\nforward_seconds,1", "line 2: must be 'forward_seconds,VALUE', 'update_seconds,VALUE' or"),
        ("name,elements,backward_seconds", "line 1: a line 'forward_seconds,VALUE' must come before the header"),
        (HEAD + "a,1", "line 3: must be name,elements,backward_seconds, got 2 values: 'a,1'"),
        (HEAD + "a,-1,0", r"line 3: elements \('-1'\): must be a whole number, 0 or more"),
        (HEAD + "a,1,nan", r"line 3: backward_seconds \('nan'\)"),
        (HEAD + "a,1,0\n\na,1,0", "line 5: tensor 'a' is there twice"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"m.csv.*{message.removeprefix('model file m.csv')}"):
        parse(text, "m.csv")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"model file .*none\.csv: it cannot be read"):
        read(tmp_path / "none.csv")
    (tmp_path / "model.csv").write_bytes(b"\xff")
    with pytest.raises(PlanError, match="it is not UTF-8 text"):
        read(tmp_path / "model.csv")


def test_wrong_times_are_refused() -> None:
    one = (Tensor("a", (1,), "float32"),)
    with pytest.raises(PlanError, match="1 tensors have 2 times"):
        StepTimes(one, (0.0, 1.0))
    with pytest.raises(PlanError, match=r"tensor 'a' \(-1.0\): must be a finite number"):
        StepTimes(one, (-1.0,))
