"""Rounds that do not wait for all ranks, through the engine's Python face; the rules are in the native tests."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvd_ext import options
from hvd_ext.engine.partial import Partial
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

pytestmark = pytest.mark.ranks(1, 2)

SIZES = (3, 0, 1000, 257)
STEPS = 25


def _opened(name: str, partial: Partial | None, wire: str | None = None) -> tuple[runtime.Runtime, int]:
    job = runtime.current()
    tensors = [Tensor(f"t{place}", (size,), "float32") for place, size in enumerate(SIZES)]
    return job, job.open(name, layout(job.tree, tensors, options.Sum, bucket_nbytes=1024, wire=wire), partial)


def _gradients(rank: int, step: int) -> list[np.ndarray]:
    """Small whole numbers: every sum of them is exact."""
    return [np.full(size, (rank + 1) * 100 + step, np.float32) for size in SIZES]


@pytest.mark.parametrize(("mode", "staleness"), [("solo", 3), ("majority", 0), ("quorum", 3)])
def test_results_are_those_of_a_replay_and_what_is_left_is_held(hvd, mode, staleness) -> None:
    quorum = (hvd.size() + 1) // 2 if mode == "quorum" else None
    given = GradientOptions(sync=mode, quorum=quorum, staleness=staleness)
    job, channel = _opened(f"{mode} {staleness}", Partial(given, seed=5))
    rank, size = hvd.rank(), hvd.size()
    outputs = [np.empty(elements, np.float32) for elements in SIZES]
    inputs = [np.empty(elements, np.float32) for elements in SIZES]
    reduce = job.engine.prepare(channel, inputs, outputs)
    generator = np.random.default_rng(rank)
    sums = []
    for step in range(1, STEPS + 1):
        if generator.random() < 0.3:
            time.sleep(generator.random() * 0.004)
        for place, gradient in enumerate(_gradients(rank, step)):
            inputs[place][:] = gradient
        reduce()
        sums.append([float(output[0]) if output.size else 0.0 for output in outputs])
        assert all((output == output[:1]).all() for output in outputs)
    rounds = job.engine.rounds(channel)
    assert list(rounds.numbers) == list(range(1, STEPS + 1))
    seen = consensus.exchange(job.engine, "sums and rounds", lambda: [sums, rounds.arrived.tolist()])
    assert all(one == seen[0] for one in seen)  # the same bits on all ranks, and the same table
    assert (rounds.numbers[:, None] - rounds.arrived <= staleness).all()
    given = np.zeros(size, np.int64)
    for row, arrived in enumerate(rounds.arrived):
        steps = [(one, step) for one in range(size) for step in range(given[one] + 1, arrived[one] + 1)]
        expected = sum(float(_gradients(one, step)[0][0]) for one, step in steps)
        given = np.maximum(given, arrived)
        assert sums[row] == [expected, 0.0, expected, expected]
    held = np.empty(SIZES[2], np.float32)
    job.engine.read_held(channel, 2, held)
    assert (held == sum(_gradients(rank, step)[2] for step in range(given[rank] + 1, STEPS + 1))).all()
    assert job.engine.holds(channel) == bool(held[0])
    if staleness == 0:
        assert (rounds.arrived == rounds.numbers[:, None]).all()
    job.engine.close_channel(channel)


def test_staleness_0_has_the_bits_of_a_channel_that_waits_for_all(hvd) -> None:
    job, partial = _opened("eager", Partial(GradientOptions(sync="solo", staleness=0)), wire="bfloat16")
    _, plain = _opened("plain", None, wire="bfloat16")
    generator = np.random.default_rng(hvd.rank())
    for _ in range(10):
        inputs = [generator.standard_normal(size, np.float32) for size in SIZES]
        results = [[np.empty_like(one) for one in inputs] for _ in range(2)]
        for channel, outputs in zip((partial, plain), results, strict=True):
            job.engine.reduce(channel, inputs, outputs)
        assert all(np.array_equal(one, other) for one, other in zip(*results, strict=True))
    job.engine.close_channel(partial)
    job.engine.close_channel(plain)


def test_what_a_channel_cannot_do_is_refused(hvd) -> None:
    job, plain = _opened("plain", None)
    with pytest.raises(InvalidError, match="wait for all ranks"):
        job.engine.flush(plain)
    with pytest.raises(InvalidError, match="quorum"):
        _opened("too many", Partial(GradientOptions(sync="quorum", quorum=hvd.size() + 1)))
    _, partial = _opened("held", Partial(GradientOptions(sync="solo")))
    with pytest.raises(InvalidError, match="elements"):
        job.engine.read_held(partial, 0, np.empty(2, np.float32))
    with pytest.raises(InvalidError, match="elements"):
        job.engine.write_held(partial, 0, np.empty(3, np.float64))
    with pytest.raises(InvalidError, match=r"\[0, 4\)"):
        job.engine.write_held(partial, 4, np.empty(3, np.float32))
    job.engine.close_channel(partial)
    job.engine.close_channel(plain)
