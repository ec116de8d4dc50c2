"""Rounds that do not wait for all ranks, on the engine: results, who took part, and what is held."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvd_ext import options
from hvd_ext.engine.partial import Partial
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

SIZES = (3, 0, 1000, 257)
STEPS = 40


def _opened(name: str, partial: Partial | None, wire: str | None = None) -> tuple[runtime.Runtime, int]:
    job = runtime.current()
    tensors = [Tensor(f"t{place}", (size,), "float32") for place, size in enumerate(SIZES)]
    return job, job.open(name, layout(job.tree, tensors, options.Sum, bucket_nbytes=1024, wire=wire), partial)


def _gradients(rank: int, step: int) -> list[np.ndarray]:
    """Small whole numbers: every sum of them is exact."""
    return [np.full(size, (rank + 1) * 100 + step, np.float32) for size in SIZES]


@pytest.mark.parametrize("mode", ["full", "solo", "majority", "quorum"])
@pytest.mark.parametrize("staleness", [0, 3])
def test_results_are_those_of_a_replay_and_what_is_left_is_held(hvd, mode, staleness) -> None:
    job, channel = _opened(f"{mode} {staleness}", Partial(mode, (hvd.size() + 1) // 2, staleness, seed=5))
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
        expected = sum(
            float(_gradients(one, step)[0][0])
            for one in range(size)
            for step in range(given[one] + 1, arrived[one] + 1)
        )
        given = np.maximum(given, arrived)
        assert sums[row] == [expected, 0.0, expected, expected]
    held = np.empty(SIZES[2], np.float32)
    job.engine.read_held(channel, 2, held)
    assert (held == sum(_gradients(rank, step)[2] for step in range(given[rank] + 1, STEPS + 1))).all()
    assert job.engine.holds(channel) == bool(held[0])
    if staleness == 0 or mode == "full":
        assert (rounds.arrived == rounds.numbers[:, None]).all()
    job.engine.close_channel(channel)


def test_staleness_0_has_the_bits_of_a_channel_that_waits_for_all(hvd) -> None:
    job, partial = _opened("eager", Partial("solo", staleness=0), wire="bfloat16")
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


def test_ranks_with_unequal_numbers_of_steps_end_together(hvd) -> None:
    job, channel = _opened("unequal", Partial("quorum", hvd.size(), 2))
    rank, own = hvd.rank(), 3 + 5 * hvd.rank()
    outputs = [np.empty(elements, np.float32) for elements in SIZES]
    for step in range(1, own + 1):
        job.engine.reduce(channel, _gradients(rank, step), outputs)
    job.engine.leave(channel)
    taken = own
    while job.engine.next_round(channel):
        job.engine.skip_step(channel)
        taken += 1
    assert taken == 3 + 5 * (hvd.size() - 1)
    assert job.engine.progress(channel).behind == 0
    assert len(job.engine.rounds(channel).numbers) == taken
    job.engine.close_channel(channel)


def test_a_flushed_round_takes_all_gradients_and_flags_travel(hvd) -> None:
    job, channel = _opened("flushed", Partial("solo", staleness=4))
    rank = hvd.rank()
    outputs = [np.empty(elements, np.float32) for elements in SIZES]
    for step in range(1, 13):
        time.sleep(0.002 * rank)
        if step % 4 == 0:
            job.engine.flush(channel)
        job.engine.set_flags(channel, 2 if rank == hvd.size() - 1 else 0)
        job.engine.reduce(channel, _gradients(rank, step), outputs)
        (found,) = job.engine.rounds(channel, first=step, most=1).arrived
        if step % 4 == 0:
            assert (found == step).all()
            assert not job.engine.holds(channel)
    assert (job.engine.rounds(channel).flags[-1] == [0] * (hvd.size() - 1) + [2]).all()
    job.engine.close_channel(channel)


def test_what_is_held_can_be_set_and_is_given_in_the_next_round(hvd) -> None:
    job, channel = _opened("restored", Partial("full"))
    for place, size in enumerate(SIZES):
        job.engine.write_held(channel, place, np.full(size, 1000 * (hvd.rank() + 1), np.float32))
    outputs = [np.empty(elements, np.float32) for elements in SIZES]
    job.engine.reduce(channel, _gradients(hvd.rank(), 1), outputs)
    expected = sum(1000 * (rank + 1) + (rank + 1) * 100 + 1 for rank in range(hvd.size()))
    assert all((output == expected).all() for output in outputs)
    assert not job.engine.holds(channel)
    job.engine.close_channel(channel)


def test_what_a_channel_cannot_do_is_refused(hvd) -> None:
    job, plain = _opened("plain", None)
    with pytest.raises(InvalidError, match="wait for all ranks"):
        job.engine.flush(plain)
    with pytest.raises(InvalidError, match="quorum"):
        _opened("too many", Partial("quorum", hvd.size() + 1))
    with pytest.raises(InvalidError, match="mode"):
        Partial("sola")
    _, partial = _opened("held", Partial("solo"))
    with pytest.raises(InvalidError, match="elements"):
        job.engine.read_held(partial, 0, np.empty(2, np.float32))
    with pytest.raises(InvalidError, match="elements"):
        job.engine.write_held(partial, 0, np.empty(3, np.float64))
    with pytest.raises(InvalidError, match=r"\[0, 4\)"):
        job.engine.write_held(partial, 4, np.empty(3, np.float32))
    job.engine.close_channel(partial)
    job.engine.close_channel(plain)
