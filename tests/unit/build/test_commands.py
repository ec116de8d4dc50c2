"""The commands build and install-horovod: what they say and how they end, without building anything."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvd_ext.__main__ import app
from hvd_ext.build import child, horovod, native, progress
from hvd_ext.build.child import InstallError
from hvd_ext.build.native import Missing, Toolchain
from hvd_ext.engine import libraries, versions

TOOLCHAIN = Toolchain("python", "2.21.0", "mpicxx", "mpirun (Open MPI) 4.1.8", "c++", "cmake", "ninja")


def fails(*args: object, **kwargs: object) -> None:
    """Stands for a step that does not work."""
    raise InstallError("the compiler [ran] away")


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Runs the command build with a toolchain that is complete; gives its result."""
    monkeypatch.setattr(native, "find_toolchain", lambda mpi: (TOOLCHAIN, []))
    return lambda *options: CliRunner().invoke(app, ["build", "--output", str(tmp_path / "lib"), *options])


def test_build_says_all_that_is_missing_and_ends_with_a_status(build, monkeypatch):
    missing = [Missing("TensorFlow", "pip install it"), Missing("cmake", "pip install that")]
    monkeypatch.setattr(native, "find_toolchain", lambda mpi: (None, missing))
    result = build()
    assert result.exit_code == 1
    assert "TensorFlow is missing: pip install it" in result.output
    assert "cmake is missing: pip install that" in result.output


def test_build_shows_why_it_failed_letter_by_letter(build, monkeypatch):
    monkeypatch.setattr(native, "build", fails)
    result = build()
    assert result.exit_code == 1
    assert "hvd_ext build: the compiler [ran] away" in result.output
    assert "done in" not in result.output


def test_build_passes_on_the_folder_and_asks_for_no_mpi_for_the_data_cache_alone(build, monkeypatch, tmp_path):
    targets, asked = [], []
    monkeypatch.setattr(native, "find_toolchain", lambda mpi: (asked.append(mpi), (TOOLCHAIN, []))[1])
    monkeypatch.setattr(native, "build", lambda toolchain, folder, target, echo: targets.append(target))
    assert build("--data").exit_code == build().exit_code == 0
    assert asked == [False, True]
    assert targets == [tmp_path / "lib"] * 2


def test_build_without_sources_says_that_the_package_is_incomplete(build, monkeypatch):
    monkeypatch.setattr(libraries, "native_sources", lambda: None)
    result = build()
    assert result.exit_code == 1
    assert "the native sources are not in this package; install it again" in result.output


def test_a_horovod_that_works_is_not_built_again(monkeypatch):
    monkeypatch.setattr(horovod, "installed", lambda: child.Answer({"version": versions.HOROVOD, "mpi": True}))
    monkeypatch.setattr(horovod, "install", fails)
    result = CliRunner().invoke(app, ["install-horovod"])
    assert result.exit_code == 0
    assert "is installed and works" in result.output
    assert CliRunner().invoke(app, ["install-horovod", "--force"]).exit_code == 1


@pytest.mark.parametrize(
    "answer",
    [
        child.Answer({}, "ImportError: built for another TensorFlow"),
        child.Answer({"version": versions.HOROVOD, "mpi": False}),
        child.Answer({"version": "0.27.0", "mpi": True}),
    ],
    ids=["does not import", "without mpi", "another version"],
)
def test_a_horovod_that_does_not_do_is_built(monkeypatch, answer):
    built: list[Path] = []
    monkeypatch.setattr(horovod, "installed", lambda: answer)
    monkeypatch.setattr(horovod, "install", lambda log, echo: built.append(log))
    assert CliRunner().invoke(app, ["install-horovod"]).exit_code == 0
    assert len(built) == 1


@pytest.mark.parametrize("written", ["", "$ pip download\n"], ids=["nothing", "a command"])
def test_the_log_is_a_new_file_that_stays_where_horovod_fails_and_has_something_to_read(monkeypatch, tmp_path, written):
    def broken(log: Path, echo: object) -> None:
        assert log.parent == tmp_path
        assert log.stat().st_mode & 0o777 == 0o600
        log.write_text(written)
        fails()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(horovod, "installed", lambda: child.Answer({}, "it is not there"))
    monkeypatch.setattr(horovod, "install", broken)
    assert CliRunner().invoke(app, ["install-horovod"]).exit_code == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == [written] * bool(written)
    monkeypatch.setattr(horovod, "install", lambda log, echo: log.write_text("done"))
    before = list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["install-horovod"]).exit_code == 0
    assert list(tmp_path.iterdir()) == before


def test_horovod_is_not_begun_where_something_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(horovod, "find_toolchain", lambda python: (None, [Missing("cmake", "pip install that")]))
    with pytest.raises(InstallError, match="cmake is missing: pip install that"):
        horovod.install(tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_step_in_a_log_says_that_it_goes_on_and_how_long_it_took_unless_it_fails(monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1)
    output = io.StringIO()
    with progress.step("a long [step]", Console(file=output, width=80)) as echo:
        echo("compiling a.cc [1/2]")
    lines = output.getvalue().splitlines()
    assert lines[0] == "a long [step] ..."
    assert lines[1].endswith("compiling a.cc [1/2]")
    assert lines[2].startswith("a long [step]: done in ")
    output = io.StringIO()
    with pytest.raises(InstallError), progress.step("a step", Console(file=output)):
        fails()
    assert "done" not in output.getvalue()
