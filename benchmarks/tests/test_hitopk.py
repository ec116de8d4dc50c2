"""The hitopk benchmark without jobs: names, the mass of sums, what is expected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.studies.hitopk import results as told
from benchmarks.studies.hitopk.expected import BETWEEN, host_bytes, link_rate, simulated
from benchmarks.studies.hitopk.jobs import groups_of, row_of
from benchmarks.studies.hitopk.names import DEFAULT, Name, names_of
from benchmarks.studies.hitopk.sampling import Gradient, Mass, shares_of, wire_bytes
from hvd_ext.bench.expected import Cluster
from hvd_ext.cluster.spec import Spec, topology
from hvd_ext.errors import InvalidError
from hvd_ext.planning.explain_sparse import inter_host_nbytes
from hvd_ext.topology.read import parse


class Alone:
    """All ranks, where there is one, and answers of others if a test says so."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def cluster(hosts: tuple[int, ...] = (2, 1), rate: str = "100mbit") -> Cluster:
    names = tuple(f"h{place}" for place, count in enumerate(hosts) for _ in range(count))
    return Cluster(names, parse(topology(Spec(hosts, rate=rate))), True)


def sample(seconds: float, levels: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    counts = {"wire_bytes": [1000, 1000, 900], "entries": 200, "entry_bytes": 700, "wrong": []}
    return {"index": 0, "seconds": seconds, "levels": levels or {}, **counts, **more}


def facts(name: str) -> dict[str, Any]:
    return {"algorithm": name, "how": "engine", "chosen": "", "segment_bytes": 64, "facts": {}, "wrong": []}


def test_every_name_of_the_default_is_read():
    names = names_of(tuple(DEFAULT.split(",")))
    assert names[1] == Name("hitopk@0.01:fp16", "hitopk", 0.01, "fp16")
    assert names[1].wire_dtype == "float16"
    assert {name.algorithm for name in names} >= {
        "naive_allgather",
        "gtopk",
        "torus2d",
        "flexreduce",
        "tree",
        "horovod",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hitop@0.1", "'hitop'.*hitopk"),
        ("hitopk", "a density is needed"),
        ("ring@0.1", "no density"),
        ("hitopk@none", "above 0"),
        ("hitopk@0", "above 0"),
        ("hitopk@1.5", "at most 1"),
        ("ring:fp8", "fp16"),
        ("mpi:fp16", "mpi has none"),
        ("horovod:bf16", "for ours"),
    ],
)
def test_a_wrong_name_is_refused_in_words(text: str, words: str):
    with pytest.raises(InvalidError, match=words):
        Name.read(text)


def test_contestants_are_measured_in_groups_that_fit_into_memory():
    names = ["hitopk@0.1", "naive_allgather@0.1", "mpi", "tree", "horovod"]
    assert groups_of(names, 100, 1e9) == [names]
    # four buffers are there anyway; 2 + 3.5 fit beside them, 1.5 + 3 too
    assert groups_of(names, 100, 400 * 9.5) == [names[:3], names[3:]]
    assert groups_of(names, 100, 0) == [[name] for name in names[:3]] + [["tree"], ["horovod"]]
    assert groups_of([], 100, 0) == []


def test_a_sparse_sum_must_keep_what_it_does_not_send_and_have_no_more_than_was_selected():
    gradient, kept = Gradient(0, 50), [0.0]
    mass = Mass(gradient, residual=lambda: kept[0], most=3)
    sent = np.zeros(50, np.float32)
    place = int(np.flatnonzero(gradient.values)[0])
    sent[place] = gradient.values[place]
    kept[0] = gradient.total() - sent.sum()
    assert mass.fault(sent, Alone()) == ""
    kept[0] += gradient.total()
    assert mass.fault(np.zeros(50, np.float32), Alone()) == ""
    # nothing is added to what is kept: a gradient is lost
    assert "of 3 steps add up to" in mass.fault(np.zeros(50, np.float32), Alone())
    assert "must be 3 at most" in Mass(gradient, residual=lambda: 0.0, most=3).fault(gradient.values, Alone())


def test_a_dense_sum_must_be_right_and_equal_on_all_ranks():
    gradient, other = Gradient(0, 50), Gradient(1, 50)
    assert not np.array_equal(gradient.values, other.values)
    assert np.array_equal(gradient.values, np.rint(gradient.values))  # so that sums are exact
    mine, right = gradient.values, Mass(gradient)
    assert right.fault(mine, Alone()) == ""
    wrong = mine.copy()
    wrong[7] += 1
    assert right.fault(wrong, Alone()).startswith("element 7 is")
    assert right.fault(mine, Alone((1, 0.0, 0.0, mine))) == "the ranks have different results"
    assert "shape" in right.fault(mine[:-1], Alone())
    rounded = Mass(gradient, exact=False)
    assert rounded.fault(mine.astype(np.float16).astype(np.float32), Alone()) == ""


