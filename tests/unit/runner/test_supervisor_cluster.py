"""An elastic job on rehearsed hosts: the supervisor reaches them by the cluster's remote shell."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.cluster


def test_workers_run_on_the_hosts_of_a_rehearsed_cluster() -> None:
    with Cluster(Spec((1, 2))) as cluster:
        words = [*cluster.enter("h1"), sys.executable, "-m", "hvd_ext", "run", "-np", "3", "-H", "h1:1,h2:2", "--"]
        done = subprocess.run(
            [*words, "hostname"],
            env=cluster.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == ["[worker 0] h1", "[worker 1] h2", "[worker 2] h2"]
    assert "elastic job: 3 workers (2 to 3) on 2 hosts: h1 (1), h2 (2)" in done.stderr
