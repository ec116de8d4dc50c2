"""The demo with real ranks: what it shows, what it says when a rank fails, and that it leaves no process behind."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 560
MARK = "HVD_EXT_TEST_DEMO"

pytestmark = pytest.mark.slow


def demo(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(tmp_path / "out"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, **environment}
    )


def marked(value: str) -> list[psutil.Process]:
    """The living processes whose environment has our mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank itself, not the launcher that has the same words among its arguments."""
    try:
        return process.cmdline()[1:2] == [str(EXAMPLES / "digits.py")]
    except psutil.Error:
        return False


def test_the_demo_trains_and_draws_and_its_second_training_is_horovods(tmp_path: Path) -> None:
    done = demo(tmp_path, "--ranks", "2", "--epochs", "4")
    assert done.returncode == 0, done.stderr + done.stdout
    trainings = json.loads((tmp_path / "out" / "digits.json").read_text())
    names = [one["name"] for one in trainings]
    assert names == (["hvd_ext", "Horovod"] if importlib.util.find_spec("horovod") else ["hvd_ext"])
    for one in trainings:
        assert one["ranks"] == 2
        assert one["end"]["equal"]
        assert len(one["epochs"]) == 4
        assert one["epochs"][-1]["test_accuracy"] > 0.85
    if len(trainings) == 2:
        # The same data, initial weights and dropout: only the rounding of the sums may differ.
        ours, theirs = (one["epochs"][0]["loss"] for one in trainings)
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert trainings[0]["end"]["algorithm"] in done.stdout
    assert (tmp_path / "out" / "digits.png").read_bytes()[:4] == b"\x89PNG"


def test_without_horovod_it_says_so_and_starts_the_ranks_with_mpirun(tmp_path: Path) -> None:
    # A package of that name cannot be found where a None stands for it: the interpreter's own way to hide a module.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    hidden = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = demo(tmp_path, "--ranks", "2", "--epochs", "1", PYTHONPATH=hidden)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Horovod is not installed" in done.stdout
    trainings = json.loads((tmp_path / "out" / "digits.json").read_text())
    assert [one["name"] for one in trainings] == ["hvd_ext"]


def test_a_rank_that_fails_shows_its_words(tmp_path: Path) -> None:
    done = demo(tmp_path, "--ranks", "2", "--epochs", "1", "--no-horovod", HVD_EXT_ALGORITHM="no_such_algorithm")
    assert done.returncode == 1
    assert "no_such_algorithm" in done.stderr
    assert "no_such_algorithm" in (tmp_path / "out" / "digits.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    value = f"{os.getpid()}-{number}"
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--ranks",
        "2",
        "--epochs",
        "100000",
        "--output",
        str(tmp_path),
    ]
    with (tmp_path / "shown").open("w") as shown:
        # A shell that starts the tests in the background has them ignore SIGINT, and what they start too.
        heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        child = subprocess.Popen(command, stdout=shown, stderr=shown, env={**os.environ, MARK: value}, preexec_fn=heeds)
        try:
            end = time.monotonic() + TIMEOUT_S
            while len([process for process in marked(value) if is_rank(process)]) < 2:
                assert time.monotonic() < end
                assert child.poll() is None, (tmp_path / "shown").read_text()
                time.sleep(0.1)
            child.send_signal(number)
            assert child.wait(TIMEOUT_S) == 130
            assert marked(value) == []
        finally:
            for process in marked(value):
                process.kill()
            child.wait()
