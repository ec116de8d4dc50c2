"""What was measured is found again for the same hosts, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.job import probe_cache
from hvd_ext.options import Options
from hvd_ext.topology.tree import Link, Node, Tree, leaf

HOSTS = ("a", "a", "b")
TREE = Tree(
    Node(
        "cluster",
        Link(4e-5, 8e-8),
        (Node("a", Link(1e-6, 1e-9), (leaf(0), leaf(1))), Node("b", Link(1e-6, 1e-9), (leaf(2),))),
    )
)
KEY = probe_cache.key_of(HOSTS, Options(), "TCP")


def the_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_a_measurement_is_found_again(tmp_path: Path) -> None:
    where = tmp_path / "made" / "here"
    assert probe_cache.find(KEY, where) is None
    assert probe_cache.keep(KEY, TREE, where)
    found = probe_cache.find(KEY, where)
    assert found is not None
    assert found[0] == TREE
    assert the_file(where).name.startswith("network-")


@pytest.mark.parametrize(
    "other",
    [
        probe_cache.key_of(("a", "b", "a"), Options(), "TCP"),
        probe_cache.key_of(("a", "a"), Options(), "TCP"),
        probe_cache.key_of(HOSTS, Options(), "MPI"),
        probe_cache.key_of(HOSTS, dataclasses.replace(Options(), shared_memory=False), "TCP"),
    ],
)
def test_other_hosts_and_transports_have_their_own(other: dict[str, Any], tmp_path: Path) -> None:
    assert probe_cache.keep(KEY, TREE, tmp_path)
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
    ],
)
def test_a_torn_file_or_one_of_another_version_does_not_count(spoil: Any, tmp_path: Path) -> None:
    assert probe_cache.keep(KEY, TREE, tmp_path)
    path = the_file(tmp_path)
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert probe_cache.find(KEY, tmp_path) is None
    assert probe_cache.keep(KEY, TREE, tmp_path)
    assert probe_cache.find(KEY, tmp_path) is not None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert not probe_cache.keep(KEY, TREE, tmp_path / "file" / "folder")
    assert probe_cache.find(KEY, tmp_path / "file" / "folder") is None


def test_the_folder_is_that_of_the_options_or_the_users() -> None:
    assert probe_cache.folder(Options(cache="/x"), {}) == Path("/x")
    assert probe_cache.folder(Options(), {"XDG_CACHE_HOME": "/y"}) == Path("/y/hvd_ext")
    assert probe_cache.folder(Options(), {"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "hvd_ext"
