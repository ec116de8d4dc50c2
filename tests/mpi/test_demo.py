"""The demo with real ranks: what it shows, what it says when a rank fails, and that it leaves no process behind."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ext.cluster.tools import obstacle
from hvd_ext.runner.launcher import marked
from tests.mpi import jobs
from tests.mpi.benches import done
from tests.waiting import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 560
MARK = "HVD_EXT_TEST_DEMO"


def demo(tmp_path: Path, *options: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(tmp_path / "out"), *options]
    return done(command, status, **environment)


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank itself, not the launcher that has the same words among its arguments."""
    try:
        return process.cmdline()[1:2] == [str(EXAMPLES / "digits.py")]
    except psutil.Error:
        return False


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "demo.json").read_text())


@pytest.mark.skipif(bool(obstacle()), reason=f"a rehearsed cluster: making namespaces {obstacle()}")
def test_on_a_rehearsed_cluster_it_trains_in_three_ways_and_draws(tmp_path: Path) -> None:
    shown = demo(tmp_path, "--hosts", "1,1", "--rate", "1gbit", "--epochs", "1", **jobs.forking(tmp_path))
    found = result(tmp_path)
    assert found["place"] == "2 hosts of 1 + 1 ranks, 1gbit between them"
    expected = ["hvd_ext", "hvd_ext, TopK"]
    if importlib.util.find_spec("horovod"):
        expected.insert(0, "Horovod")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == expected
    for row in rows.values():
        assert row["equal"]
        assert [len(turn) for turn in row["steps_ms"]] == [22]
        assert row["accuracy"] > 0.6  # 22 steps; a tenth by guessing
    assert rows["hvd_ext, TopK"]["algorithm"] == "hitopk"
    if "Horovod" in rows:
        # The same data, initial weights and dropout: only the rounding of the sums may differ.
        ours, theirs = (rows[name]["curves"][0][0][1] for name in ("hvd_ext", "Horovod"))
        assert ours == pytest.approx(theirs, abs=0.02)
    for name, row in rows.items():
        assert name in shown.stdout and row["algorithm"] in shown.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes()[:4] == b"\x89PNG"


def test_without_namespaces_and_horovod_it_says_so_and_trains_on_one_host(tmp_path: Path) -> None:
    # A package of that name cannot be found where a None stands for it: the interpreter's own way to hide a module.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['horovod'] = None\n"
        "import hvd_ext.cluster.tools as tools\ntools.obstacle = lambda: 'needs what this test forbids'\n"
    )
    hidden = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shown = demo(tmp_path, "--hosts", "1,1", "--epochs", "1", "--turns", "1", PYTHONPATH=hidden)
    assert "Horovod is not installed" in shown.stdout
    assert "all ranks are on one host, where TopK leaves nothing out" in shown.stdout
    assert "a rehearsed cluster needs what this test forbids" in shown.stdout
    found = result(tmp_path)
    assert found["place"] == "one host of 2 ranks"
    assert [row["name"] for row in found["rows"]] == ["hvd_ext"]


def test_a_rank_that_fails_shows_its_words(tmp_path: Path) -> None:
    options = ("--hosts", "1", "--one-host", "--epochs", "1", "--no-horovod")
    shown = demo(tmp_path, *options, status=1, HVD_EXT_ALGORITHM="no_such_algorithm")
    assert "no_such_algorithm" in shown.stderr
    assert "no_such_algorithm" in (tmp_path / "out" / "hvd_ext.log").read_text()


@pytest.mark.parametrize(("hosts", "words"), [("2,x", "hosts (2,x)"), ("0", "hosts (0)")])
def test_hosts_that_are_none_are_refused_in_words(tmp_path: Path, hosts: str, words: str) -> None:
    shown = demo(tmp_path, "--hosts", hosts, status=1)
    assert shown.stderr.startswith(f"demo: {words}")


@pytest.mark.parametrize(("number", "where"), [(signal.SIGINT, []), (signal.SIGTERM, ["--one-host"])])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, where: list[str]) -> None:
    value = f"{os.getpid()}-{number}"
    options = ["--hosts", "1,1", *where, "--no-horovod", "--epochs", "100000", "--output", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "demo.py"), *options]
    with (tmp_path / "shown").open("w") as shown:
        # A shell that starts the tests in the background has them ignore SIGINT, and what they start too.
        heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        child = subprocess.Popen(command, stdout=shown, stderr=shown, env={**os.environ, MARK: value}, preexec_fn=heeds)
        try:
            until(lambda: child.poll() is not None or len(list(filter(is_rank, marked(MARK, value)))) == 2)
            assert child.poll() is None, (tmp_path / "shown").read_text()
            child.send_signal(number)
            assert child.wait(TIMEOUT_S) == 130
            assert not marked(MARK, value)
        finally:
            for process in marked(MARK, value):
                process.kill()
            child.wait()
