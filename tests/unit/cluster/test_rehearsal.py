"""What a rehearsal needs, what it says where that is not there, and how it removes what killed ones left."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_ext.__main__ import app
from hvd_ext.cluster import folder as folders, rehearsal, tools
from hvd_ext.cluster.rehearsal import Cluster, ClusterError
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import InvalidError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def cluster(*arguments: str) -> tuple[int, str]:
    """Runs the command and gives its status and all that it says, on one line."""
    result = CliRunner().invoke(app, ["cluster", "run", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "2,x", "--", "true"], "hosts (2,x): must be whole numbers above 0"),
        (["--hosts", "1,1,1", "--racks", "2", "--", "true"], "racks (2): must divide the number of hosts, 3"),
        (["--hosts", "1,1", "--mca", "btl", "--", "true"], "mca (btl): must be name=value"),
        (["--hosts", "1,1", "--", "no-such-program", "--rate", "1"], "command (no-such-program): it is neither"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_made(
    arguments: list[str], words: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Cluster) -> Cluster:
        raise AssertionError("a cluster was made")

    monkeypatch.setattr(Cluster, "__enter__", never)
    status, said = cluster(*arguments)
    assert status == 1, said
    assert f"hvd_ext cluster: {words}" in said


def test_a_missing_command_is_named() -> None:
    status, said = cluster("--hosts", "1,1")
    assert status != 0
    assert "COMMAND" in said.upper()


def test_without_the_tools_it_says_which_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    there = tools.tool
    monkeypatch.setattr(tools, "tool", lambda name: None if name in ("tc", "nsenter") else there(name))
    status, said = cluster("--hosts", "1,1", "--", "true")
    assert status == 1
    assert "making them needs the tools tc, nsenter: apt-get install iproute2 util-linux" in said


DENIED = "unshare: unshare failed: Operation not permitted"


ROOT = "needs root with all capabilities (a container with --privileged)"
OTHER = "needs root (sudo, or a container with --privileged), or a kernel that lets users"


@pytest.mark.parametrize(
    ("user", "seen", "begins", "ends"),
    [
        (65534, f"{DENIED}\n", OTHER, DENIED),
        (0, f"{DENIED}\n", ROOT, f"this root was refused: {DENIED}"),
        (0, "+ mount x\n+ tc y\nError: Unknown qdisc.\n", ROOT, "this root was refused: tc y: Error: Unknown qdisc."),
    ],
)
def test_without_root_or_its_rights_it_says_what_it_needs(user, seen, begins, ends, monkeypatch) -> None:
    def refused(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert ("--user" in command) == (user != 0)
        return subprocess.CompletedProcess(command, 1, "", seen)

    monkeypatch.setattr(tools, "tool", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(tools.subprocess, "run", refused)
    said = tools.obstacle()
    assert said.startswith(begins) and said.endswith(ends)


def test_a_cluster_is_there_only_inside_its_block() -> None:
    outside = Cluster(Spec((1, 1)))
    with pytest.raises(ClusterError, match="only inside its with block"):
        outside.mpirun(["true"])
    outside.close()


def test_namespaces_that_are_refused_leave_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "obstacle", lambda: "")
    monkeypatch.setattr(rehearsal.launch, "find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(rehearsal, "unshare", lambda: ["sh", "-c", "echo unshare failed: not permitted >&2; exit 1"])
    with pytest.raises(ClusterError, match="a privilege missing\\? unshare failed: not permitted"), Cluster(Spec((1,))):
        pass
    assert list(temporary.iterdir()) == []


def test_a_temporary_folder_with_a_blank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "with blank"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(InvalidError, match=r"temporary folder \(.*with blank\): must have a name without blanks"):
        folders.make()
    assert list(place.iterdir()) == []


def test_folders_of_killed_rehearsals_go_and_used_ones_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, lock = folders.make()
    (used / "state.json").touch()
    killed, its_lock = folders.make()
    (killed / "state.json").touch()
    its_lock.close()
    new, new_lock = folders.make()
    new_lock.close()
    other = temporary / "something-else"
    other.mkdir()
    assert folders.remove_stale() == [killed]
    assert used.exists()
    assert new.exists(), "its owner has just made it and is about to lock it"
    assert other.exists()
    now = time.time()
    monkeypatch.setattr(folders.time, "time", lambda: now + folders.YOUNG_S + 1)
    assert folders.remove_stale() == [new], "its owner has died before it was ready"
    lock.close()
