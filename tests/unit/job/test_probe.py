"""When a job measures its links, how it says and draws what they are, and what of it the next job takes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_ext.commands.probe import Allreduce, app, draw
from hvd_ext.errors import InvalidError
from hvd_ext.job import network, probe_cache, process
from hvd_ext.options import Options
from hvd_ext.topology.fit import Curve
from hvd_ext.topology.tree import Link, Node, Tree, from_hosts, leaf
from tests.unit.drawing import assert_readable


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        (Options(), 2, True),
        (Options(), 1, False),
        (Options(probe="off"), 2, False),
        (Options(probe="refresh"), 2, True),
        (Options(algorithm="ring"), 2, True),
        (Options(algorithm="ring", replan_every=0), 2, False),
        (Options(algorithm="ring", buckets=__file__), 2, False),
        (Options(topology="file.yaml"), 2, False),
    ],
)
def test_a_job_measures_if_something_is_left_to_choose(options: Options, size: int, expected: bool) -> None:
    assert network.wanted(options, size) is expected


def test_links_are_described_in_one_line() -> None:
    assert network.describe(from_hosts(["a", "a"])) == "in hosts 16 Gbit/s and 2 us"
    fast, slow = Link(4e-5, 8e-8), Link(4e-5, 16e-8)
    hosts = [
        Node(name, Link(1e-6, 1e-9), (leaf(rank),), port=port)
        for rank, (name, port) in enumerate([("a", None), ("b", None), ("c", slow)])
    ]
    tree = Tree(Node("cluster", fast, tuple(hosts)))
    assert network.describe(tree) == "between hosts 100 Mbit/s and 40 us (c: 50 Mbit/s)"


HOSTS = ("a", "a", "b")
NODES = (Node("a", Link(1e-6, 1e-9), (leaf(0), leaf(1))), Node("b", Link(1e-6, 1e-9), (leaf(2),)))
TREE = Tree(Node("cluster", Link(4e-5, 8e-8), NODES))
KEY = probe_cache.key_of(HOSTS, Options(), "TCP", None)
LOOKED = {"in hosts, both 524288": 1.5e-3, "look": 0.25}


def the_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_a_measurement_is_found_again(tmp_path: Path) -> None:
    where = tmp_path / "made" / "here"
    assert probe_cache.find(KEY, where) is None
    assert probe_cache.keep(KEY, TREE, LOOKED, where)
    found = probe_cache.find(KEY, where)
    assert found is not None
    assert (found.tree, found.looked) == (TREE, LOOKED)
    assert the_file(where).name.startswith("network-")


@pytest.mark.parametrize(
    "other",
    [
        probe_cache.key_of(("a", "b", "a"), Options(), "TCP", None),
        probe_cache.key_of(("a", "a"), Options(), "TCP", None),
        probe_cache.key_of(HOSTS, Options(), "MPI", None),
        probe_cache.key_of(HOSTS, dataclasses.replace(Options(), shared_memory=False), "TCP", None),
    ],
)
def test_other_hosts_and_transports_have_their_own(other: dict[str, Any], tmp_path: Path) -> None:
    assert probe_cache.keep(KEY, TREE, LOOKED, tmp_path)
    assert probe_cache.find(other, tmp_path) is None


def changed(**values: Any) -> Any:
    return lambda text: json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        changed(version=probe_cache.VERSION + 1),
        changed(key={**KEY, "hosts": ["c"]}),
        changed(topology="link: {alpha_s: 1}"),
        changed(topology="link: {alpha_s: 1, gbit_per_s: 1}\nranks: [0, 1]"),
        changed(topology=7),
        changed(looked=7),
        changed(looked={"look": "soon"}),
    ],
)
def test_a_torn_file_or_one_of_another_version_does_not_count(spoil: Any, tmp_path: Path) -> None:
    assert probe_cache.keep(KEY, TREE, LOOKED, tmp_path)
    path = the_file(tmp_path)
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert probe_cache.find(KEY, tmp_path) is None
    assert probe_cache.keep(KEY, TREE, LOOKED, tmp_path)
    assert probe_cache.find(KEY, tmp_path) is not None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert not probe_cache.keep(KEY, TREE, LOOKED, tmp_path / "file" / "folder")
    assert probe_cache.find(KEY, tmp_path / "file" / "folder") is None


def test_the_folder_is_that_of_the_options_or_the_users() -> None:
    assert probe_cache.folder(Options(cache="/x"), {}) == Path("/x")
    assert probe_cache.folder(Options(), {"XDG_CACHE_HOME": "/y"}) == Path("/y/hvd_ext")
    assert probe_cache.folder(Options(), {"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "hvd_ext"


TIMES = [Allreduce(nbytes, "ring", 1e-3 + nbytes * 1e-9, 1.1e-3 + nbytes * 1e-9) for nbytes in (1 << 14, 1 << 18)]
CURVES = [
    Curve(name, ((1e3, 2e-4), (1e6, 9e-2)), Link(1.1e-4, 8e-8))
    for name in ("between hosts", "a port of first", "a port of second")
]


def test_the_plot_has_a_panel_for_each_curve_with_its_line_in_the_title(tmp_path: Path, seen: list[Any]) -> None:
    draw(tmp_path / "x.png", TIMES, CURVES, "4 ranks on 2 hosts")
    assert_readable(seen[0])
    titles = [axis.get_title() for axis in seen[0].axes]
    assert titles[0].startswith("allreduce: ")
    assert titles[1] == "between hosts: 110 us + 80 ns a byte"
    assert len(titles) == 4
    labels = [text.get_text() for text in seen[0].legends[0].get_texts()]
    assert labels == ["measured", "the line of the title", "the planner's price"]
    with pytest.raises(InvalidError, match="no/x.png: it cannot be written"):
        draw(tmp_path / "no" / "x.png", TIMES, CURVES, "4 ranks on 2 hosts")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr(process, "init", init)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["--plot", "x.png"])
    assert done.exit_code == 1 and "plot (matplotlib): it is not installed" in done.output
