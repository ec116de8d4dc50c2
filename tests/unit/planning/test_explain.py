"""What `python -m hvd_ext plan` says: prices, bytes, the winner and why the others lost."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_ext.commands.plan import app, cluster_of, links_line, size_of
from hvd_ext.planning import planner, registry
from hvd_ext.planning.explain import LinkKind, as_json, draw, explain, kinds, links
from hvd_ext.planning.planner import Choice
from hvd_ext.topology.tree import ETHERNET, SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf
from tests.unit.planning.clusters import dense_plans, even_tree, large_tree, one_host, random_tree, sparse_plans

YAML = """\
name: cluster
link: {alpha_s: 30.0e-6, gbit_per_s: 10}
gamma_s_per_byte: 1.0e-10
children:
  - {name: left, link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}, ranks: [0, 2]}
  - {name: right, link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}, ranks: [1, 3, 4]}
"""


@functools.cache
def command(*arguments: str) -> tuple[int, str]:
    """Runs the command; gives its status and all that it prints, with the spaces of tables taken out."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, " ".join(done.output.split())


def test_every_algorithm_is_listed_once_with_the_winner_first() -> None:
    tree, nbytes = from_hosts("aabbb"), 8 << 20
    found = explain(tree, nbytes)
    assert sorted(entry.name for entry in found.entries) == list(registry.names())
    assert found.entries[0].name == found.winner == planner.allreduce_plan(tree, "auto", nbytes).algorithm
    for entry in found.entries:
        if entry.price_s is not None:
            assert entry.price_s == planner.price(tree, entry.name, nbytes).seconds
    assert found.pricing == "the plan as it runs, pipelined, simulated message by message"
    # Of two hosts each sends the buffer once.
    assert found.bound_s == pytest.approx(nbytes * ETHERNET.beta_s_per_byte)
    losers = [entry.price_s for entry in found.entries[1:] if entry.price_s is not None]
    assert losers == sorted(losers)
    written = json.loads(json.dumps(as_json(found)))
    assert [entry["name"] for entry in written["algorithms"]] == [entry.name for entry in found.entries]
    assert [set(load) for load in written["algorithms"][0]["links"]] == [{"kind", "busiest_nbytes", "total_nbytes"}] * 2


def test_each_verdict_says_why() -> None:
    entries = {entry.name: entry for entry in explain(even_tree(4, 8), 8 << 20).entries}
    assert [entry.verdict for entry in entries.values() if entry.verdict.startswith("chosen")] == ["chosen: cheapest"]
    assert " x, first segment +" in entries["ring"].verdict
    assert " x, busiest port +" in entries["recursive_doubling"].verdict
    small = {entry.name: entry for entry in explain(one_host(32), 64).entries}
    assert "rounds" in small["ring"].verdict
    assert small["torus2d"].verdict.startswith("does not apply: a torus has two dimensions")
    assert small["torus2d"].price_s is None


def test_a_tie_is_explained() -> None:
    found = explain(even_tree(3, 2), 8 << 20)
    verdicts = {entry.name: entry.verdict for entry in found.entries}
    assert verdicts["blueconnect"] == "chosen: cheapest"
    assert verdicts["torus2d"] == "a tie within 1%: blueconnect comes first by name, all else being equal"
    assert found.why == planner.allreduce_plan(even_tree(3, 2), "auto", 8 << 20).why
    alone = {entry.name: entry.verdict for entry in explain(one_host(4), 8 << 20).entries}
    assert alone["ring"] == "chosen: within 1% of the cheapest, and simpler"
    assert alone["blueconnect"] == "a tie within 1%: ring is the simplest"


