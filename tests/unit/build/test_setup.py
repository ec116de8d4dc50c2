"""The set-up of the Makefile: each part says what it does and how long it took, and shows errors and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[3] / "Makefile"


def outside_of_make() -> dict[str, str]:
    """This environment without what `make test` adds: a make that knows it was started by another names its folder."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs make with a copy of the Makefile, and a place of packages that is not there."""
    shutil.copy(MAKEFILE, folder)
    (folder / "tf_ops").mkdir(exist_ok=True)
    environment = {**outside_of_make(), "PIP_FIND_LINKS": str(folder / "nowhere"), "PIP_NO_INDEX": "1"}
    command = ["make", *words, f"PYTHON={sys.executable}", "VENV=venv"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_a_package_that_cannot_be_installed_is_an_error_without_warnings_and_the_part_is_not_done(tmp_path):
    (tmp_path / "requirements.txt").write_text("no_such_package_of_hvd_ext==1\n")
    done = make(tmp_path, "venv/.made/packages")
    assert done.returncode == 2
    assert "ERROR: No matching distribution found for no_such_package_of_hvd_ext==1" in done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    assert done.stdout.splitlines()[0].startswith("== packages: a virtual environment in venv with TensorFlow")
    assert "done in" not in done.stdout


def test_every_part_of_the_set_up_is_announced_and_timed(tmp_path):
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path}"]
    shown = subprocess.run(command, cwd=MAKEFILE.parent, text=True, capture_output=True, env=outside_of_make())
    for part in ("packages", "hvd_ext", "Horovod"):
        assert f'echo "== {part}: ' in shown.stdout
        assert f'echo "== {part}: done in' in shown.stdout
    installs = [line for line in shown.stdout.splitlines() if " install " in line and "-m pip" in line]
    assert len(installs) == 2
    assert all("--quiet --quiet" in line for line in installs)
