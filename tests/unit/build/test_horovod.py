"""The recipe for Horovod: it works on the one archive that it is for, and says so otherwise."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from hvd_ext.build import horovod
from hvd_ext.build.child import InstallError

LINES = 'list(APPEND TF_SOURCES "${PROJECT}/a.cc")\n  "${PROJECT}/xla_mpi_ops.cc")\nadd_library(tensorflow)\n'


def archive(folder: Path) -> Path:
    """Writes an archive with one file, named as Horovod's."""
    path = folder / "horovod.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        entry = tarfile.TarInfo("horovod-0.28.1/setup.py")
        entry.size = 4
        file.addfile(entry, io.BytesIO(b"pass"))
    return path


def test_only_the_line_of_the_xla_ops_is_dropped(tmp_path):
    path = tmp_path / "CMakeLists.txt"
    path.write_text(LINES)
    horovod.drop_xla_source(path)
    assert path.read_text() == 'list(APPEND TF_SOURCES "${PROJECT}/a.cc")\nadd_library(tensorflow)\n'


@pytest.mark.parametrize(("text", "seen"), [("add_library(tensorflow)\n", 0), (LINES + LINES, 2)])
def test_an_archive_of_another_shape_is_refused(tmp_path, text, seen):
    path = tmp_path / "CMakeLists.txt"
    path.write_text(text)
    with pytest.raises(InstallError, match=rf"one line must name xla_mpi_ops\.cc, {seen} do"):
        horovod.drop_xla_source(path)
    assert path.read_text() == text


def test_only_an_archive_with_the_right_hash_is_unpacked(tmp_path):
    path = archive(tmp_path)
    with pytest.raises(InstallError, match="its sha256 must be"):
        horovod.unpack(path, tmp_path)
    assert not (tmp_path / "horovod-0.28.1").exists()
    tree = horovod.unpack(path, tmp_path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert (tree / "setup.py").read_text() == "pass"