def test_a_choice_for_near_sizes_says_so_where_another_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, nbytes = from_hosts("aabb"), 100_000
    cheapest = planner.allreduce_plan(tree, "auto", nbytes)
    assert next(e.verdict for e in explain(tree, nbytes).entries if e.name == cheapest.algorithm).startswith("chosen")
    worst = planner.allreduce_plan(tree, "recursive_doubling")
    taken = Choice(worst.plan, worst.algorithm, "", cheapest.candidates)
    monkeypatch.setattr(planner, "allreduce_plan", lambda *_: taken)
    entries = {entry.name: entry.verdict for entry in explain(tree, nbytes).entries}
    assert entries["recursive_doubling"] == "chosen: cheapest for 131072 bytes, which stands for all sizes near it"
    assert entries[cheapest.algorithm] == "cheaper"


def test_bytes_are_told_for_each_kind_of_link() -> None:
    """Of n bytes a ring on 3 hosts of 4 sends 2 * 11 / 12 over each port of its way."""
    nbytes = 12 << 20
    entries = {entry.name: entry for entry in explain(even_tree(3, 4), nbytes).entries}
    between, inside = entries["ring"].loads
    assert (between.kind, inside.kind) == ("between hosts", "in hosts")
    assert between.busiest_nbytes == inside.busiest_nbytes == 2 * 11 * nbytes // 12
    assert between.total_nbytes == 2 * 3 * between.busiest_nbytes
    assert entries["blueconnect"].loads[0].busiest_nbytes == 2 * 2 * nbytes // 3


def test_kinds_of_links_have_the_names_of_what_they_join() -> None:
    assert kinds(one_host(3)) == ("in hosts",)
    assert kinds(even_tree(2, 2, 2, 2)) == ("level 4", "between racks", "between hosts", "in hosts")


def host(link: Link, *ranks: int) -> Node:
    return Node("host", link, tuple(leaf(rank) for rank in ranks))


def test_the_links_that_prices_assume_are_told() -> None:
    between, inside = links(from_hosts("aabbb"))
    assert between == LinkKind("between hosts", (8 / ETHERNET.beta_s_per_byte,) * 2, (30e-6, 30e-6))
    assert inside == LinkKind("in hosts", (8 / SHARED_MEMORY.beta_s_per_byte,) * 2, (2e-6, 2e-6))
    assert links(one_host(1)) == ()
    hosts = (host(Link(3e-6, 8e-9), 0, 1), host(Link(2e-6, 2e-9), 2, 3), host(Link(9e-6, 1e-9), 4))
    uneven = Tree(Node("cluster", Link(1e-5, 0.0), hosts))
    assert [(link.kind, link.bits_per_s, link.alpha_s) for link in links(uneven)] == [
        ("between hosts", (None, None), (1e-5, 1e-5)),
        ("in hosts", (pytest.approx(1e9), pytest.approx(4e9)), (2e-6, 3e-6)),  # one rank alone has no link
    ]
    rack = Node("rack", Link(2, 1e-9), (host(Link(1, 1e-9), 0, 1), host(Link(1, 1e-9), 2)))
    deep = Tree(Node("cluster", Link(3, 1e-9), (rack, host(Link(1, 1e-9), 3, 4))))
    wanted = [("between racks", 3), ("between hosts", 2), ("in hosts", 1)]
    assert [(link.kind, link.alpha_s[0]) for link in links(deep)] == wanted
    assert links_line((), None, "1gbit") == "links: none, there is one rank"
    assert (
        links_line(links(uneven), Path("c.yaml"), None)
        == "links: between hosts no limit each way and 10 us a message, in hosts 1gbit to 4gbit each way and 2 to 3 us "
        "a message; from c.yaml"
    )


def test_a_large_cluster_is_priced_level_by_level_and_its_bytes_are_told() -> None:
    found = explain(large_tree(400), 8 << 20)
    assert found.pricing == "the plan as it runs, pipelined, level by level"
    for entry in found.entries:
        assert len(entry.loads) == (3 if entry.price_s is not None else 0)


