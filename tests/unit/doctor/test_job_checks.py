"""The doctor of a job: each usual fault is named in words, with its mend, from what the ranks say."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ext.doctor import checks, job_checks, job_facts
from hvd_ext.doctor.checks import Finding, State
from hvd_ext.doctor.job_checks import judge, ranks
from hvd_ext.doctor.job_facts import Facts

OPEN_MPI = {"said": "Open MPI v4.1.8, package: Open MPI", "mapped": ["/venv/lib/libmpi.so.40"]}
MPICH = {"said": "MPICH Version:      5.0.2", "mapped": ["/usr/lib/libmpi.so.12"]}
DONE = {"nbytes": 4 << 20, "seconds": 0.002, "algorithm": "ring", "wrong": 0}
MPIRUN = "Open MPI 4.1.8: /venv/bin/mpirun"


def answer(rank: int, host: str = "h1", mpi: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """What a rank of a healthy job says, but for some changes."""
    number = {"h1": 1, "h2": 2}[host]
    facts = Facts(rank, rank, host, "Open MPI's mpirun, OMPI_COMM_WORLD_SIZE=2", "", 2)
    facts.mpirun = MPIRUN if rank == 0 else ""
    facts.python = "3.11.7 at /venv/bin/python"
    facts.hvd_ext, facts.keras = "0.1.0 at /venv/hvd_ext, built of abc", "3.15.1"
    facts.tensorflow = "2.21.0 at /venv/tensorflow"
    facts.networks = [["docker0", "172.17.0.1/16"], ["eth0", f"10.0.0.{number}/24"]]
    facts.cores, facts.shm = [8, 8], [1 << 30, 1 << 30]
    return {**dataclasses.asdict(facts), "mpi": OPEN_MPI if mpi is None else mpi, **changes}


def two(**changes: Any) -> list[dict[str, Any]]:
    """Two hosts of one rank each; the changes are those of the second."""
    return [answer(0), answer(1, "h2", **changes)]


def met(answers: list[dict[str, Any]], **changes: Any) -> list[Finding]:
    return judge({"answers": answers, "rank": 0, "allreduce": {**DONE, **changes}})


def apart(answers: list[dict[str, Any]], error: str) -> list[Finding]:
    return judge({"answers": answers, "error": error})


def of(findings: list[Finding], part: str) -> Finding:
    return next(finding for finding in findings if finding.part == part)


def test_a_healthy_job_is_well() -> None:
    findings = met(two())
    assert checks.can_train(findings)
    assert {finding.state for finding in findings} == {State.OK}
    assert of(findings, job_checks.MEET).seen == "2 ranks on 2 hosts: h1: rank 0; h2: rank 1"
    assert "4 MiB over 2 ranks in 2 ms: 2,000 MiB a second" in of(findings, "allreduce").seen
    assert of(findings, "network").seen == "in common: 10.0.0.0/24"  # docker0 has one address on all hosts


GONE = {"part": "native libraries", "state": "to mend", "seen": "gone", "mend": "build"}
WRONG = [
    ("TensorFlow", two(tensorflow="2.20.0 at /venv/tensorflow"), r"2.21.0 (rank 0); 2.20.0 (rank 1)"),
    ("TensorFlow", two(tensorflow=""), "2.21.0 (rank 0); nothing (rank 1)"),
    ("Keras", two(keras="3.8.0"), "3.15.1 (rank 0); 3.8.0 (rank 1)"),
    ("hvd_ext", two(hvd_ext="0.1.0 at /venv/hvd_ext, built of def"), "built of def (rank 1)"),
    ("MPI library", two(mpi={**OPEN_MPI, "said": "Open MPI v5.0.11"}), "Open MPI 5.0.11 (rank 1)"),
    ("mixed MPI libraries", two(mpi={**OPEN_MPI, "mapped": ["/a/libmpi.so.40", "/b/libmpi.so.12"]}), "rank 1 has seve"),
    ("mixed MPI libraries", two(mpi={**OPEN_MPI, "mapped": ["/a/libmpi.so.40", "/b/libmpi.so.40"]}), "/b/libmpi.so.40"),
    ("GPUs", [answer(0, gpus=1), answer(1)], "host h1: 1 for 2 ranks"),
    ("native libraries", two(findings=[GONE]), "gone (host h2)"),
]
OPTIONAL = [
    ("cores", [answer(rank, cores=[2, 2]) for rank in range(3)], "3 ranks, 2 cores: the ranks take turns"),
    ("cores", [answer(rank, cores=[1, 8]) for rank in range(2)], "each rank is bound to 1"),
    ("GPUs", [answer(0, gpus=4), answer(1)], "4 for 2 ranks: 2 idle"),
    ("shared memory", [answer(0, shm=[8 << 20, 64 << 20]), answer(1)], "8 MiB free of 64 MiB, MPI may need 32 MiB"),
    ("locked memory", two(memlock=65536), "host h2 has an RDMA fabric, and a process may lock 64 KiB only"),
    ("network", two(networks=[["eth0", "10.9.0.1/24"]]), "no network in common: h1: docker0"),
    ("mixed MPI libraries", two(peers={"Horovod": "libmpi.so.12"}), "Horovod is built for MPICH (libmpi.so.12)"),
    ("mixed MPI libraries", two(peers={"mpi4py": "MPICH 4.3"}), "mpi4py is built for MPICH"),
    ("Horovod's variables", two(variables=[["HOROVOD_CYCLE_TIME=3", "there are no cycles"]]), "HOROVOD_CYCLE_TIME=3"),
    ("Python", two(python="3.11.9 at /venv/bin/python"), "3.11.7 (rank 0); 3.11.9 (rank 1)"),
]


ROWS = [(State.WRONG, *row) for row in WRONG] + [(State.OPTIONAL, *row) for row in OPTIONAL]


@pytest.mark.parametrize(("state", "part", "answers", "words"), ROWS, ids=[f"{row[1]} {row[3][:12]}" for row in ROWS])
def test_what_keeps_a_job_from_training_is_to_mend_and_what_costs_time_is_optional(state, part, answers, words) -> None:
    findings = met(answers)
    finding = next(finding for finding in findings if finding.part == part and finding.state is not State.OK)
    assert finding.state is state
    assert words in finding.seen
    assert finding.mend or state is State.OPTIONAL
    assert checks.can_train(findings) == (state is State.OPTIONAL)


@pytest.mark.parametrize(
    ("answers", "part", "words"),
    [
        (two(tensorflow="2.21.0 at /other/tensorflow"), "TensorFlow", "in several folders"),
        ([answer(0, gpus=2), answer(1)], "GPUs", ""),
        (two(heeded=["HOROVOD_TIMELINE=t: HVD_EXT_TRACE"]), "Horovod's variables", "HOROVOD_TIMELINE=t"),
    ],
)
def test_what_may_differ_or_be_set_is_well(answers: list[dict[str, Any]], part: str, words: str) -> None:
    finding = of(met(answers), part)
    assert finding.state is State.OK
    assert words in finding.seen


def test_horovods_own_optimizer_gets_a_note_and_gpus_that_the_launcher_deals_out_none() -> None:
    assert "does not synchronise under Keras 3" in of(met(two(horovod="0.28.1")), "Horovod").seen
    answers = [answer(0, gpus=1, visible="0"), answer(1, visible="1")]
    assert "GPUs" not in {finding.part for finding in met(answers)}


def test_a_wrong_sum_is_to_mend() -> None:
    assert of(met(two(), wrong=3), "allreduce").state is State.WRONG


def test_the_mpirun_of_another_mpi_is_named_before_what_comes_of_it() -> None:
    other = "MPICH's mpiexec, or another one that speaks PMI, PMI_SIZE=2"
    findings = apart([answer(0, launcher=other, mpirun="MPICH 5.0.2: /usr/bin/mpiexec")], "started 2, sees 1")
    finding = of(findings, "MPI of the launcher")
    words = "of MPICH 5.0.2: /usr/bin/mpiexec, the native library of rank 0 is linked with Open MPI 4.1.8"
    assert words in finding.seen
    assert "take the mpirun of Open MPI 4.1.8" in finding.mend
    assert findings[-1].part == job_checks.MEET
    # Open MPI's launcher on a host where it is not among the ancestors, and a library of MPICH
    assert of(apart([answer(1, mpi=MPICH)], "x"), "MPI of the launcher").state is State.WRONG


def test_a_launcher_that_starts_no_mpi_job_is_refused_in_inits_words() -> None:
    findings = apart([answer(0, refused="launcher (horovodrun with Gloo): no MPI job")], "the same")
    seen, mend = (
        "launcher (horovodrun with Gloo): no MPI job",
        "start it with horovodrun --mpi -np N, or with mpirun -np N",
    )
    assert of(findings, "launcher") == Finding("launcher", State.WRONG, seen, mend)
    assert "not tried" in of(findings, job_checks.MEET).seen
    assert not {"network", "cores"} & {finding.part for finding in findings}


def test_under_srun_the_mend_is_its_option() -> None:
    findings = apart([answer(0, launcher="srun, SLURM_STEP_NUM_TASKS=2", mpirun="")], "sees 1")
    assert "srun --mpi=pmix" in of(findings, job_checks.MEET).mend


V4 = ["eth0", "10.0.0.1/24"], ["eth0", "10.0.0.2/24"]
V6 = ["eth0", "fd77::1/64"], ["eth1", "fd77::2/64"]
APART = ["eth0", "10.0.0.1/24"], ["eth0", "10.9.0.1/24"]
MEND_V4 = "mpirun --mca btl_tcp_if_include 10.0.0.0/24"
MEND_V6 = "mpirun --mca btl_tcp_if_include eth0,eth1"


@pytest.mark.parametrize(
    ("networks", "option", "met", "state", "words"),
    [
        (V4, "include=docker0", False, State.WRONG, MEND_V4),
        (V4, "exclude=lo,eth0", False, State.WRONG, MEND_V4),
        (V4, "exclude=10.0.0.0/8", False, State.WRONG, MEND_V4),
        (V4, "include=eth0", False, State.OK, "in common: 10.0.0.0/24"),
        (V4, "include=10.0.0.0/24", False, State.OK, "in common: 10.0.0.0/24"),
        (V4, "exclude=docker0", False, State.OK, "in common: 10.0.0.0/24"),
        (APART, "", False, State.WRONG, "h2: docker0 172.17.0.1/16, eth0 10.9.0.1/24"),
        (V6, "", True, State.OK, "in common: fd77::/64"),
        (V6, "include=eth0,eth1", True, State.OK, "in common: fd77::/64"),
        (V6, "", False, State.WRONG, "built with --enable-ipv6"),
        (V6, "include=fd77::/64", False, State.WRONG, MEND_V6),
        (V6, "include=10.0.0.0/24", False, State.WRONG, MEND_V6),
    ],
)
def test_the_network_that_hosts_have_in_common_is_named_or_the_one_to_take(
    networks: Any, option: str, met: bool, state: State, words: str
) -> None:
    name, _, interfaces = option.partition("=")
    tcp = {f"btl_tcp_if_{name}": interfaces} if name else {}
    docker = ["docker0", "172.17.0.1/16"]  # has one address on all hosts
    hosts = zip(("h1", "h2"), networks, strict=True)
    answers = [answer(rank, host, tcp=tcp, networks=[docker, card]) for rank, (host, card) in enumerate(hosts)]
    finding = job_checks.network(answers, met=met)
    assert finding.state is state
    assert words in f"{finding.seen} {finding.mend}"


def test_the_end_of_mpi_is_told_in_our_words_or_in_its_own() -> None:
    ours = job_checks.end_of_meeting(["hvd_ext: init() has waited 5 s: rank 1 has not called init()"], 1, 5)
    assert ours == "init() has waited 5 s: rank 1 has not called init()"
    assert job_checks.end_of_meeting(["no route"], 1, 5) == "MPI ended the process: no route"
    assert "within 5 s" in job_checks.end_of_meeting([], -9, 5)


def test_ranks_are_named_in_spans() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_mpi_libraries_are_found_in_the_map_of_a_process_and_in_a_file_that_asks_for_them() -> None:
    maps = """7f00-7f10 r-xp 00000000 08:01 123    /opt/my mpi/lib/libmpi.so.40.30.8
