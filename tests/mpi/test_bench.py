"""The benchmark with real ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.bench.job import Job, JobError, mpirun

TIMEOUT_S = 280

# A rank whose contestant is wrong on rank 1 only, in the third call.
WRONG = """
import sys
from hvd_ext.bench.sampling import Contestant, read_task, run, values_of
import hvd_ext as hvd
hvd.init()
calls = []
def wrong():
    calls.append(1)
    result = values_of(0, 100) + values_of(1, 100)
    result[7] += hvd.rank() == 1 and len(calls) == 3
    return result
run(lambda elements, task: [Contestant("channel", wrong, "ring")], read_task(sys.argv[1]))
"""


def bench(tmp_path: Path, *options: str) -> tuple[dict, str]:
    path = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "hvd_ext",
        "bench",
        "allreduce",
        "--json",
        str(path),
        "--repetitions",
        "3",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(path.read_text()), done.stdout


def test_two_ranks_measure_and_check_every_contestant_of_every_size(tmp_path: Path) -> None:
    kept, shown = bench(tmp_path, "--ranks", "2", "--bytes", "4,4096", "--algorithms", "auto,ring", "--no-horovod")
    found = [(row["ranks"], row["nbytes"], row["what"], row["algorithm"]) for row in kept["rows"]]
    contestants = [("noop", ""), ("mpi", ""), ("channel", "auto"), ("channel", "ring"), ("eager", "auto")]
    assert found == [(2, nbytes, *contestant) for nbytes in (4, 4096) for contestant in contestants]
    assert all(0 < row["min_s"] <= row["median_s"] and len(row["samples_s"]) == 3 for row in kept["rows"])
    assert all(row["to_horovod"] is None for row in kept["rows"])
    assert "MPI_Allreduce" in shown


@pytest.mark.slow
def test_horovod_is_measured_in_a_job_of_its_own(tmp_path: Path) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod: python -m hvd_ext install-horovod")
    kept, shown = bench(tmp_path, "--ranks", "1,3", "--bytes", "4,100000", "--algorithms", "flexreduce,two_level")
    for ranks in (1, 3):
        for nbytes in (4, 100_000):
            rows = {row["what"]: row for row in kept["rows"] if (row["ranks"], row["nbytes"]) == (ranks, nbytes)}
            ratio = rows["eager"]["median_s"] / rows["horovod eager"]["median_s"]
            assert rows["eager"]["to_horovod"] == pytest.approx(ratio)
    assert "Horovod" in shown
    assert kept["versions"]["horovod"]


@pytest.mark.slow
def test_a_wrong_result_on_one_rank_fails_the_job_with_its_place(tmp_path: Path) -> None:
    task = {
        "sizes": [400],
        "algorithms": ["ring"],
        "repetitions": 5,
        "warmup": 1,
        "sample_s": 0.0,
        "output": str(tmp_path / "output"),
        "events": str(tmp_path / "events"),
    }
    (tmp_path / "task").write_text(json.dumps(task))
    command = mpirun(2, [sys.executable, "-c", WRONG, str(tmp_path / "task")])
    with (
        Job(command, tmp_path / "log") as job,
        pytest.raises(JobError, match="channel ring of 400 bytes: element 7 is"),
    ):
        job.wait(TIMEOUT_S)
    assert not (tmp_path / "output").exists()