def test_a_drawing_shows_who_gets_what() -> None:
    lines = draw(planner.allreduce_plan(from_hosts("aabbb"), "flexreduce").plan).splitlines()
    assert lines[0] == "flexreduce: allreduce of 5 ranks, 12 units"
    assert lines[1] == "level 0: reduce, level 0 (2 rounds)"
    assert lines[2] == "  rank   0 |######......| {0 1}"
    assert "  rank   4 |..........##| {1 4}" in lines
    assert lines[-1] == "  rank   4 |############| {2 3 4}"


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_can_be_drawn_and_ends_with_all_ranks_full(seed: int) -> None:
    tree = random_tree(seed, most_leaves=12)
    for plan in [*dense_plans(tree), *sparse_plans(tree)]:
        filled: dict[str, set[int]] = {}
        for rank, bar, _ in (line.split("|") for line in draw(plan).splitlines() if "|" in line):
            filled.setdefault(rank, set()).update(index for index, cell in enumerate(bar) if cell == "#")
            width = len(bar)
        assert len(filled) == (tree.size if plan.levels else 0)
        assert all(cells == set(range(width)) for cells in filled.values()), draw(plan)
    assert draw(planner.all_to_all_plan(tree)).startswith("pairwise: all_to_all")
    assert draw(planner.reduce_scatter_plan(tree)).startswith("ring: reduce_scatter")


def test_the_command_reads_a_topology_draws_and_writes_json(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML, encoding="utf-8")
    status, text = command(
        "--topology", str(tmp_path / "c.yaml"), "--bytes", "8MiB", "--draw", "--json", str(tmp_path / "c.json")
    )
    assert status == 0
    assert "allreduce of 8,388,608 bytes on 5 ranks on 2 hosts (2 + 3)" in text
    assert all(name in text for name in registry.names())
    assert "bound: no allreduce of whole buffers can take less than 6.711 ms" in text
    assert "does not apply: a torus is even" in text
    assert "level 0: reduce" in text
    assert f"in hosts 16gbit each way and 5 us a message; from {tmp_path / 'c.yaml'}" in text
    written = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert written["winner"] == "flexreduce"
    assert len(written["algorithms"]) == len(registry.names())
    assert written["links"][0] == {"kind": "between hosts", "bits_per_s": [1e10, 1e10], "alpha_s": [3e-5, 3e-5]}


LINKS = "links: between hosts 10gbit each way and 30 us a message, in hosts 16gbit each way and 2 us a message"
SAID = [
    ("--hosts 2,2 --rate 100mbit", LINKS.replace("10gbit", "100mbit")),
    ("--hosts 2,2 --rate 100mbit", "; the rate between hosts is that of --rate, all else is assumed"),
    ("--hosts 2,2 --rate 100mbit", "bound: no allreduce of whole buffers can take less than 671.1 ms"),
    ("--hosts 4 --rate 1gbit", "--rate changes nothing, because no link is between hosts"),
    ("--hosts 4", "assumed; a --topology file gives the real ones price"),
    ("--hosts 2,3 --bytes 10000000", "size: choices are made for powers of two of bytes: here for 8,388,608, which"),
    ("--hosts 2,3 --bytes 10000000", "stands for 10,000,000 and all sizes near it; the prices are those of 10,000,000"),
    ("--hosts 2,2 --algorithm ring --draw", "ring: allreduce of 4 ranks"),
    ("--hosts 20,20 --draw", "not drawn: a plan of 40 ranks is too large"),
    ("--preset blueconnect-ibm --bytes 1MiB", "on 8 ranks on 2 hosts (4 + 4)"),
    ("--preset blueconnect-ibm --bytes 1MiB", "from BlueConnect, Section 4.1 and 2.2, Fig. 5 (b)"),
    ("--hosts 2,3 --bytes 4000000 --density 0.01", "here for 4,194,304, which stands for 4,000,000 and all sizes near"),
    ("--hosts 2 --bytes 400 --density 1", "here for 4,096, which stands for 400 and"),
    ("--hosts 2,3 --density 0.01", "allreduce of 8,388,608 bytes at density 0.01 on 5 ranks on 2 hosts (2 + 3)"),
    *(("--hosts 2,3 --density 0.01", name) for name in registry.sparse_names()),
    ("--hosts 2,3 --density 0.01", "where the time of hitopk goes"),
    ("--hosts 2,3 --density 0.01", "hitopk: each host sends (m - 1) K entries, 83,888 bytes, to the others"),
    ("--hosts 2,3 --density 0.01 --draw", "level 2: all-gather of the selected (2 rounds)"),
    ("--hosts 2,3 --density 0.01", "; it is flexreduce, as without TopK dense step: TopK takes it from density"),
    ("--hosts 2,3 --density 0.01", "dense: no dearer from density"),
    ("--hosts 2,3 --density 0.01", LINKS),
    ("--hosts 4 --density 0.1", "dense: no dearer at every density; it is ring, as without TopK"),
    ("--hosts 4 --density 0.1", "dense step: TopK takes it at every density"),
    ("--hosts 4 --density 0.1 --algorithm gtopk", "where the time of gtopk goes"),
]