def test_the_times_of_levels_add_up_to_the_step():
    levels = SimpleNamespace(names=("reduce", "select", "reduce"), ends=(2, 3, 5))
    times = [(0, 100, 200), (1, 200, 350), (2, 350, 360), (3, 360, 500), (4, 450, 900)]
    rounds = [SimpleNamespace(round=number, begin_ns=begin, end_ns=end) for number, begin, end in times]
    shares = shares_of(rounds, levels)
    assert shares == pytest.approx({"reduce": 790e-9, "select": 10e-9})


def test_the_bytes_of_a_link_are_read_from_the_kernels_table(tmp_path: Path):
    table = tmp_path / "dev"
    head = "Inter-|   Receive |  Transmit\n face |bytes packets | bytes packets\n"
    table.write_text(head + "    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0: 11 0 0 0 0 0 0 0 4242 7 0 0 0 0 0 0\n")
    assert wire_bytes("eth0", str(table)) == 4242
    assert wire_bytes("eth1", str(table)) == 0
    assert wire_bytes("eth0", str(tmp_path / "none")) == 0


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (4, 3, 3)])
def test_the_bytes_between_hosts_are_those_of_the_planner(hosts: tuple[int, ...]):
    place = cluster(hosts)
    seen = host_bytes(place, Name.read("hitopk@0.013"), 1003, 3.5)
    assert seen == inter_host_nbytes(len(hosts), 1003, 0.013, 3.5) == (len(hosts) - 1) * 13 * 3.5
    # a flat sum sends each selection to each rank of other hosts
    assert host_bytes(cluster((2, 1)), Name.read("naive_allgather@0.1"), 100, 4.0) == 2 * 1 * 10 * 4.0
    assert host_bytes(place, Name.read("gtopk@0.1"), 100, 4.0) is None
    assert host_bytes(place, Name.read("flexreduce:fp16"), 1000) == 2 * (len(hosts) - 1) / len(hosts) * 2000


def test_a_row_has_the_floor_of_its_own_steps():
    place = cluster()
    levels = {"reduce-scatter in hosts": 0.01, "select": 0.02, BETWEEN: 0.5, "all-gather in hosts": 0.03}
    row = row_of(place, 100_000, facts("hitopk@0.01"), [sample(0.7, levels), sample(0.9, levels), sample(0.8, levels)])
    rate = link_rate(place)
    assert rate == pytest.approx(100e6 / 8)
    assert row["seconds_median"] == 0.8
    assert row["entry_bytes"] == 3.5
    assert row["inside_seconds"] == pytest.approx(0.06)
    assert row["floor_seconds"] == pytest.approx(1000 * 3.5 / rate + 0.06)
    assert row["predicted_seconds"] > 0
    assert row["correct"] is True
    dense = row_of(place, 100_000, facts("flexreduce"), [sample(0.5, entries=0, entry_bytes=0, wrong=["rank 1: bad"])])
    assert dense["floor_seconds"] == pytest.approx(400_000 / rate)
    assert (dense["correct"], dense["wrong"]) == (False, ["rank 1: bad"])


def rows() -> list[dict[str, Any]]:
    place = cluster()
    found = [simulated(place, Name.read(name), size) for name in ("hitopk@0.01", "tree") for size in (1000, 100_000)]
    levels = {"select": 0.02, BETWEEN: 0.5}
    measured = row_of(place, 1000, facts("hitopk@0.01"), [sample(0.7, levels)])
    return [*(row for row in found if row is not None), measured, row_of(place, 1000, facts("horovod"), [sample(1.4)])]


def test_simulated_rows_are_marked_and_need_a_plan():
    found = rows()
    assert [row["simulated"] for row in found] == [True] * 4 + [False] * 2
    assert sum(found[1]["levels_seconds"].values()) == pytest.approx(found[1]["predicted_seconds"])
    assert simulated(cluster(), Name.read("horovod"), 10) is None
    assert simulated(cluster((3, 2)), Name.read("torus2d"), 10) is None


def test_each_kind_of_plot_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    for kind in told.KINDS:
        told.draw(rows(), tmp_path / f"{kind}.png", kind)
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
