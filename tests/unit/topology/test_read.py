"""Clusters from YAML, with words for what is wrong in them; and what is written as YAML is read as the same cluster."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_ext.commands.plan import app as plan
from hvd_ext.errors import TopologyError
from hvd_ext.topology import read as reader, write
from hvd_ext.topology.tree import SHARED_MEMORY, Link, Node, Tree, from_hosts, leaf

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "topology.md").read_text(encoding="utf-8")
EXAMPLE = textwrap.dedent(reader.__doc__[reader.__doc__.index("    name: cluster") :]) if reader.__doc__ else ""
HOST = "link: {alpha_s: 0, gbit_per_s: 1}\nranks: [0, 1]\n"
IN_HOST, BETWEEN, SLOW = Link(1.5e-6, 4e-10), Link(4e-5, 8.5e-8), Link(4e-5, 1.7e-7)


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(EXAMPLE, encoding="utf-8")
    tree = reader.read(tmp_path / "cluster.yaml", size=5)
    assert tree.hosts() == ((0, 2, 4), (1, 3))
    assert tree.root.link == Link(30e-6, 8 / 10e9)
    assert [(host.name, host.link) for host in tree.root.children] == [
        ("left", Link(5e-6, 5e-10)),
        ("right", Link(5e-6, 5e-10)),
    ]
    with pytest.raises(TopologyError, match="it has 5 ranks and the job has 4; both must be equal"):
        reader.parse(EXAMPLE, size=4)


def blocks(language: str) -> list[str]:
    """Gives the code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def planned(*arguments: str) -> str:
    done = CliRunner().invoke(plan, list(arguments), env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_examples_of_the_page_are_read_and_its_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example, gpus, racks = blocks("yaml")
    Path("cluster.yaml").write_text(example, encoding="utf-8")
    commands = re.findall(r"python -m hvd_ext plan ([^`#\n]*)", PAGE)
    assert len(commands) == 2
    said = [planned(*command.split()) for command in commands]
    shown = re.findall(r"^links: .*$", PAGE, re.MULTILINE)
    assert len(shown) == 1
    assert shown[0] in said[0].splitlines()
    assert "links: between hosts 25gbit each way" in said[1]
    assert reader.read("cluster.yaml", 6).hosts() == ((0, 1, 2, 3), (4, 5))
    Path("cluster.yaml").write_text(gpus, encoding="utf-8")
    assert reader.read("cluster.yaml", 4).hosts() == ((0, 1, 2, 3),)
    assert "in hosts, host memory 64gbit each way and 20 us a message, in hosts, NVLink 1200gbit" in planned(
        "--topology", "cluster.yaml"
    )
    Path("cluster.yaml").write_text(racks, encoding="utf-8")
    assert reader.read("cluster.yaml", 7).hosts() == ((0, 1), (2, 3), (4, 5), (6,))
    assert "links: between racks 10gbit each way and 60 us a message, between hosts 25gbit" in planned(
        "--topology", "cluster.yaml"
    )


def test_the_page_states_the_links_that_are_assumed() -> None:
    said = " ".join(planned("--hosts", "2,2").split())
    for link in ("10gbit each way and 30 us a message", "16gbit"):
        assert link in said
        assert link in " ".join(PAGE.split())
    assert (SHARED_MEMORY.alpha_s, SHARED_MEMORY.beta_s_per_byte) == (2e-6, 1 / 2e9)


def test_the_table_has_every_key_that_a_file_may_have() -> None:
    everything = """
        name: all
        gamma_s_per_byte: 0
        message_s: 0
        selection_s_per_byte: 0
        size_nbytes: [1000, 1.0e+6]
        size_factors: [1, 1.5]
        handover: {alpha_s: 0, gbit_per_s: 1}
        link: {alpha_s: 0, gbit_per_s: 1}
        children:
          - {rank: 0, port: {alpha_s: 0, gbit_per_s: 1}}
          - {link: {alpha_s: 0, beta_s_per_byte: 0}, cores: 1.5, medium: PCIe, ranks: [1]}
    """
    assert reader.parse(everything).size == 2
    rows = {name: (place, takes) for name, place, takes, _ in reader.table()}
    assert rows.keys() == set(re.findall(r"(\w+):", everything))
    assert rows["children"] == ("a node", "a list of nodes, 1 or more")
    assert rows["gbit_per_s"] == ("a link", "a number above 0")
    assert rows["port"] == ("a node", "a link")
    assert rows["handover"] == ("the outermost node", "a link")
    assert rows["gamma_s_per_byte"] == ("the outermost node", "a number, 0 or more")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "it is not YAML"),
        ("name: 2020-13-45", "it is not YAML: month must be in 1..12"),
        ("[" * 1000, "it is not YAML: maximum recursion depth"),
        ("3", "the top level: a node is a mapping with name, link and one of children, ranks, rank"),
        ("name: x", "the top level: a node must have exactly one of children, ranks and rank, got none"),
        (EXAMPLE + "speed: 1\n", "speed: unknown key"),
        (EXAMPLE.replace("gbit_per_s", "gbit"), "link.gbit: unknown key"),
        (EXAMPLE.replace("alpha_s: 30.0e-6, ", ""), "link.alpha_s: missing key"),
        (EXAMPLE.replace(", gbit_per_s: 10", ""), "link: a link must have either beta_s_per_byte or gbit_per_s"),
        (EXAMPLE.replace("30.0e-6", "-1"), "link.alpha_s: .*greater than or equal to 0, got -1"),
        (EXAMPLE.replace("[1, 3]", "[1, two]"), "children.1.ranks.1: .* integer.*, got 'two'"),
        (EXAMPLE.replace("[1, 3]", "[]"), "children.1.ranks: .*at least 1 item"),
        (EXAMPLE.replace("[1, 3]", "[1, -3]"), "children.1: ranks must be 0 or more"),
        (EXAMPLE.replace("[1, 3]", "[1, 2]"), "rank 2 occurs 2 times"),
        (EXAMPLE.replace("[1, 3]", "[1, 4]"), "rank 3 occurs 0 times"),
        (
            EXAMPLE.replace("[1, 3]", "[1, 3]\n    rank: 5"),
            "exactly one of children, ranks and rank, got ranks and rank",
        ),
        (HOST + "size_nbytes: [1]\nsize_factors: [1, 2]", "must have equal lengths; got 1 and 2"),
        (HOST + "size_nbytes: [2, 1]\nsize_factors: [1, 2]", "sizes must be pairs of ascending bytes"),
        (EXAMPLE + "cores: 2\n", r"cores \(2.0\) must be .* only a host"),
        (EXAMPLE.replace("ranks: [1, 3]", "ranks: [1, 3]\n    cores: 0"), "children.1.cores: .*greater than 0"),
        ("ranks: [0]", "a node with children or ranks must have a link"),
        ("rank: 0\nlink: {alpha_s: 0, gbit_per_s: 1}", "a single rank has none"),
        (HOST + "port: {alpha_s: 0, gbit_per_s: 1}", "must not have a port"),
        *((HOST + f"{key}: -1.0", key) for key in ("gamma_s_per_byte", "message_s", "selection_s_per_byte")),
        (
            "link: {alpha_s: 0, gbit_per_s: 8}\nchildren: [{rank: 0}, {gamma_s_per_byte: 1, rank: 1}]",
            r"children\.1\.gamma_s_per_byte: unknown key",
        ),
    ],
)
def test_faults_are_named_with_their_place(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=f"^topology file here.yaml: .*{words}"):
        reader.parse(text, "here.yaml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"none\.yaml: it cannot be read: No such file"):
        reader.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="it is not UTF-8 text"):
        reader.read(tmp_path / "binary.yaml")
    assert issubclass(TopologyError, ValueError)


