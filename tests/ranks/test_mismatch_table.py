"""Every collective x everything in which ranks can differ: all ranks hear it in the same words, and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError, InvalidError, MismatchError
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.numbers import total, values

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank cannot differ from itself"),
]


def ones(*shape: int, dtype: str = "float32") -> tf.Tensor:
    return tf.ones(shape, dtype)


def slices(rows: int = 2, width: int = 3, dtype: str = "float32") -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones((rows, width), dtype), tf.range(rows), [9, width])


# The odd rank's arguments; the others call it with `RIGHT`.
RIGHT: dict[str, dict[str, Any]] = {
    "allreduce": {"tensor": ones(4)},
    "allgather": {"tensor": ones(4, 2)},
    "broadcast": {"tensor": ones(4), "root_rank": 0},
    "reducescatter": {"tensor": ones(4, 2)},
    "alltoall": {"tensor": ones(840, 2)},
    "sparse allreduce": {"tensor": slices()},
}
FACTORS = {
    "prescale": ({"prescale_factor": 0.5}, ["prescale_factor 0.5", "prescale_factor 1.0"]),
    "postscale": ({"postscale_factor": 2.0}, ["postscale_factor 2.0", "postscale_factor 1.0"]),
    "op": ({"op": hvd.Sum}, ["op sum", "op average"]),
}
TABLE: dict[str, dict[str, tuple[dict[str, Any], list[str]]]] = {
    "allreduce": {
        **FACTORS,
        "dtype": ({"tensor": ones(4, dtype="float64")}, ["float64[4]", "float32[4]"]),
        "narrow dtype": ({"tensor": ones(4, dtype="int8")}, ["int8[4]", "float32[4]"]),
        "shape": ({"tensor": ones(5)}, ["float32[5]", "float32[4]"]),
        "rank": ({"tensor": ones(2, 2)}, ["float32[2, 2]", "float32[4]"]),
        "scalar": ({"tensor": ones()}, ["float32[]", "float32[4]"]),
        "compression": ({"compression": hvd.Compression.bf16}, ["compression bfloat16", "compression none"]),
        "sparse": ({"tensor": slices()}, ["allreduce of IndexedSlices", "rank 0 has allreduce;"]),
    },
    "allgather": {
        "dtype": ({"tensor": ones(4, 2, dtype="int8")}, ["int8[4, 2]", "float32[4, 2]"]),
        "shape": ({"tensor": ones(4, 3)}, ["float32[4, 3]", "float32[4, 2]"]),
        "rank": ({"tensor": ones(4)}, ["float32[4]", "float32[4, 2]"]),
    },
    "broadcast": {
        "dtype": ({"tensor": ones(4, dtype="bool")}, ["bool[4]", "float32[4]"]),
        "shape": ({"tensor": ones(5)}, ["float32[5]", "float32[4]"]),
        "root": ({"root_rank": 1}, ["root rank 1", "root rank 0"]),
    },
    "reducescatter": {
        **FACTORS,
        "dtype": ({"tensor": ones(4, 2, dtype="int32")}, ["int32[4, 2]", "float32[4, 2]"]),
        "shape": ({"tensor": ones(5, 2)}, ["float32[5, 2]", "float32[4, 2]"]),
        "compression": ({"compression": hvd.Compression.fp16}, ["compression float16", "compression none"]),
    },
    "alltoall": {
        "dtype": ({"tensor": ones(840, 2, dtype="uint8")}, ["uint8[840, 2]", "float32[840, 2]"]),
        "shape": ({"tensor": ones(840, 3)}, ["float32[840, 3]", "float32[840, 2]"]),
        "splits": ({"splits": [7]}, ["splits [7] for 840 rows"]),
    },
    "sparse allreduce": {
        **FACTORS,
        "dtype": ({"tensor": slices(dtype="float64")}, ["float64[*, 3]", "float32[*, 3]"]),
        "shape": ({"tensor": slices(width=4)}, ["float32[*, 4]", "float32[*, 3]"]),
        "compression": ({"compression": hvd.Compression.fp16}, ["compression fp16", "compression none"]),
    },
}
ROWS = [(collective, attribute) for collective, rows in TABLE.items() for attribute in rows]


def called(collective: str, **arguments: Any) -> Any:
    return getattr(hvd, collective.split()[-1])(**{**RIGHT[collective], **arguments})


@pytest.mark.parametrize(("collective", "attribute"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_the_error_names_the_call_both_ranks_and_both_values(
    collective: str, attribute: str, rank: int, size: int
) -> None:
    arguments, parts = TABLE[collective][attribute]
    kind = InvalidError if attribute == "splits" else MismatchError
    words = raised(lambda: called(collective, name="a call", **(arguments if rank == size - 1 else {})), kind)
    assert hvd.allgather_object(words) == [words] * size
    for part in ("'a call'", f"rank {size - 1} has", *parts):
        assert part in words
    np.testing.assert_array_equal(hvd.allreduce(values(rank, (5,)), op=hvd.Sum, name="a call"), total(size, (5,)))


@pytest.mark.parametrize("first", RIGHT)
@pytest.mark.parametrize("other", ["allreduce", "allgather", "alltoall", "barrier"])
def test_one_name_is_one_collective(first: str, other: str, rank: int, size: int) -> None:
    if first == other:
        return
    call = (lambda: hvd.barrier(name="one name")) if other == "barrier" else lambda: called(other, name="one name")
    words = raised(call if rank == size - 1 else lambda: called(first, name="one name"), MismatchError)
    assert hvd.allgather_object(words) == [words] * size
    assert f"rank {size - 1} has {other}" in words
    assert "one name must mean the same collective" in words


def test_dtypes_that_travel_alike_are_different(rank: int, size: int) -> None:
    """bool, int8 and uint8 travel in the same bytes."""
    dtype = "int8" if rank == size - 1 else "bool"
    words = raised(lambda: hvd.allgather(tf.cast(tf.ones(3), dtype), name="alike"), MismatchError)
    assert f"rank {size - 1} has int8[3], rank 0 has bool[3]" in words


@pytest.mark.parametrize("collective", ["broadcast_object", "broadcast_variables", "broadcast_"])
def test_roots_of_objects_and_variables(collective: str, rank: int, size: int) -> None:
    thing = 1 if collective == "broadcast_object" else [tf.Variable(1.0, name="w")]
    words = raised(lambda: getattr(hvd, collective)(thing, 1 if rank == size - 1 else 0), MismatchError)
    assert hvd.allgather_object(words) == [words] * size
    assert f"root_rank must be the same on all ranks; rank {size - 1} has 1, rank 0 has 0" in words


def raised(call: Callable[[], Any], kind: type[HvdExtError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
