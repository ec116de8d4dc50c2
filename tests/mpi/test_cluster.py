"""Rehearsed clusters: hosts of their own, limits that hold, several at once, and nothing left however they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.runner.launcher import Job
from tests.mpi.benches import rehearsal
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.cluster

# A rate is measured anew where it is too low, for a busy machine may have kept the processes waiting.
TRIES = 5
# Each rank writes to a file of its own: lines of several ranks mix.
RANK = """
import os, pathlib, sys
rank = os.environ["OMPI_COMM_WORLD_RANK"]
out = open(pathlib.Path(sys.argv[1]) / f"rank{rank}.txt", "w")
"""
# Argument: the receiver's host, or nothing for the receiver. The receiver prints bits per second since the sender's
# begin (all hosts have one clock), without the bursts of the two ends of a link: never more than the limit, and less
# where either of them was kept waiting.
FLOW = """
import socket, struct, sys, time
NBYTES, BURST_NBYTES, WAIT_S = 1_500_000, 16384, 100
if len(sys.argv) > 1:
    begin_s = time.monotonic()
    with socket.create_connection((sys.argv[1], 5001), timeout=WAIT_S) as receiver:
        receiver.sendall(struct.pack("d", begin_s) + bytes(NBYTES))
else:
    with socket.create_server(("", 5001)) as server:
        server.settimeout(WAIT_S)
        print("ready", flush=True)
        sender = server.accept()[0]
    sender.settimeout(WAIT_S)
    got = bytearray()
    while data := sender.recv(65536):
        got += data
    now_s = time.monotonic()
    assert len(got) == 8 + NBYTES
    print(8 * (len(got) - 2 * BURST_NBYTES) / (now_s - struct.unpack("d", got[:8])[0]))
"""
REACHES = """
import socket, sys
with socket.socket() as probe:
    probe.settimeout(2)
    try:
        probe.connect((sys.argv[1], 9))
    except ConnectionRefusedError:
        print("reached")
    except OSError:
        print("not reached")
"""


def bits_per_second(cluster: Cluster, source: str, target: str) -> float:
    """Measures what TCP's payload gets from one host to another."""
    python = [sys.executable, "-c", FLOW]
    receiver = subprocess.Popen([*cluster.enter(target), *python], stdout=subprocess.PIPE, text=True)
    with receiver:
        try:
            assert receiver.stdout.readline() == "ready\n"
            subprocess.run([*cluster.enter(source), *python, target], check=True, timeout=LIMIT_S)
            return float(receiver.stdout.readline())
        finally:
            receiver.kill()


def check_rate(cluster: Cluster, source: str, target: str, limit: float) -> None:
    """Checks that a link carries its limit at most always, and most of it unless the machine was busy elsewhere."""
    seen: list[float] = []
    while len(seen) < TRIES and max(seen, default=0.0) <= 0.7 * limit:
        seen.append(bits_per_second(cluster, source, target))
    assert max(seen) <= limit, seen
    assert max(seen) > 0.7 * limit, seen


def reached(cluster: Cluster, source: str, target: str) -> bool:
    words = [*cluster.enter(source), sys.executable, "-c", REACHES, target]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout == "reached\n"


