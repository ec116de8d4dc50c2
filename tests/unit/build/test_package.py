"""What `pip install .` packs, and what it says where the native libraries cannot be built."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from hvd_ext.build import child
from hvd_ext.engine import libraries, versions

ROOT = Path(__file__).resolve().parents[3]
PACKED = ("hvd_ext", "tf_ops")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


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
def test_a_source_archive_and_a_wheel_of_it_hold_what_they_must_and_nothing_else(tree, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    every = {**child.python_environment(sys.executable), "HVD_EXT_NATIVE": "0"}
    done = subprocess.run(command, cwd=tree, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("hvd_ext-*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in libraries.source_files(ROOT / "tf_ops")}
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "hvd_ext").rglob("*.py")}
    assert {*native, *python, *FILES, "hvd_ext/py.typed"} <= packed
    assert [name for name in packed if name.endswith(".so")] == []

    with zipfile.ZipFile(next(tmp_path.glob("hvd_ext-*.whl"))) as file:
        names = set(file.namelist())
        told = email.message_from_bytes(file.read("hvd_ext-0.1.0.dist-info/METADATA"))
        licence = file.read("hvd_ext-0.1.0.dist-info/licenses/LICENSE").decode()
    copies = {name.replace("tf_ops/", "hvd_ext/_native/", 1) for name in native}
    ours = {*python, *copies, "hvd_ext/py.typed", "hvd_ext/planning/ir.def"}
    about = {"METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE"}
    assert names == ours | {f"hvd_ext-0.1.0.dist-info/{name}" for name in about}
    assert told["License-Expression"] == "Apache-2.0"
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert told["Author"] and "Typing :: Typed" in told.get_all("Classifier")
    # the project has no address yet, and the one that it gives says so by its name (RFC 2606)
    assert all(".invalid" in address for address in told.get_all("Project-URL"))


# What a type checker says of a user's program: of the marked lines that they are wrong, and of no other line.
PROGRAM = """
import keras
import tensorflow as tf

import hvd_ext as hvd
import hvd_ext.keras as faces
import hvd_ext.tensorflow.keras as others
from hvd_ext.tensorflow.keras.callbacks import MetricAverageCallback

hvd.init(process_sets="dynamic")
reveal_type(hvd.rank())  # int
reveal_type(hvd.allreduce)  # algorithm: Literal['auto']
reveal_type(faces.allreduce)  # def (value: Any, name: str
reveal_type(others.callbacks.Checkpoint)  # directory: str
reveal_type(hvd.keras.DistributedOptimizer)  # sparse_as_dense: bool
reveal_type(hvd.tensorflow.size)  # def () -> int
reveal_type(hvd.data.shard)  # Literal['repeat']
reveal_type(hvd.state.register)  # owner_key: str
reveal_type(hvd.errors.InvalidError())  # hvd_ext.errors.InvalidError
reveal_type(hvd.callbacks.StopTogether(3))  # StopTogether
reveal_type(hvd.scale_learning_rate(0.1))  # float
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum, algorithm="ring")
optimizer.register_local_var(3)
tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.TopK(0.01, wire="bf16"))
tape.register_local_source(3)
hvd.DistributedOptimizer(optimizer, compresion=None)  # error: Unexpected keyword argument "compresion"
hvd.DistributedOptimizer(optimizer, algorithm="rng")  # error: Argument "algorithm"
hvd.DistributedGradientTape(tape, backward_passes_per_step=2)  # error: Argument "backward_passes_per_step"
hvd.TopK(wire="fp8")  # error: Argument "wire"
hvd.no_such_name  # error: Module has no attribute "no_such_name"
MetricAverageCallback(exact=3)  # error: Argument "exact"
"""


@pytest.mark.slow
def test_a_type_checker_sees_all_names_of_an_editable_installation(tree, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not part of the oldest environment")
    made, program = tmp_path / "venv", tmp_path / "program.py"
    venv.create(made)
    interpreter = made / "bin" / "python"
    [packages] = made.glob("lib/python*/site-packages")
    # what is installed beside this package, without the paths to this tree that lie there
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--no-deps"]
    every = child.python_environment(sys.executable)
    done = subprocess.run(
        [*install, "--no-build-isolation", "--editable", str(tree)], env=every, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = packages.glob("__editable__.hvd_ext-*.pth")
    assert path.read_text().strip() == str(tree)  # a path, and no program that a type checker does not run

    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--python-executable"]
    cache = ["--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(interpreter), *cache, program.name], cwd=tmp_path, env=every, capture_output=True, text=True
    )
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith(program.name):
            place, words = line.split(":", 2)[1:]
            said[int(place)] = said.get(int(place), "") + words
    expected = {place: line.split("  # ")[1] for place, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line}
    assert said.keys() == expected.keys(), done.stdout + done.stderr
    for place, words in expected.items():
        assert words in said[place], (place, said[place])


def test_without_tensorflow_the_python_part_is_packed_without_what_an_earlier_build_has_left(tree, tmp_path):
    """And words say what to do."""
    absent = tmp_path / "absent" / "tensorflow"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('there is no TensorFlow here')\n")
    for name in ("lib", f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"):
        left = tree / "build" / name / "hvd_ext"
        left.mkdir(parents=True, exist_ok=True)
        (left / "removed_since.py").write_text("")
    names, text = wheel(tree, tmp_path, PYTHONPATH=str(absent.parent))
    assert {"hvd_ext/__init__.py", "hvd_ext/__init__.pyi"} <= set(names)
    assert "hvd_ext/removed_since.py" not in names
    assert [name for name in names if name.endswith(".so")] == []
    assert "missing: TensorFlow (ImportError: there is no TensorFlow here)" in text
    assert versions.pip(versions.TENSORFLOW) in text
    assert versions.BUILD in text


def test_no_requirement_of_the_package_can_replace_what_a_machine_is_built_around():
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text.split("dependencies = [")[1].split("]")[0].lower()
    for name in ("tensorflow", "keras", "mpi", "horovod"):
        assert name not in dependencies
