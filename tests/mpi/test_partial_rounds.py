"""Rounds that do not wait for all ranks, on several hosts: hundreds of random delays, and faults in the middle."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from hvd_ext.cluster.spec import Spec
from tests.mpi.faulty import Faulty, running

pytestmark = pytest.mark.cluster

TAU = 4

# Argument: the number of rounds, for each mode of HVD_EXT_TEST_MODES; 0: until rank 0 finds the file "enough". The
# weights follow random gradients with momentum; whole numbers beside them show whether anything is lost.
TRAINS = """
import os, pathlib, random, sys, time, zlib
import numpy as np
from hvd_ext.engine.partial import Partial
from hvd_ext.job import consensus, process, runtime
from hvd_ext.options import Sum
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning.layout import layout
from hvd_ext.planning.tensors import Tensor

ROUNDS, TAU = int(sys.argv[1]), 4
STOP = 1
folder = pathlib.Path(os.environ["HVD_EXT_TEST_OUTPUT"])
process.init()
job, rank, size = runtime.current(), process.rank(), process.size()
tensors = [Tensor("g", (1000,), "float32"), Tensor("n", (2,), "float64")]

def train(mode):
    quorum = size // 2 if mode == "quorum" else None
    partial = Partial(GradientOptions(sync=mode, quorum=quorum, staleness=TAU), seed=7)
    channel = job.open(mode, layout(job.tree, tensors, Sum), partial)
    generator, delays = np.random.default_rng(rank), random.Random(rank)
    weights = np.ones(1000, np.float32)
    velocity = np.zeros(1000, np.float32)
    sums, hashes, told, step = np.zeros(2), [], False, 0
    while not told:
        step += 1
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.003)
        gradients = [generator.standard_normal(1000, np.float32) + weights, np.array([rank + 1.0, step])]
        told = step == ROUNDS
        if told:
            job.engine.flush(channel)
        if rank == 0 and not ROUNDS:
            job.engine.set_flags(channel, STOP if (folder / "enough").exists() else 0)
        results = [np.empty_like(gradient) for gradient in gradients]
        job.engine.reduce(channel, gradients, results)
        velocity = np.float32(0.9) * velocity + results[0] / np.float32(size)
        weights = weights - np.float32(0.01) * velocity
        sums += results[1]
        hashes.append(zlib.crc32(weights.tobytes()))
        (flags,) = job.engine.rounds(channel, first=step, most=1).flags
        told = told or flags.any()
        if not ROUNDS or step % 200 == 0:
            print("step", step, flush=True)
    if not ROUNDS:  # what is held goes with one more round
        step += 1
        job.engine.flush(channel)
        job.engine.reduce(channel, [weights, np.array([rank + 1.0, step])], results)
        sums += results[1]
    seen = consensus.exchange(job.engine, "hashes", lambda: hashes)
    assert all(one == seen[0] for one in seen), [next(k for k in range(step) if one[k] != seen[0][k]) for one in seen]
    assert sums.tolist() == [step * size * (size + 1) / 2, size * step * (step + 1) / 2], sums
    rounds = job.engine.rounds(channel)
    assert (rounds.numbers[:, None] - rounds.arrived <= TAU).all()
    late = int((rounds.arrived < rounds.numbers[:, None]).sum())
    print(mode, "steps", step, "late", late, flush=True)
    job.engine.close_channel(channel)

for mode in os.environ["HVD_EXT_TEST_MODES"].split():
    train(mode)
print("all sums were right", flush=True)
"""


@pytest.mark.parametrize("hosts", [(3,), (2, 2, 1)], ids=lambda hosts: "+".join(map(str, hosts)))
def test_weights_are_equal_after_each_of_700_rounds(hosts: tuple[int, ...], tmp_path: Path) -> None:
    modes = ("solo", "majority", "quorum")
    variables = {"HVD_EXT_TEST_MODES": " ".join(modes)}
    with running(tmp_path, Spec(hosts, rate="1gbit"), TRAINS, elements=700, **variables) as job:
        job.must_succeed()
        for mode in modes:
            said = next(line for line in job.said(0).splitlines() if line.startswith(f"{mode} steps 700 late "))
            assert int(said.split()[-1]) > 0, said
            print(said)


def _rounds(folder: Path, **variables: str):
    return running(folder, Spec((2, 2), rate="100mbit"), TRAINS, elements=0, HVD_EXT_TEST_MODES="solo", **variables)


def _quickest(job: Faulty) -> int:
    return max(map(job.steps, range(job.size)))


def test_all_wait_for_a_rank_that_stands_still_and_go_on_with_it(tmp_path: Path) -> None:
    with _rounds(tmp_path) as job:
        job.wait_for_steps(20)
        stopped = job.pids()[3]
        stopped.suspend()
        at = job.steps(3)
        job.wait(lambda: _quickest(job) >= at, "the others go on")
        time.sleep(2)
        # the round after the bound has not begun; each rank has asked for it
        assert _quickest(job) <= at + 1 + TAU, job.text()
        stopped.resume()
        job.wait_for_steps(20)
        job.must_succeed()


def test_a_link_that_is_cut_and_returns_does_no_harm(tmp_path: Path) -> None:
    with _rounds(tmp_path, HVD_EXT_STALL_FATAL_S="60") as job:
        for _ in range(2):
            job.wait_for_steps(20)
            job.cluster.cut("h2")
            time.sleep(1)  # the trouble itself
            job.cluster.restore("h2")
        job.wait_for_steps(20)
        job.must_succeed()


@pytest.mark.parametrize("killed", [0, 3])
def test_a_killed_rank_ends_the_job(killed: int, tmp_path: Path) -> None:
    with _rounds(tmp_path) as job:
        job.wait_for_steps(20)
        job.pids()[killed].send_signal(signal.SIGKILL)
        job.must_fail()
