"""The benchmark with real ranks: end to end, with a wrong result, as one rank of a job, and stopped half-way."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ext.runner.launcher import find, mpirun

TIMEOUT_S = 280
HOROVOD = importlib.util.find_spec("horovod") is not None
ALLREDUCE = [sys.executable, "-m", "hvd_ext", "bench", "allreduce"]

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
worker.main(sys.argv[-1])
"""


def bench(tmp_path: Path, *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    path = tmp_path / "result.json"
    command = [*ALLREDUCE, "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    assert done.stderr == ""  # the progress is for terminals
    return json.loads(path.read_text()), done.stdout


def yardstick_holds(rows: list[dict[str, Any]], name: str) -> None:
    """Assert that the yardstick was measured once for each size, and that every row that sums is beside it."""
    for nbytes in {row["bytes"] for row in rows}:
        here = [row for row in rows if row["bytes"] == nbytes]
        (yardstick,) = [row for row in here if row["algorithm"] == name]
        for row in here:
            assert row["correct"] is True
            assert row["processor_seconds_per_call"] > 0
            assert row["processor_seconds_per_gb"] == pytest.approx(row["processor_seconds_per_call"] / nbytes * 1e9)
            beside = None if row in (yardstick,) else row["seconds_median"] / yardstick["seconds_median"]
            assert row["x_yardstick"] == pytest.approx(beside)


@pytest.mark.slow
def test_on_one_host_the_yardstick_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--ranks", "2", "--bytes", "4,1000000", "--how", "engine", "--repetitions", "3"]
    kept, shown = bench(tmp_path, *options, "--algorithms", "auto,memory,tcp,mpi")
    assert [row["algorithm"] for row in kept["rows"]] == ["auto", "memory", "mpi"] * 2
    yardstick_holds(kept["rows"], "memory")
    assert kept["runs"][0]["notes"] == []  # that tcp does not apply goes without saying beside memory
    assert "x yardstick" in shown and "s/GB" in shown and "/call" in shown
    kept, _ = bench(tmp_path, *options, "--algorithms", "auto,tcp")
    assert any("tcp does not apply to 2 ranks on 1 host" in note for note in kept["runs"][0]["notes"])


def rehearsed(path: Path, hosts: str, rate: str, options: Sequence[str]) -> Any:
    """Measure on a rehearsed cluster, and give the result that was written to the path."""
    rehearse = [sys.executable, "-m", "hvd_ext", "cluster", "run", "--hosts", hosts, "--rate", rate, "--"]
    done = subprocess.run(
        [*rehearse, *ALLREDUCE, *options, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("hosts", ["1,1", "2,1,1"])
def test_between_hosts_the_yardstick_is_tcp(hosts: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--bytes", "4,400000", "--algorithms", "auto,tcp", "--how", "engine", "--repetitions", "3"]
    rows = rehearsed(path, hosts, "200mbit", options)["rows"]
    assert [row["algorithm"] for row in rows] == ["auto", "tcp"] * 2
    yardstick_holds(rows, "tcp")
    # the bursts of both ends of a link pass at once, so that only a larger buffer is held to its bound
    large = {row["algorithm"]: row for row in rows if row["bytes"] == 400_000}
    assert large["tcp"]["seconds_min"] > 0.5 * large["tcp"]["bound_seconds"]


@pytest.mark.slow
def test_every_contestant_of_every_size_is_measured_and_checked(tmp_path: Path) -> None:
    plot = tmp_path / "x.png"
    options = ["--ranks", "2", "--bytes", "4,4096,40000000000000", "--algorithms", "ring,torus2d,mpi,horovod"]
    options += ["--how", "graph,engine,eager", "--repetitions", "3", "--rate", "1gbit", "--plot", str(plot)]
    kept, shown = bench(tmp_path, *options)
    contestants = [("noop", "graph"), ("ring", "graph"), ("ring", "engine"), ("ring", "eager"), ("mpi", "engine")]
    contestants += [("horovod", "graph"), ("horovod", "eager")] if HOROVOD else []
    found = [(row["bytes"], row["algorithm"], row["how"]) for row in kept["rows"]]
    assert found == [(nbytes, *contestant) for nbytes in (4, 4096) for contestant in contestants]
    for row in kept["rows"]:
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["correct"]) == (2, 1, [2], True)
        assert len(row["samples"]) == 3 and 0 < row["seconds_min"] <= row["seconds_median"]
        assert (row["bound_seconds"] is None) == (row["algorithm"] == "noop")
        assert (row["predicted_seconds"] is None) == (row["algorithm"] != "ring")
    (run,) = kept["runs"]
    assert any("40,000,000,000,000 bytes were left out" in note for note in run["notes"])
    assert any("torus2d does not apply" in note for note in run["notes"])
    assert HOROVOD or any("Horovod is not installed" in note for note in run["notes"])
    assert not any("not paused" in note for note in run["notes"])
    assert plot.exists()
    assert "MPI_Allreduce" in shown and "torus2d does not apply" in shown


def test_a_wrong_result_is_a_row_and_an_exit_status(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    launcher = shlex.join([*mpirun(2, [sys.executable, str(script)])])
    options = ["--launcher", launcher, "--bytes", "400", "--algorithms", "ring,mpi", "--how", "engine"]
    kept, shown = bench(tmp_path, *options, status=1)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    assert (rows["ring"]["correct"], rows["mpi"]["correct"]) == (False, True)
    assert "rank 1: element 7 is" in rows["ring"]["wrong"][0]
    assert "wrong result: ring engine, 2 ranks, 400 bytes: rank 1: element 7 is" in shown


@pytest.mark.slow
def test_under_a_launched_job_the_first_rank_starts_the_jobs_and_results_are_appended(tmp_path: Path) -> None:
    launcher = shlex.join(mpirun(2, []))
    path = tmp_path / "result.json"
    options = ["--bytes", "64", "--algorithms", "ring", "--how", "engine", "--repetitions", "2"]
    for _ in range(2):
        done = subprocess.run(
            mpirun(2, [*ALLREDUCE, *options, "--json", str(path), "--append"]),
            env={**os.environ, "HVD_EXT_LAUNCHER": launcher},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.count("ring engine") == 1
    kept = json.loads(path.read_text())
    assert [row["run"] for row in kept["rows"]] == [0, 1]
    assert [run["launcher"] for run in kept["runs"]] == [launcher, launcher]


@pytest.mark.slow
@pytest.mark.cluster
def test_in_a_rehearsed_cluster_rows_know_hosts_bound_and_price(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--bytes", "100000", "--algorithms", "flexreduce,ring", "--how", "engine", "--repetitions", "2"]
    kept = rehearsed(path, "2,1", "50mbit", options)
    rows = {row["algorithm"]: row for row in kept["rows"]}
    for name, share in (("flexreduce", 1), ("ring", 4 / 3)):
        row = rows[name]
        assert (row["ranks"], row["hosts"], row["ranks_per_host"], row["correct"]) == (3, 2, [2, 1], True)
        assert row["bound_seconds"] == pytest.approx(share * 100_000 / (50e6 / 8))
        assert row["predicted_seconds"] > row["bound_seconds"]
        assert row["bottleneck_bytes"] == pytest.approx(share * 100_000)
    assert "ranks" in kept["runs"][0]["topology"]


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HVD_EXT_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def stopped(mark: str, module: str) -> list[psutil.Process]:
    found = []
    for process in marked(mark):
        try:
            if process.status() == psutil.STATUS_STOPPED and module in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert running.poll() is None, "the benchmark has ended"
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.3)  # the processes of the machine are many


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
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
            [*ALLREDUCE, *options, "--repetitions", "1000000", "--seconds-per-row", "1000000"],
            env={**os.environ, "HVD_EXT_TEST_MARK": mark, "TMPDIR": str(tmp_path)},
            stdout=log,
            stderr=log,
            preexec_fn=heeds,
        )
    try:
        # both jobs have started, and ours has the turn
        wait_for(lambda: len(stopped(mark, "hvd_ext.bench.allreduce_horovod")) == 2, running)
        running.send_signal(number)
        running.wait(TIMEOUT_S)
        end = time.monotonic() + TIMEOUT_S
        while marked(mark) and time.monotonic() < end:
            time.sleep(0.3)
        assert marked(mark) == []
        if number != signal.SIGKILL:
            assert running.returncode == 128 + number
            assert b"no process of the job was left behind" in (tmp_path / "log").read_bytes()
            assert list(tmp_path.glob("hvd_ext-bench-*")) == []
    finally:
        running.kill()
        for process in marked(mark):
            process.kill()


def test_a_launcher_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [*ALLREDUCE, "--launcher", "/no-such-launcher -np 2"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "/no-such-launcher" in done.stderr
    assert find("mpirun") is not None
