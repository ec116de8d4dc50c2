"""What a job on several hosts survives: it goes on to the right sums when the trouble has passed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from tests.mpi import jobs
from tests.mpi.faulty import Faulty, running

pytestmark = pytest.mark.cluster

PAIRS = Spec((2, 2), rate="100mbit")


def warned(job: Faulty, rank: int, words: str) -> bool:
    return any(line.startswith("hvd_ext: ") and words in line for line in job.said(rank).splitlines())


def test_a_host_that_is_cut_off_for_a_while_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, PAIRS, HVD_EXT_STALL_WARN_S="1") as job:
        job.wait_for_steps(3)
        job.cluster.cut("h2")
        job.wait(lambda: warned(job, 0, "2 (it does not answer), 3 (it does not answer)"), "a warning")
        for rank in (2, 3):
            job.wait(lambda rank=rank: warned(job, rank, "; rank 0, which finds out who is missing,"), "a warning")
        job.cluster.restore("h2")
        job.wait_for_steps(3)
        job.must_succeed()
        assert not warned(job, 1, "does not answer"), job.text()  # rank 0 has said it


def test_a_link_that_comes_and_goes_does_no_harm(tmp_path: Path) -> None:
    with running(tmp_path, PAIRS, HVD_EXT_STALL_FATAL_S="60") as job:
        job.wait_for_steps(3)
        for _ in range(3):
            job.cluster.cut("h2")
            time.sleep(0.7)  # the trouble itself
            job.cluster.restore("h2")
            job.wait_for_steps(3)
        job.must_succeed()


def test_a_rate_that_drops_to_a_tenth_is_no_stall(tmp_path: Path) -> None:
    # A step takes longer than the limit then: what moves slowly is not taken for what stands still.
    limit_s, nbytes = 2, 3_000_000
    with running(tmp_path, PAIRS, elements=nbytes // 4, HVD_EXT_STALL_WARN_S=str(limit_s)) as job:
        job.wait_for_steps(2)
        job.cluster.set_rate("h2", "10mbit")
        assert nbytes * 8 / 10e6 > limit_s
        job.must_succeed()  # after this step, and one more that is slow from its begin
        assert not any(warned(job, rank, "'sums'") for rank in range(4)), job.text()


def test_a_rank_that_stands_still_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, PAIRS, HVD_EXT_STALL_WARN_S="1") as job:
        job.wait_for_steps(3)
        stopped = job.pids()[3]
        stopped.suspend()
        job.wait(lambda: warned(job, 0, "3 (it does not answer)"), "rank 0 warns")
        stopped.resume()
        job.wait_for_steps(3)
        job.must_succeed()


def test_a_host_without_room_for_shared_memory_takes_part_all_the_same(tmp_path: Path) -> None:
    def fill(cluster: Cluster) -> None:
        subprocess.run([*cluster.enter("h2"), "mount", "-o", "remount,size=64k", "/dev/shm"], check=True)

    with running(tmp_path, PAIRS, prepare=fill) as job:
        job.wait_for_steps(3)
        job.must_succeed()


# The rehearsal's hosts with addresses of IPv6 alone. Open MPI knows networks of IPv6 by their interfaces.
WITH_IPV6 = """
    import sys
    from hvd_ext.__main__ import app
    from hvd_ext.cluster import network

    of_v4 = network.switch_links
    network.SWITCH_ADDRESS = "fd77::ffff"
    network.address = lambda number: f"fd77::{number}"
    network.switch_links = lambda *given: [line.replace("ffff/16 dev core", "ffff/64 dev core nodad") for line in
                                           of_v4(*given)]
    network.host_links = lambda number: ["link set lo up", "link set eth0 up",
                                         f"addr add fd77::{number}/64 dev eth0 nodad"]
    use = ["--mca", "btl_tcp_if_include=eth0", "--mca", "oob_tcp_if_include=eth0,core"]
    app(["cluster", "run", "--hosts", "1,1", *use, "--", *sys.argv[1:]])
"""


def test_hosts_with_addresses_of_ipv6_alone(tmp_path: Path) -> None:
    sums = """
        import os, psutil, socket
        import hvd_ext as hvd
        from hvd_ext.job import runtime

        os.environ["HVD_EXT_TRANSPORT"] = "tcp"  # not the faster one of this moment
        hvd.init()
        assert hvd.allgather_object(hvd.rank()) == [0, 1]
        assert runtime.current().engine.inter_host_transport == "TCP"
        assert not [entry for entry in psutil.net_if_addrs()["eth0"] if entry.family == socket.AF_INET]
    """
    program = tmp_path / "sums.py"
    program.write_text(textwrap.dedent(sums))
    cluster = tmp_path / "cluster.py"
    cluster.write_text(textwrap.dedent(WITH_IPV6))
    jobs.run(tmp_path, [str(cluster), sys.executable, str(program)], ranks=1, launcher=[]).must_succeed()