@pytest.mark.parametrize(("arguments", "words"), SAID)
def test_the_command_says_what_it_assumes_and_where_the_time_goes(arguments: str, words: str) -> None:
    status, text = command(*arguments.split())
    assert status == 0
    assert words in text


@pytest.mark.parametrize("arguments", ["--hosts 2,3 --bytes 8MiB", "--hosts 2,3 --bytes 4MiB --density 0.01"])
def test_a_size_that_stands_for_itself_is_not_told(arguments: str) -> None:
    assert "size: " not in command(*arguments.split())[1]


def test_a_stated_rate_changes_nothing_inside_hosts() -> None:
    tree = cluster_of(None, "2,2", "100mbit")
    assert tree.root.link == Link(ETHERNET.alpha_s, 8e-8)
    assert {host.link for host in tree.root.children} == {SHARED_MEMORY}
    assert cluster_of(None, "2,2", "10gbit") == cluster_of(None, "2,2")


def test_the_help_states_what_is_assumed_and_what_a_rate_changes() -> None:
    text = re.sub(r"[│\s]+", " ", CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output)
    assert "between hosts 10gbit each way and 30 us a message, in hosts 16gbit each way and 2 us a message" in text
    assert "--rate RATE with --hosts: of each host's link to the others, each way, such as 100mbit or 10gbit; " in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("--hosts 2,x", 2, "--hosts 2,x: it lists the ranks of each host"),
        ("", 2, "one of --topology FILE, --hosts"),
        ("--hosts 2,2 --bytes many", 2, "'many' is not a number of bytes"),
        ("--hosts 2,2 --bytes 1.5", 2, "'1.5' is not a whole number of bytes"),
        ("--hosts 2,2 --rate fast", 1, "rate (fast): must be a number above 0 with bit, kbit, mbit or gbit"),
        ("--topology c.yaml --rate 1gbit", 2, "--rate 1gbit: the rates are in the file of --topology"),
        ("--preset blueconnect-ibm --rate 1gbit", 2, "--rate 1gbit"),
        ("--preset no", 1, "preset 'no': must be one of mgwfbp-8, "),
        ("--topology /no/such.yaml", 1, "topology file /no/such.yaml: it cannot be read: No such file"),
        ("--hosts 2,2 --algorithm rings", 1, "did you mean 'ring'?"),
        ("--hosts 2 --algorithm torus2d", 1, "'torus2d' on 2 ranks on 1 host: a torus has two dimensions"),
        ("--hosts 2 --json /no/such/x.json", 1, "--json /no/such/x.json: it cannot be written: No such"),
        ("--hosts 2,2 --density 2", 1, "density (2.0)"),
        ("--hosts 2,2 --density 0.1 --algorithm x", 1, "'x'"),
    ],
)
def test_what_is_wrong_is_said(arguments: str, status: int, words: str) -> None:
    seen, text = command(*arguments.split())
    assert seen == status
    assert words in text
    assert "Traceback" not in text


def test_sizes_are_read_with_their_units() -> None:
    assert [size_of(text) for text in ("0", "64k", "8MiB", "1.5G", "100 B")] == [0, 64000, 8 << 20, 1_500_000_000, 100]
