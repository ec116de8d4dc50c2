"""What `pip install .` packs, and what it says where the native libraries cannot be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hvd_ext.install import child, sources, versions

ROOT = Path(__file__).resolve().parents[3]
PACKED = ("hvd_ext", "tf_ops")
FILES = ("setup.py", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packing needs, with the libraries of this tree: they must not be packed."""
    folder = tmp_path_factory.mktemp("tree")
    for name in PACKED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    (folder / "hvd_ext" / "lib").mkdir(exist_ok=True)
    (folder / "hvd_ext" / "lib" / "libstale.so").write_bytes(b"of another TensorFlow")
    return folder


def wheel(tree: Path, output: Path, **environment: str) -> tuple[list[str], str]:
    """Builds a wheel without isolation; gives the names in it and what pip has printed."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(output), "."]
    every = {**child.python_environment(sys.executable), **environment}
    done = subprocess.run(command, cwd=tree, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(output.glob("hvd_ext-*.whl"))) as file:
        return file.namelist(), done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_without_the_native_build_carries_its_sources(tree, tmp_path):
    names, _ = wheel(tree, tmp_path, HVD_EXT_NATIVE="0")
    packed = {name.removeprefix("hvd_ext/_native/") for name in names if name.startswith("hvd_ext/_native/")}
    wanted = {str(path.relative_to(ROOT / "tf_ops")) for path in sources.source_files(ROOT / "tf_ops")}
    assert packed == wanted
    assert "hvd_ext/planning/ir.def" in names
    assert [name for name in names if name.startswith(("hvd_ext/lib", "tests", "tf_ops"))] == []
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "hvd_ext").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python


@pytest.mark.slow
def test_what_an_earlier_build_has_left_is_not_packed(tree, tmp_path):
    wheel(tree, tmp_path / "first", HVD_EXT_NATIVE="0")
    for left in (tree / "build").glob("lib*"):
        (left / "hvd_ext" / "removed_since.py").write_text("")
    names, _ = wheel(tree, tmp_path / "second", HVD_EXT_NATIVE="0")
    assert "hvd_ext/removed_since.py" not in names


def test_without_tensorflow_the_python_part_is_packed_and_words_say_what_to_do(tree, tmp_path):
    absent = tmp_path / "absent" / "tensorflow"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('there is no TensorFlow here')\n")
    names, text = wheel(tree, tmp_path, PYTHONPATH=str(absent.parent))
    assert "hvd_ext/__init__.py" in names
    assert [name for name in names if name.endswith(".so")] == []
    assert "missing: TensorFlow (ImportError: there is no TensorFlow here)" in text
    assert versions.pip(versions.TENSORFLOW) in text
    assert versions.BUILD in text


def test_no_requirement_of_the_package_can_replace_what_a_machine_is_built_around():
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text.split("dependencies = [")[1].split("]")[0].lower()
    for name in ("tensorflow", "keras", "mpi", "horovod"):
        assert name not in dependencies
