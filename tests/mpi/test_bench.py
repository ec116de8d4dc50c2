"""The benchmark of allreduce with real ranks: end to end, with a wrong result, as one rank of a job, and stopped."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ext.runner.launcher import marked, mpirun
from tests.mpi.benches import BENCH, HOROVOD, TIMEOUT_S, bench, rehearsed
from tests.waiting import until

MARK = "HVD_EXT_TEST_MARK"

# A worker like ours, but on rank 1 the fifth result of the engine is wrong.
WRONG = """
import dataclasses, sys
from hvd_ext.bench import allreduce_worker as worker
right = worker.Buffers._engine
calls = []
def wrong(self, *arguments):
    from hvd_ext.job import process
    one = right(self, *arguments)
    def call():
        result = one.call()
        calls.append(1)
        result[7] += process.rank() == 1 and len(calls) == 5
        return result
    return dataclasses.replace(one, call=call)
worker.Buffers._engine = wrong
worker.main(*sys.argv[-2:])
"""


def yardstick_holds(rows: list[dict[str, Any]], name: str) -> None:
    """Assert that the yardstick was measured once for each size, and that every row that sums is beside it."""
    for nbytes in {row["bytes"] for row in rows}:
        here = [row for row in rows if row["bytes"] == nbytes]
        (yardstick,) = [row for row in here if row["algorithm"] == name]
        for row in here:
            assert row["correct"] is True
            assert row["processor_seconds_per_call"] > 0
            assert row["processor_seconds_per_gb"] == pytest.approx(row["processor_seconds_per_call"] / nbytes * 1e9)
            beside = None if row is yardstick else row["seconds_median"] / yardstick["seconds_median"]
            assert row["x_yardstick"] == pytest.approx(beside)


def test_on_one_host_the_yardstick_is_memory(tmp_path: Path) -> None:
    options = ["allreduce", "--ranks", "2", "--bytes", "4,1000000", "--how", "engine", "--repetitions", "3"]
    kept, shown = bench(tmp_path, *options, "--algorithms", "auto,memory,tcp,mpi", COLUMNS="200")
    assert [row["algorithm"] for row in kept["rows"]] == ["auto", "memory", "mpi"] * 2
    yardstick_holds(kept["rows"], "memory")
    assert kept["runs"][0]["notes"] == []  # that tcp does not apply goes without saying beside memory
    assert "x yardstick" in shown and "s/GB" in shown and "/call" in shown


@pytest.mark.cluster
def test_between_hosts_the_yardstick_is_tcp_and_rows_know_hosts_bound_and_price(tmp_path: Path) -> None:
    options = ["--bytes", "4,400000", "--algorithms", "flexreduce,ring,tcp", "--how", "engine", "--repetitions", "3"]
    kept, _ = bench(tmp_path, "allreduce", *options, before=rehearsed("2,1", "50mbit"))
    assert [row["algorithm"] for row in kept["rows"]] == ["flexreduce", "ring", "tcp"] * 2
    assert "ranks" in kept["runs"][0]["topology"]
    yardstick_holds(kept["rows"], "tcp")
    # the bursts of both ends of a link pass at once, so that only a larger buffer is held to its bound
    large = {row["algorithm"]: row for row in kept["rows"] if row["bytes"] == 400_000}
    for name, share in (("flexreduce", 1), ("ring", 4 / 3), ("tcp", 1)):
        row = large[name]
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["correct"]) == (3, 2, [2, 1], True)
        assert row["bound_seconds"] == pytest.approx(share * 400_000 / (50e6 / 8))
        assert row["seconds_min"] > 0.5 * row["bound_seconds"]
        if name != "tcp":
            assert row["predicted_seconds"] > row["bound_seconds"]
            assert row["bottleneck_bytes"] == pytest.approx(share * 400_000)


def test_every_contestant_of_every_size_is_measured_and_checked(tmp_path: Path) -> None:
    plot = tmp_path / "x.png"
    options = ["--ranks", "2", "--bytes", "4,4096,40000000000000", "--algorithms", "ring,torus2d,mpi,tcp,horovod"]
    options += ["--how", "graph,engine,eager", "--repetitions", "3", "--rate", "1gbit", "--plot", str(plot)]
    kept, shown = bench(tmp_path, "allreduce", *options)
    contestants = [("noop", "graph"), ("ring", "graph"), ("ring", "engine"), ("ring", "eager"), ("mpi", "engine")]
    contestants += [("horovod", "graph"), ("horovod", "eager")] if HOROVOD else []
    measured = [(row["bytes"], row["algorithm"], row["how"]) for row in kept["rows"]]
    assert measured == [(nbytes, *contestant) for nbytes in (4, 4096) for contestant in contestants]
    for row in kept["rows"]:
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["correct"]) == (2, 1, [2], True)
        assert len(row["samples"]) == 3 and 0 < row["seconds_min"] <= row["seconds_median"]
        assert (row["bound_seconds"] is None) == (row["algorithm"] == "noop")
        assert (row["predicted_seconds"] is None) == (row["algorithm"] != "ring")
    notes = " ".join(kept["runs"][0]["notes"])
    assert "40,000,000,000,000 bytes were left out" in notes
    assert "torus2d does not apply" in notes and "torus2d does not apply" in shown
    assert "tcp does not apply to 2 ranks on 1 host" in notes
    assert HOROVOD or "Horovod is not installed" in notes
    assert "not paused" not in notes
    assert plot.exists()
    assert "MPI_Allreduce" in shown


def test_a_wrong_result_is_a_row_and_an_exit_status(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    launcher = shlex.join(mpirun(2, [sys.executable, str(script)]))
    options = ["--launcher", launcher, "--bytes", "400", "--algorithms", "ring,mpi", "--how", "engine"]
    kept, shown = bench(tmp_path, "allreduce", *options, status=1)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    assert (rows["ring"]["correct"], rows["mpi"]["correct"]) == (False, True)
    assert "rank 1: element 7 is" in rows["ring"]["wrong"][0]
    assert "wrong result: ring engine, 2 ranks, 400 bytes: rank 1: element 7 is" in shown


def test_under_a_launched_job_the_first_rank_starts_the_jobs_and_results_are_appended(tmp_path: Path) -> None:
    launcher = shlex.join(mpirun(2, []))
    options = ["--bytes", "64", "--algorithms", "ring", "--how", "engine", "--repetitions", "2", "--append"]
    for _ in range(2):
        kept, shown = bench(tmp_path, "allreduce", *options, before=mpirun(2, []), HVD_EXT_LAUNCHER=launcher)
        assert shown.count("ring engine") == 1
    assert [row["run"] for row in kept["rows"]] == [0, 1]
    assert [run["launcher"] for run in kept["runs"]] == [launcher, launcher]


def stopped(mark: str, module: str) -> list[psutil.Process]:
    paused = []
    for process in marked(MARK, mark):
        try:
            if process.status() == psutil.STATUS_STOPPED and module in process.cmdline():
                paused.append(process)
        except psutil.Error:
            continue
    return paused


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_half_way_it_leaves_no_process_behind_also_none_that_is_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    if not HOROVOD:
        pytest.skip("needs Horovod: python -m hvd_ext install-horovod; without it there is one job, never stopped")
    mark = uuid.uuid4().hex
    options = ["--ranks", "2", "--bytes", "1000000", "--algorithms", "ring,horovod", "--how", "graph"]
    # A shell that starts the tests in the background has them ignore SIGINT, and what they start too.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            [*BENCH, "allreduce", *options, "--repetitions", "1000000", "--seconds-per-row", "1000000"],
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path)},
            stdout=log,
            stderr=log,
            preexec_fn=heeds,
        )
    try:
        # both jobs have started, and ours has the turn
        until(lambda: running.poll() is not None or len(stopped(mark, "hvd_ext.bench.allreduce_horovod")) == 2)
        assert running.poll() is None, "the benchmark has ended"
        running.send_signal(number)
        running.wait(TIMEOUT_S)
        until(lambda: not marked(MARK, mark))
        if number != signal.SIGKILL:
            assert running.returncode == 128 + number
            assert b"no process of the job was left behind" in (tmp_path / "log").read_bytes()
            assert list(tmp_path.glob("hvd_ext-bench-*")) == []
    finally:
        running.kill()
        for process in marked(MARK, mark):
            process.kill()
