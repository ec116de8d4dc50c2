"""The doctor under launchers: one report by rank 0, a status that scripts can use, and never a hang."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.mpi import jobs
from tests.mpi.benches import rehearsal

# The launcher is looked for among a rank's parents.
run = functools.partial(jobs.run, forked=False)

# The checks of a machine import TensorFlow twice; one test makes them, the others look at the job only.
QUICK = """
    import os, sys, time
    from hvd_ext.__main__ import app
    from hvd_ext.build import child
    from hvd_ext.doctor import checks
    from hvd_ext.doctor.checks import Finding, State

    for name in ("python", "tensorflow", "keras", "native_library", "native_match"):
        setattr(checks, name, lambda: Finding("machine", State.OK, ""))
    checks.tensorflow_answer = lambda: child.Answer({})
    if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("LATE"):
        time.sleep(3600)
    app(["doctor", *sys.argv[1:]])
"""
NO_LATE = {"LATE": "nobody"}


def report(text: str) -> dict[str, dict[str, Any]]:
    """Read the findings of `doctor --json` out of what a rank wrote."""
    begin = text.index("[\n")
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text[begin:])[0]
    return {finding["part"]: finding for finding in found}


def quick(folder: Path) -> list[str]:
    """Write the quick doctor; give its path."""
    path = folder / "quick.py"
    path.write_text(textwrap.dedent(QUICK))
    return [str(path)]


def test_a_job_that_works_is_reported_once_with_all_that_was_asked(tmp_path: Path) -> None:
    changes = {"HOROVOD_CYCLE_TIME": "3", "HOROVOD_FUSION_THRESHOLD": "1024"}
    job = run(tmp_path, ["-m", "hvd_ext", "doctor", "--json"], changes=changes).must_succeed()
    found = report(job.outputs[0])
    assert [part for part, finding in found.items() if finding["state"] == "to mend"] == []
    assert found["the ranks meet"]["seen"].startswith("2 ranks on 1 host: ")
    assert "libmpi" in found["MPI library"]["seen"]
    assert found["launcher"]["seen"].endswith("mpirun")
    assert found["allreduce"]["seen"].startswith("right; 4 MiB over 2 ranks in ")
    assert "HOROVOD_CYCLE_TIME=3" in found["Horovod's variables"]["seen"]
    assert job.outputs[1].strip() == ""


def test_the_table_has_no_line_of_another_rank(tmp_path: Path) -> None:
    job = run(tmp_path, quick(tmp_path), ranks=3, changes=NO_LATE).must_succeed()
    lines = job.outputs[0].strip().splitlines()
    assert lines[0].strip() == "hvd_ext in this job"
    assert lines[-1] == "training works here"
    assert [job.outputs[rank].strip() for rank in (1, 2)] == ["", ""]


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    arguments = [*quick(tmp_path), "--json", "--limit-s", "5"]
    job = run(tmp_path, arguments, ranks=3, changes={"LATE": "1"}).must_fail()
    meet = report(job.outputs[0])["the ranks meet"]
    assert meet["state"] == "to mend"
    assert "rank 1 (local rank 1)" in meet["seen"]
    assert "has not called init()" in meet["seen"]


def test_a_launch_without_mpi_is_refused_by_its_rank_0_only(tmp_path: Path) -> None:
    arguments = [*quick(tmp_path), "--json"]
    gloo = {"HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", **NO_LATE}
    job = run(tmp_path, arguments, ranks=1, launcher=[], changes={**gloo, "HOROVOD_RANK": "0"}).must_fail()
    assert "horovodrun with Gloo" in report(job.outputs[0])["launcher"]["seen"]


@pytest.mark.cluster
def test_two_hosts_are_named_with_their_network(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE", "nobody")
    # each rank's report in a file: what mpirun passes on is for people
    script = Path(quick(tmp_path)[0])
    script.write_text(f"import sys; sys.stdout = open({str(tmp_path)!r} + '/rank0.txt', 'a')\n" + script.read_text())
    rehearsal(short, "--hosts", "1,1", "--", sys.executable, str(script), "--json")
    found = report((tmp_path / "rank0.txt").read_text())
    assert found["the ranks meet"]["seen"] == "2 ranks on 2 hosts: h1: rank 0; h2: rank 1"
    assert found["network"]["seen"].startswith("in common: 10.77.0.0/")


def test_the_launcher_of_another_mpi_is_named_with_both(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "mpich"]
    try:
        loaded = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("MPICH cannot be had: pip download mpich takes too long")
    wheels = list(tmp_path.glob("mpich-*.whl"))
    if not wheels:
        pytest.skip(f"MPICH cannot be had: {(loaded.stderr.strip().splitlines() or ['no wheel'])[-1]}")
    with zipfile.ZipFile(wheels[0]) as file:
        file.extractall(tmp_path / "mpich")
    mpiexec = next((tmp_path / "mpich").rglob("bin/mpiexec"))
    for program in mpiexec.parent.iterdir():
        program.chmod(0o755)
    arguments = [*quick(tmp_path), "--json"]
    job = run(tmp_path, arguments, launcher=[str(mpiexec)], changes=NO_LATE)
    assert not job.timed_out, job.text()
    found = report(job.outputs[0])
    assert "linked with Open MPI" in found["MPI of the launcher"]["seen"], job.text()
    assert found["the ranks meet"]["state"] == "to mend"
