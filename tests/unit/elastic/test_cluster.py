"""An elastic job on two hosts: residuals are divided among the workers that are left, and a cut host is given up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from tests.waiting import ended, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
JOB = Path(__file__).with_name("counting_job.py")
SAMPLES, EPOCHS = 480, 10


def run(
    folder: Path, rate: str, words: list[str], disturb: Callable[[Cluster, Any], None], **variables: str
) -> list[dict[str, Any]]:
    """Runs a job on 2 + 2 workers, and disturbs it when it has made 30 updates; gives what the workers found."""

    def lines(name: str) -> list[dict[str, Any]]:
        text = (folder / "log").read_text() if (folder / "log").exists() else ""
        return [line for one in text.split("\n")[:-1] if name in (line := json.loads(one))]

    with Cluster(Spec((2, 2), rate=rate)) as cluster:
        command = [sys.executable, str(JOB), str(folder), str(SAMPLES), str(EPOCHS), "0.02", *words]
        supervisor = [sys.executable, "-m", "hvd_ext", "run", "-np", "4", "--min-np", "2", "-H", "h1:2,h2:2", "--"]
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(
                [*cluster.enter("h1"), *supervisor, *command],
                env=cluster.environment(HVD_EXT_PROBE="off", HVD_EXT_LINK_LIMIT_S="3", **variables),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(lambda: job.poll() is not None or any(one["updates"] >= 30 for one in lines("updates")), "30 updates")
            disturb(cluster, lines("updates"))
            ended(job, folder / "output")
        finally:
            job.kill()
    return lines("counts")


def check(ends: list[dict[str, Any]]) -> None:
    """Checks that nothing of a residual is lost: each sample was counted in all epochs, and in the one that flushes.

    Each of two divisions of the rest of an epoch may drop 3 samples, one less than there are ranks.
    """
    assert ends
    counts = ends[0]["counts"]
    assert all(end["counts"] == counts for end in ends)
    assert max(counts) == EPOCHS + 1
    assert sum(counts) >= (EPOCHS + 1) * SAMPLES - 2 * 3


def test_a_worker_that_leaves_gives_its_residuals_to_the_others(tmp_path):
    def leave(cluster: Cluster, updates: Any) -> None:
        pid = next(one["pid"] for one in updates if one["rank"] == 3)
        subprocess.run([*cluster.enter(), "kill", "-TERM", str(pid)], check=True)

    ends = run(tmp_path, "1mbit", ["0.05"], leave)
    check(ends)


def test_copies_of_residuals_survive_the_loss_of_a_host(tmp_path):
    ends = run(tmp_path, "1gbit", ["0.05"], lambda cluster, updates: None, DIES="2 3 trains", REDUNDANCY="1")
    output = (tmp_path / "output").read_text(errors="replace")
    assert output.count("lost: ended by SIGKILL") == 2, output
    check(ends)


def test_a_host_that_is_cut_off_is_given_up(tmp_path):
    ends = run(tmp_path, "1gbit", [], lambda cluster, updates: cluster.cut("h2"))
    assert len(ends) == 2
    assert ends[0]["counts"] == ends[1]["counts"]
    assert set(ends[0]["counts"]) == {float(EPOCHS)}