def test_hosts_have_names_and_shared_memory_of_their_own_and_mpi_joins_them(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: python -m pip install mpi4py")
    program = f"""{RANK}
from mpi4py import MPI
world = MPI.COMM_WORLD
open("/dev/shm/of_rank_" + rank, "w").close()
world.barrier()
files = sorted(name for name in os.listdir("/dev/shm") if name.startswith("of_rank_"))
payload = bytes(range(256)) * 4000  # large enough for single copy within a host, and for a rendezvous between hosts
assert world.bcast(payload if world.rank == 3 else None, root=3) == payload
assert world.allreduce(world.rank) == 6
print(os.uname().nodename, world.size, *files, os.environ["MY_SETTING"], os.getcwd(), file=out)
"""
    outside = set(os.listdir("/dev/shm"))
    with Cluster(Spec((2, 2), rate="100mbit")) as cluster:
        command = [sys.executable, "-c", program, str(tmp_path)]
        assert cluster.mpirun(command, variables={"MY_SETTING": "mine"}, timeout_s=LIMIT_S) == 0
    lines = [(tmp_path / f"rank{rank}.txt").read_text().strip() for rank in range(4)]
    assert (
        lines
        == [f"h1 4 of_rank_0 of_rank_1 mine {os.getcwd()}"] * 2 + [f"h2 4 of_rank_2 of_rank_3 mine {os.getcwd()}"] * 2
    )
    assert not {name for name in set(os.listdir("/dev/shm")) - outside if name.startswith("of_rank_")}


def test_limits_hold_between_hosts_and_racks_and_change_while_it_runs() -> None:
    spec = Spec((1, 1, 1, 1), rate="40mbit", racks=(2, 2), rack_rate="20mbit")
    with Cluster(spec) as cluster:
        check_rate(cluster, "h1", "h2", 40e6)
        check_rate(cluster, "h4", "h3", 40e6)
        check_rate(cluster, "h2", "h3", 20e6)
        check_rate(cluster, "h4", "h1", 20e6)
        cluster.set_rate("h2", "10mbit")
        check_rate(cluster, "h1", "h2", 10e6)
        check_rate(cluster, "h2", "h1", 10e6)
        until(lambda: reached(cluster, "h1", "h2"), "a host is reached")
        cluster.cut("h2")
        assert not reached(cluster, "h1", "h2")
        assert not reached(cluster, "h2", "h1")
        until(lambda: reached(cluster, "h1", "h3"), "another host is reached")
        cluster.restore("h2")
        until(lambda: reached(cluster, "h1", "h2"), "the cable is back")


def test_without_a_rate_there_is_no_limit_until_it_is_set() -> None:
    with Cluster(Spec((1, 1))) as cluster:
        assert any(bits_per_second(cluster, "h1", "h2") > 40e6 for _ in range(TRIES))
        cluster.set_rate("h1", "20mbit")
        check_rate(cluster, "h1", "h2", 20e6)


def test_two_rehearsals_at_once_do_not_meet(tmp_path: Path) -> None:
    # Each rank waits for the other rehearsal's, so both jobs run at the same time.
    program = f"""{RANK}
import time
print("up", file=out, flush=True)
other = pathlib.Path(sys.argv[2])
while not all((other / f"rank{{r}}.txt").exists() for r in (0, 1)):
    time.sleep(0.05)
print(os.uname().nodename, file=out)
"""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with Cluster(Spec((1, 1), rate="10mbit")) as one, Cluster(Spec((1, 1), rate="30mbit")) as two:
        pairs = [(one, *places), (two, *reversed(places))]
        commands = [cluster.command([sys.executable, "-c", program, str(a), str(b)]) for cluster, a, b in pairs]
        with (
            Job(commands[0], tmp_path / "log_a", one.environment()) as first,
            Job(commands[1], tmp_path / "log_b", two.environment()) as second,
        ):
            first.wait(LIMIT_S)
            second.wait(LIMIT_S)
        check_rate(one, "h1", "h2", 10e6)
        check_rate(two, "h1", "h2", 30e6)
    for place in places:
        assert [(place / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["up\nh1\n", "up\nh2\n"]


def test_a_rank_starts_jobs_of_its_own_with_the_launcher_it_was_given(short: Path) -> None:
    inner = f'echo "$(hostname) $OMPI_COMM_WORLD_RANK" > {short}/inner.$OMPI_COMM_WORLD_RANK; test -s $HVD_EXT_TOPOLOGY'
    (short / "inner.sh").write_text(inner)
    outer = f"test $OMPI_COMM_WORLD_RANK = 1 || exit 0; $HVD_EXT_LAUNCHER sh {short}/inner.sh"
    rehearsal(short, "--hosts", "1,2", "--rate", "10mbit", "--", "sh", "-c", outer)
    assert [(short / f"inner.{rank}").read_text() for rank in range(3)] == ["h1 0\n", "h2 1\n", "h2 2\n"]


def test_the_launcher_works_from_outside(short: Path) -> None:
    with Cluster(Spec((1, 1))) as cluster:
        line = cluster.environment()["HVD_EXT_LAUNCHER"]
        (short / "job.sh").write_text(
            f"hostname > {short}/$OMPI_COMM_WORLD_RANK\n"
            f"until [ -s {short}/0 ] && [ -s {short}/1 ]; do sleep 0.05; done\n"
            "[ $OMPI_COMM_WORLD_RANK = 0 ] || exit 4\n"
        )
        done = subprocess.run(
            f"{line} sh {short}/job.sh", shell=True, check=False, timeout=LIMIT_S, capture_output=True
        )
        assert done.returncode == 4, done.stderr
    assert [(short / rank).read_text() for rank in "01"] == ["h1\n", "h2\n"]
