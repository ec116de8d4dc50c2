"""Tracing a job of any number of ranks: what is in the files, and what must not disturb it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.commands.trace import app as trace
from hvd_ext.errors import InvalidError, MismatchError, NotInitializedError
from hvd_ext.job import runtime
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.options import Options
from hvd_ext.planning import step_times as planning_times
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.gradients import registration
from hvd_ext.trace import merge, rounds, summary
from tests.ranks.conftest import LAUNCHED_SIZE
from tests.ranks.numbers import total, values

pytestmark = pytest.mark.ranks(1, 2)

several = pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="nobody is late")

STEPS = 3
SIZES = (70_001, 5, 0, 3000)


def train(name: str, rank: int, size: int, steps: int = STEPS) -> registration.Channel:
    """Steps of a channel of several buckets; the sums are checked."""
    specs = [Tensor(f"g{i}", (n,), "float32") for i, n in enumerate(SIZES)]
    channel = registration.open_channel(name, specs, Options(bucket_nbytes=16_000, op=hvd.Sum))
    reduce = tf.function(channel.reduce)
    for step in range(steps):
        sums = reduce([tf.constant(values(rank, (n,), step), tf.float32) for n in SIZES])
        for n, found in zip(SIZES, sums, strict=True):
            np.testing.assert_array_equal(found, total(size, (n,), step))
    return channel


def events_of(merged: merge.Merged, rank: int, category: str) -> list[dict[str, Any]]:
    """The events of a category of one rank."""
    return [event for event in merged.events if event["pid"] == rank and event.get("cat") == category]


def test_every_bucket_of_every_rank_is_in_the_merged_trace(shared: Path, rank: int, size: int) -> None:
    hvd.start_trace(shared)
    train("traced", rank, size).close()
    hvd.allreduce(tf.ones(3), name="loss")
    path = hvd.stop_trace()
    assert path == shared / f"rank_{rank}.json"
    hvd.barrier()
    merged = merge.read(shared)
    assert merged.problems == []
    assert sorted(merged.ranks) == list(range(size))
    assert merged.uncertainty_us < 1e9
    for other in range(size):
        assert len(events_of(merged, other, "step")) == len(events_of(merged, other, "submitted")) == STEPS
        fills = events_of(merged, other, "fill")
        tensors = {name for event in events_of(merged, other, "reduce") for name in event["args"]["tensors"]}
        assert {"g0", "g1", "g3"} <= tensors
        assert len(fills) == len(events_of(merged, other, "deliver"))
        for event in events_of(merged, other, "level"):
            outer = [e for e in events_of(merged, other, "reduce") if _same(e, event)]
            assert len(outer) == 1
            assert outer[0]["ts"] <= event["ts"] + 0.01
            assert event["ts"] + event["dur"] <= outer[0]["ts"] + outer[0]["dur"] + 0.01
        assert bool(events_of(merged, other, "level")) == (size > 1)
        calls = [event for event in events_of(merged, other, "call") if event["name"] == "allreduce 'loss'"]
        assert len(calls) == 1
    steps = summary.steps_of(merged.events)
    assert [(step.channel, step.step) for step in steps] == [("traced", 1 + n) for n in range(STEPS)]
    for step in steps:
        assert step.communication_us > 0
        assert step.hidden is not None and 0 <= step.hidden <= 1
        assert (step.last is None) == (size == 1)
    hvd.barrier()


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(first["args"][key] == second["args"][key] for key in ("lane", "step", "bucket"))


def test_a_second_trace_replaces_the_first_and_has_nothing_of_it(shared: Path, rank: int, size: int) -> None:
    for name in ("first", "second"):
        hvd.start_trace(shared)
        channel = train(name, rank, size, steps=8)
        path = hvd.stop_trace()
        channel.close()
    seen = json.loads(path.read_text())
    channels = {event["args"]["channel"] for event in seen["traceEvents"] if "step" in event["args"]}
    assert channels == {"second"}
    assert seen["otherData"]["size"] == size
    hvd.barrier()
    if rank == 0:  # the files of a trace have the times of its steps
        model = shared / "model.csv"
        trace([str(shared), "--model", str(model)], standalone_mode=False)
        times = planning_times.read(model)
        assert {tensor.name: tensor.elements for tensor in times.tensors} == {f"g{i}": n for i, n in enumerate(SIZES)}
        assert times.computed_s >= times.forward_s > 0
    hvd.barrier()


def test_without_a_trace_there_is_nothing_to_stop(shared: Path) -> None:
    with pytest.raises(InvalidError, match="no trace is being recorded"):
        hvd.stop_trace()
    hvd.start_trace(shared)
    with pytest.raises(InvalidError, match="a trace is being recorded already"):
        hvd.start_trace(shared)
    hvd.stop_trace()
    hvd.barrier()


def test_a_folder_that_cannot_be_made_on_one_rank_is_an_error_on_all(shared: Path, rank: int, size: int) -> None:
    mine = shared / f"mine{rank}"
    if rank == size - 1:
        mine.write_text("a file")
    with pytest.raises(InvalidError, match="must be writable; File exists"):
        hvd.start_trace(mine)
    assert float(hvd.allreduce(tf.ones(()), op=hvd.Sum, name="after")) == size


def test_the_setting_traces_from_init_to_shutdown(shared: Path, rank: int, size: int) -> None:
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.start_trace(shared)
    hvd.init(Options(trace=shared))
    train("whole", rank, size).close()
    hvd.barrier()
    hvd.shutdown()
    seen = json.loads((shared / f"rank_{rank}.json").read_text())
    assert sum(event.get("cat") == "step" for event in seen["traceEvents"]) == STEPS
    if size > 1:
        with pytest.raises(MismatchError, match="trace must be the same on all ranks"):
            hvd.init(Options(trace=shared if rank == 0 else None))
    hvd.init()


def test_a_file_that_cannot_be_written_does_not_hinder_a_shutdown(
    shared: Path, rank: int, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    hvd.barrier()
    hvd.shutdown()
    mine = shared / f"of{rank}"
    hvd.init(Options(trace=mine))
    mine.rmdir()
    hvd.barrier()
    hvd.shutdown()
    assert f"hvd_ext: the trace of rank {rank} was not written: FileNotFoundError" in capfd.readouterr().err
    hvd.init()
    assert hvd.size() == size


@several
def test_partial_rounds_are_events_and_are_summed_up(shared: Path, rank: int, capsys: pytest.CaptureFixture) -> None:
    hvd.start_trace(shared)
    variable = keras.Variable(np.zeros(3), dtype="float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync="solo", staleness=3)
    for step in range(1, 6):
        while rank > 0 and 1 < step < 5 and _over(optimizer) < step:
            time.sleep(0.001)
        optimizer.apply([tf.ones(3)], [variable])
    hvd.stop_trace()
    hvd.barrier()
    merged = merge.read(shared)
    for other in sorted(merged.ranks):
        about = [event["args"] for event in events_of(merged, other, "round")]
        assert [one["round"] for one in about] == [1, 2, 3, 4, 5]
        assert len(events_of(merged, other, "step")) == 5
        # in the first and the last round any rank may be the first
        assert [one["on_time"] for one in about[1:4]] == [other == 0] * 3
    (found,) = rounds.of_trace(merged.events).values()
    assert found.on_time[0] >= 3 and all(late >= 3 for late in found.late[1:])
    capsys.readouterr()
    text = hvd.explain(optimizer)
    assert "5 partial rounds" in text and "ranks on time in the mean" in text
    hvd.barrier()
    hvd.flush(optimizer)
    optimizer.apply([tf.ones(3)], [variable])
    if rank == 0:
        trace([str(shared), "--summary"], standalone_mode=False)
        assert "5 partial rounds" in capsys.readouterr().out
    hvd.barrier()


def _over(optimizer: Any) -> int:
    """The newest round of an optimizer that is over."""
    return runtime.current().engine.progress(channels(optimizer)[0].handle).over
