"""What the benchmark refuses, how many samples it takes, how it starts its jobs, and what it expects of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import hvd_ext.bench
from benchmarks.studies.__main__ import app as studies
from hvd_ext.bench.allreduce import Request
from hvd_ext.bench.expected import Cluster, cluster_of
from hvd_ext.bench.jobs import Launcher, choose, place, wanted
from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.commands.app import App
from hvd_ext.errors import InvalidError, TopologyError
from hvd_ext.topology.tree import from_hosts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": (0,)}, r"ranks \(0\)"),
        ({"sizes": (6,)}, r"bytes \(6\).*multiple of 4"),
        ({"sizes": (0,)}, r"bytes \(0\)"),
        ({"algorithms": ("rings",)}, "'rings'.*auto.*ring.*mpi, horovod, tcp, memory"),
        ({"algorithms": ("ring", "ring")}, "'ring'.*once"),
        ({"hows": ("lazy",)}, "'lazy'.*graph, engine, eager"),
        ({"repetitions": 0}, "repetitions"),
        ({"seconds_per_row": 0.0}, r"seconds per row \(0\)"),
        ({"timeout_s": -1.0}, r"timeout \(-1\)"),
        ({"sizes": ()}, "at least one"),
        ({"algorithms": ()}, "at least one"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Request(**{"ranks": (2,), "sizes": (4,), **changes})


def test_a_thousand_bytes_are_a_multiple_of_four() -> None:
    assert Request(sizes=(1000,)).sizes == (1000,)


@pytest.mark.parametrize(
    ("algorithms", "jobs"),
    [
        (("ring",), ["hvd_ext"]),
        (("mpi",), ["hvd_ext"]),
        (("tcp",), ["hvd_ext"]),
        (("memory",), ["hvd_ext"]),
        (("horovod",), ["Horovod"]),
        (("ring", "horovod"), ["hvd_ext", "Horovod"]),
    ],
)
def test_only_what_is_named_is_measured(
    algorithms: tuple[str, ...], jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_ext.bench.allreduce.has_horovod", lambda: True)
    assert [name for name, _ in Request(sizes=(4,), algorithms=algorithms).jobs] == jobs


def test_long_calls_have_fewer_samples_but_three() -> None:
    request = Request(sizes=(4,), repetitions=30, seconds_per_row=8.0)
    assert [wanted(request, sample_s) for sample_s in (0.005, 1.0, 2.5, 100.0)] == [30, 8, 3, 3]
    assert wanted(Request(sizes=(4,), repetitions=2), 0.005) == 2


def test_what_a_size_needs_is_counted_over_both_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ext.bench.allreduce.has_horovod", lambda: True)
    numpy = Request(sizes=(4,), algorithms=("ring", "mpi"), hows=("engine",)).memory_of(1000)
    tensorflow = Request(sizes=(4,), algorithms=("ring",), hows=("graph",)).memory_of(1000)
    both = Request(sizes=(4,), algorithms=("ring", "horovod"), hows=("graph",)).memory_of(1000)
    assert 1000 <= numpy < tensorflow < both
    measured = Request(sizes=(4,), algorithms=("ring", "mpi", "memory"), hows=("engine",)).memory_of(1000)
    assert measured == numpy + 2000  # the yardstick's own input and result


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "four"], "whole numbers"),
        (["--bytes", "1002"], "multiple of 4"),
        (["--algorithms", "rings"], "rings"),
        (["--json", "/no/such/folder/x.json"], "folder"),
        (["--plot", "/no/such/folder/x.png"], "folder"),
        (["--append"], "--json"),
        (["--rate", "fast"], "100mbit"),
        (["--launcher", "mpirun -np 2", "--ranks", "2"], "launcher says"),
        (["--launcher", "mpirun 'x"], "command line"),
    ],
)
def test_the_command_refuses_in_words_before_it_starts_anything(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(hvd_ext.bench.app, ["allreduce", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


def test_a_file_that_is_no_result_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("mine")
    result = CliRunner().invoke(hvd_ext.bench.app, ["allreduce", "--append", "--json", str(path)])
    assert result.exit_code == 1
    assert path.read_text() == "mine"


def test_of_the_ranks_of_a_job_only_the_first_orchestrates() -> None:
    wrong = ["allreduce", "--bytes", "four"]
    for rank, status in (("3", 0), ("0", 2)):
        environment = {"OMPI_COMM_WORLD_RANK": rank, "HVD_EXT_LAUNCHER": "mpirun -np 4"}
        result = CliRunner().invoke(hvd_ext.bench.app, wrong, env=environment)
        assert (result.exit_code, bool(result.output)) == (status, rank == "0")


def test_a_rank_that_knows_no_launcher_says_what_to_do() -> None:
    result = CliRunner().invoke(
        hvd_ext.bench.app, ["allreduce"], env={"OMPI_COMM_WORLD_RANK": "0", "HVD_EXT_LAUNCHER": ""}
    )
    assert result.exit_code == 1
    assert "--launcher" in result.output


def test_the_option_goes_before_the_environment() -> None:
    environ = {"HVD_EXT_LAUNCHER": "srun -n 4"}
    assert choose(None, environ) == Launcher("srun -n 4")
    assert choose("mpirun -np 2", environ) == Launcher("mpirun -np 2")
    assert choose(None, {}) == Launcher()
    assert (place({}), place({"OMPI_COMM_WORLD_RANK": "3"}), place({"PMI_RANK": "0"})) == (None, 3, 0)


def test_a_launcher_is_read_as_a_shell_reads_it() -> None:
    launcher = Launcher(f"{sys.executable} -m x 'a b' --")
    assert launcher.command(None, ["job", "1"]) == [sys.executable, "-m", "x", "a b", "--", "job", "1"]
    assert launcher.describe() == "python -m x 'a b' --"
    assert Launcher().describe() == "mpirun on this host"
    assert Launcher("python -m hvd_ext.cluster.launch file --").describe() == "python -m hvd_ext.cluster.launch"
    with pytest.raises(InvalidError, match="blank"):
        Launcher("  ")


RATE = 12.5e6


def cluster(*hosts: int, rate: float | None = RATE) -> Cluster:
    names = tuple(f"h{number}" for number, count in enumerate(hosts) for _ in range(count))
    return Cluster(names, from_hosts(names), False, rate)


@pytest.mark.parametrize(
    ("hosts", "algorithm", "share"),
    [
        ((4, 4), "flexreduce", 1.0),
        ((4, 4), "horovod", 1.0),
        ((4, 4), "ring", 2 * 7 / 8),
        ((4, 3, 3), "torus2d", 4 / 3),
        ((4, 3, 3), "ring", 2 * 9 / 10),
        ((4,), "mpi", 2 * 3 / 4),
    ],
)
def test_the_bound_counts_hosts_and_that_of_the_ring_ranks(hosts: Any, algorithm: str, share: float) -> None:
    assert cluster(*hosts).bound_seconds(algorithm, 16_000_000) == pytest.approx(share * 16_000_000 / RATE)


def test_the_rate_on_the_wire_comes_from_the_topology() -> None:
    spec = Spec((3, 2), rate="100mbit")
    hello = {"hosts": ["h1"] * 3 + ["h2"] * 2, "topology": topology(spec)}
    found = cluster_of(hello, None)
    for algorithm in ("flexreduce", "ring"):
        known = cluster(3, 2).bound_seconds(algorithm, 1_000_000)
        assert found.bound_seconds(algorithm, 1_000_000) == pytest.approx(known)
    assert found.ranks_per_host == [3, 2]
    assert cluster_of(hello, 2 * RATE).bound_seconds("mpi", 1_000_000) == pytest.approx(0.5 * 1_000_000 / RATE)


def test_of_racks_the_slowest_link_bounds() -> None:
    spec = Spec((1, 1, 1, 1), rate="100mbit", racks=(2, 2), rack_rate="20mbit")
    hello = {"hosts": ["h1", "h2", "h3", "h4"], "topology": topology(spec)}
    assert cluster_of(hello, None).bound_seconds("blueconnect", 1_000_000) == pytest.approx(1_000_000 / 2.5e6)


def test_without_a_rate_there_is_no_bound() -> None:
    assert cluster(2, 2, rate=None).bound_seconds("ring", 4) is None
    hello = {"hosts": ["h1"] * 2, "topology": topology(Spec((2,)))}
    assert cluster_of(hello, None).bound_seconds("ring", 4) is None


def test_what_does_not_apply_is_known_with_its_reason() -> None:
    assert cluster(3, 2).refusal("torus2d")
    assert cluster(2, 2).refusal("torus2d") is None
    assert cluster(3, 2).refusal("auto") is cluster(3, 2).refusal("mpi") is None


def test_between_hosts_the_yardstick_is_tcp_and_in_one_host_memory() -> None:
    assert cluster(3, 2).refusal("tcp") is cluster(4).refusal("memory") is None
    assert "there is one host" in (cluster(4).refusal("tcp") or "")
    assert "one host" in (cluster(3, 2).refusal("memory") or "")
    racks = topology(Spec((1, 1, 1, 1), rate="100mbit", racks=(2, 2)))
    assert "racks" in (cluster_of({"hosts": ["h1", "h2", "h3", "h4"], "topology": racks}, None).refusal("tcp") or "")


def test_only_plans_have_a_price() -> None:
    seconds, nbytes = cluster(2, 2).predicted("flexreduce", 1_000_000)
    assert seconds is not None and seconds > 0
    assert nbytes == pytest.approx(1_000_000)  # over each link between two hosts
    assert cluster(2, 2).predicted("mpi", 1_000_000) == (None, None)


def test_a_topology_of_another_job_is_refused() -> None:
    with pytest.raises(TopologyError, match="3"):
        cluster_of({"hosts": ["h1", "h2"], "topology": topology(Spec((2, 1)))}, None)


@pytest.mark.parametrize("app", [hvd_ext.bench.app, studies], ids=["bench", "studies"])
def test_a_command_that_a_launcher_starts_on_all_ranks_is_done_by_rank_0(app: App) -> None:
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert len(names) > 4
    for name in names:
        for rank, status in (("1", 0), ("0", 2)):  # there is no such option
            ended = CliRunner().invoke(app, [name, "--no-such-option"], env={"OMPI_COMM_WORLD_RANK": rank})
            assert ended.exit_code == status, (name, rank, ended.output)