def host(name: str, *ranks: int, port: Link | None = None) -> Node:
    return Node(name, IN_HOST, tuple(leaf(rank) for rank in ranks), port=port)


@pytest.mark.parametrize(
    "tree",
    [
        from_hosts(["a"]),
        from_hosts(["a", "b", "a"]),
        Tree(Node("c", BETWEEN, (host("a", 0, 2), host("b", 1, 3, port=SLOW)))),
        Tree(
            Node("c", BETWEEN, (host("a", 0, 2), leaf(1, SLOW), leaf(3))),
            *(1e-10, 2e-6, 5e-10, Link(5e-6, 1e-10), ((1e5, 0.5), (1e6, 2.5))),
        ),
        Tree(Node("c", SLOW, (Node("rack", BETWEEN, (host("a", 0), host("b", 1)), port=BETWEEN), host("d", 2)))),
        Tree(Node("h", IN_HOST, (leaf(0), leaf(1, SLOW)))),
    ],
    ids=Tree.describe,
)
def test_a_cluster_is_written_and_read_again(tree: Tree) -> None:
    text = write.text(tree, "two\nlines")
    assert text.startswith("# two\n# lines\n")
    assert reader.parse(text, size=tree.size) == tree


def test_numbers_are_written_with_four_digits() -> None:
    tree = Tree(Node("h", Link(1.23456e-6, 9.87654e-10), (leaf(0), leaf(1))))
    assert reader.parse(write.text(tree)).root.link == Link(1.235e-6, 9.877e-10)
