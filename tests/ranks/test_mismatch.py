"""Ranks that disagree hear of it, all in the same words with both values, and the next collective works.

test_mismatch_table.py has every argument of every collective; here are channels, variables, plans, `init` and errors.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext import options
from hvd_ext.errors import CommunicationError, HvdExtError, InvalidError, MismatchError, PlanError, TopologyError
from hvd_ext.job import process, runtime
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.numbers import total, values

pytestmark = [
    pytest.mark.ranks(1, 2, 3, 8),
    pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank cannot differ from itself"),
]


@pytest.fixture
def odd(rank: int, size: int) -> bool:
    """Whether this is the rank that differs."""
    return rank == size - 1


@pytest.fixture
def alike(rank: int, size: int) -> Callable[..., str]:
    """Check that all ranks raise the same words, which name the odd rank and hold the given parts; then go on."""

    def check(call: Callable[[], object], *parts: str, kind: type[HvdExtError] = MismatchError) -> str:
        with pytest.raises(kind) as caught:
            call()
        words = str(caught.value)
        assert hvd.allgather_object(words) == [words] * size
        for part in (f"rank {size - 1}", *parts):
            assert part in words
        result = hvd.allreduce(tf.constant(values(rank, (5,)), tf.float32), op=hvd.Sum)
        np.testing.assert_array_equal(result, total(size, (5,)))
        return words

    return check


def test_plans_of_an_allreduce(odd: bool, size: int, alike: Callable[..., str]) -> None:
    if size < 3:
        pytest.skip("two ranks have the same plan under both algorithms: run under mpirun -np 3 or more")
    algorithm = "two_level" if odd else "ring"
    alike(lambda: hvd.allreduce(tf.zeros(300), algorithm=algorithm, name="grad"), "'grad'", "plan")


def test_an_error_is_caught_as_ours_and_as_tensorflows(odd: bool) -> None:
    for theirs in (MismatchError, tf.errors.FailedPreconditionError, ValueError):
        with pytest.raises(theirs, match="'start'") as caught:
            hvd.broadcast(tf.zeros(4 if odd else 3), 0, name="start")
        assert isinstance(caught.value, tf.errors.OpError)
        assert (caught.value.message, caught.value.error_code) == (str(caught.value), tf.errors.FAILED_PRECONDITION)
        for copied in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
            assert type(copied) is type(caught.value)
            assert str(copied) == str(caught.value)
    with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank"):
        hvd.broadcast(tf.zeros(3), -1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="root_rank"):  # compared outside of TensorFlow
        hvd.broadcast_object(1, 1 if odd else 0)
    assert isinstance(CommunicationError("words"), tf.errors.UnknownError)


def test_in_a_running_function_tensorflow_raises_with_the_same_words(odd: bool, size: int) -> None:
    step = tf.function(lambda x: hvd.allreduce(x, name="traced"))
    with pytest.raises(tf.errors.FailedPreconditionError, match=rf"'traced'.*rank {size - 1} has float32\[4\]"):
        step(tf.zeros(4 if odd else 3))
    assert float(hvd.allreduce(1.0)) == 1


def test_variables_to_broadcast(odd: bool, rank: int, alike: Callable[..., str]) -> None:
    same = tf.Variable([float(rank)], name="same")
    other = tf.Variable(tf.zeros(4 if odd else 3), name="other")
    alike(lambda: hvd.broadcast_variables([same, other]), "'other:0'", "float32[4]", "float32[3]")
    more = [same, other] if odd else [same]
    alike(lambda: hvd.broadcast_variables(more), "'other:0'", "2", "1")
    alike(lambda: hvd.broadcast_variables([same], 1 if odd else 0), "root_rank")
    assert float(same[0]) == rank


def opening(specs: list[Tensor], **choices: object) -> Callable[[], object]:
    return lambda: registration.open_channel("Adam", specs, options.Options().replace(**choices))


KERNEL, BIAS = Tensor("kernel", (2, 3), "float32"), Tensor("bias", (3,), "float32")

# The second tensor and the options of the odd rank's channel, and what all ranks hear.
CHANNELS: dict[str, tuple[Tensor | None, dict[str, object], list[str]]] = {
    "shape": (Tensor("bias", (4,), "float32"), {}, ["'Adam'", "'bias'", "float32[4]", "float32[3]"]),
    "dtype": (Tensor("bias", (3,), "float64"), {}, ["'bias'", "float64[3]", "float32[3]"]),
    "name": (Tensor("gamma", (3,), "float32"), {}, ["tensor 1", "'gamma'", "'bias'"]),
    "number": (None, {}, ["has 1", "has 2", "'bias'"]),
    "op": (BIAS, {"op": hvd.Sum}, ["op", "'Sum'", "'Average'"]),
    "algorithm": (BIAS, {"algorithm": "ring"}, ["algorithm", "'ring'", "'auto'"]),
    "compression": (BIAS, {"compression": hvd.Compression.bf16}, ["compression", "'bf16'", "'none'"]),
    "bucket_nbytes": (BIAS, {"bucket_nbytes": 7}, ["bucket_nbytes", "7"]),
}


@pytest.mark.parametrize("attribute", CHANNELS)
def test_tensors_and_options_of_a_channel(attribute: str, odd: bool, alike: Callable[..., str]) -> None:
    second, choices, parts = CHANNELS[attribute]
    theirs = [KERNEL] if second is None else [KERNEL, second]
    alike(opening(theirs, **choices) if odd else opening([KERNEL, BIAS]), *parts)


def test_plans_of_a_channel(odd: bool, alike: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_ext.planning import ir

    digest = ir.digest
    monkeypatch.setattr(ir, "digest", lambda plan: digest(plan) ^ 1 if odd else digest(plan))
    monkeypatch.setattr(runtime.current(), "_prepared", {})
    # A plan of its own under a digest that the others do not have: as if this rank ran another version.
    with pytest.raises(MismatchError, match="bucket 0") as caught:
        opening([KERNEL])()
    assert "plan " in str(caught.value)
    monkeypatch.undo()
    runtime.current()._prepared.clear()
    alike(opening([Tensor("bias", (4 if odd else 3,), "float32")]), "'bias'")


def test_a_dtype_that_one_rank_cannot_reduce_is_an_error_on_all(odd: bool, alike: Callable[..., str]) -> None:
    specs = [Tensor("kernel", (2,), "complex64" if odd else "float32")]
    alike(opening(specs), "'kernel'", "complex64", kind=InvalidError)


def test_options_and_topologies_of_init(odd: bool, size: int, alike: Callable[..., str], tmp_path: object) -> None:
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(MismatchError) as caught:
        hvd.init(options.Options(bucket_nbytes=7 if odd else 8))
    assert not hvd.is_initialized()
    with pytest.raises(TopologyError) as missing:
        hvd.init(options.Options(topology=f"{tmp_path}/none.yaml" if odd else None))
    hvd.init()
    words = [str(caught.value), str(missing.value)]
    assert hvd.allgather_object(words) == [words] * size
    assert f"bucket_nbytes must be the same on all ranks; rank {size - 1} has 7, rank 0 has 8" in words[0]
    assert f"rank {size - 1}: topology file" in words[1]
    assert process.is_initialized()


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [
        ("allreduce", {"tensor": np.array([True])}),
        ("allreduce", {"tensor": np.ones(2), "algorithm": "no such"}),
        ("allgather", {"tensor": 1.0}),
        ("broadcast", {"tensor": np.ones(2), "root_rank": -1}),
    ],
    ids=["dtype", "algorithm", "scalar", "root"],
)
def test_a_call_that_one_rank_refuses(odd: bool, size: int, collective: str, arguments: dict[str, object]) -> None:
    right = {"tensor": tf.ones(2), **({"root_rank": 0} if collective == "broadcast" else {})}
    if odd:
        with pytest.raises((InvalidError, PlanError)):
            getattr(hvd, collective)(**arguments)
    else:
        with pytest.raises(MismatchError, match=f"rank {size - 1} has refused it: "):
            getattr(hvd, collective)(**right)
    after = getattr(hvd, collective)(**right)  # under the default name that the refused call has counted too
    assert float(tf.reduce_sum(after)) == (2.0 * size if collective == "allgather" else 2.0)