7f10-7f20 r--p 00000000 08:01 123    /opt/my mpi/lib/libmpi.so.40.30.8
7f20-7f30 r-xp 00000000 08:01 124    /usr/lib/libmpich.so.12
7f30-7f40 r-xp 00000000 08:01 125    /usr/lib/libompitrace.so.40
7f40-7f50 rw-p 00000000 00:00 0
"""
    assert job_facts.mapped(maps) == ["/opt/my mpi/lib/libmpi.so.40.30.8", "/usr/lib/libmpich.so.12"]
    families = [job_facts.family(name) for name in ("libmpi.so.40", "libmpi.so.12", "libmpi.so")]
    assert families == ["Open MPI", "MPICH", ""]
    assert job_facts.NEEDED.search(b"\x7fELF\0libm.so.6\0libmpi.so.40\0libc.so.6\0")[1] == b"libmpi.so.40"
    assert job_facts.NEEDED.search(b"\x7fELF\0libmpi.so\0") is None


def test_the_launcher_is_the_outermost_ancestor_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "HYDRA build details: Version: 5.0.2"
    monkeypatch.setattr(job_facts.child, "version_line", lambda command, environ, timeout_s: f"{said} {command[0]}")
    programs = ["/bin/bash", "/opt/hydra_pmi_proxy", "/opt/mpiexec.hydra", "/bin/bash"]
    assert job_facts.started_by(programs) == "MPICH 5.0.2: mpiexec"
    assert job_facts.started_by(["/bin/bash", ""]) == ""
    monkeypatch.setattr(job_facts.child, "version_line", lambda *given, timeout_s: "mpirun (Open MPI) 4.1.8")
    assert job_facts.started_by(["/venv/bin/orterun_wrapper"]) == "Open MPI 4.1.8: mpirun"


def test_the_loopback_and_what_is_down_lead_nowhere() -> None:
    def made(ip: str, mask: str) -> SimpleNamespace:
        family = job_facts.socket.AF_INET6 if ":" in ip else job_facts.socket.AF_INET
        return SimpleNamespace(family=family, address=ip, netmask=mask)

    wide = "ffff:ffff:ffff:ffff::"
    cards = {
        "lo": [made("127.0.0.1", "255.0.0.0"), made("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
        "eth0": [made("10.1.2.3", "255.255.0.0"), made("fd77::3", wide), made("fe80::3%eth0", wide)],
        "ib0": [made("1.2.3.4", "255.0.0.0")],
    }
    assert job_facts.networks(cards, {"lo", "eth0"}) == [["eth0", "10.1.2.3/16"], ["eth0", "fd77::3/64"]]
