"""The files of checkpoints: what is written comes back, and what is torn is seen."""

from __future__ import annotations

import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hvd_ext.errors import CheckpointError
from hvd_ext.state import arrays, folder, manifest
from hvd_ext.state.manifest import Manifest


def a_manifest(**changes: object) -> Manifest:
    values = {
        **{"id": "a", "reason": "test", "created": "2026-01-01T00:00:00+00:00", "model": "model.keras"},
        **{"epoch": 1, "step": 2, "ranks": 1, "hosts": [1], "versions": {}},
        **{"variables": [], "own": [], "states": [], "files": []},
    }
    return Manifest.model_validate({**values, **changes})


def a_checkpoint(directory: Path, serial: int, content: bytes = b"weights") -> Path:
    written = folder.writing(directory, serial, "a")
    written.mkdir(parents=True)
    entry = folder.write(written / "model.keras", lambda file: file.write(content) and None)
    folder.publish(directory, written, serial, a_manifest(files=[entry]))
    return folder.path_of(directory, serial)


def test_arrays_of_every_dtype_come_back_bit_for_bit() -> None:
    sections = {
        "weights": {
            "f": np.array([1.5, -0.0, np.nan, np.inf], np.float32),
            "b": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
            "h": np.array(0.25, np.float16),
            "u": np.array([2**32 - 1, 7], np.uint32),
            "e": np.zeros((0, 3), np.int64),
        },
        "a/b:c": {"x": np.array([True, False]), "text": np.array(["one", "three"])},
        "empty": {},
    }
    file = io.BytesIO()
    arrays.write(file, sections)
    file.seek(0)
    back = arrays.read(file)
    assert [*back] == [*sections]
    for section, named in sections.items():
        assert [*back[section]] == [*named]
        for name, array in named.items():
            read = back[section][name]
            assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"something else"])
def test_a_file_that_is_none_of_ours_is_an_error_of_the_checkpoint(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a file of a rank's state"):
        arrays.read(io.BytesIO(content))


def test_a_pickle_in_a_file_is_not_run() -> None:
    file = io.BytesIO()
    np.savez(file, index=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CheckpointError, match="allow_pickle"):
        arrays.read(io.BytesIO(file.getvalue()))


def test_a_complete_checkpoint_is_found_and_named_in_the_pointer(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path, 3)
    assert manifest.read(path).step == 2
    manifest.check(path, manifest.read(path), ["model.keras"])
    assert (tmp_path / folder.POINTER).read_text() == "checkpoint-000003\n"
    assert folder.newest(tmp_path) == path
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-000003", folder.POINTER]


def test_the_newest_whole_one_is_taken_and_no_directory_has_none(tmp_path: Path) -> None:
    whole = a_checkpoint(tmp_path, 1)
    (a_checkpoint(tmp_path, 2) / "model.keras").write_bytes(b"weight")
    (a_checkpoint(tmp_path, 3) / manifest.FILE).unlink()
    (a_checkpoint(tmp_path, 4) / "model.keras").unlink()
    assert folder.newest(tmp_path) == whole
    assert folder.newest(tmp_path / "nowhere") is None


def test_each_kind_of_damage_has_its_words(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path, 7)
    found = manifest.read(path)
    with pytest.raises(CheckpointError, match=r"checkpoint-000007: the manifest names no rank-00004.npz"):
        manifest.check(path, found, [manifest.rank_file(4)])
    (path / "model.keras").write_bytes(b"weights!")
    with pytest.raises(CheckpointError, match=r"model.keras is torn: it must have 7 bytes, it has 8"):
        manifest.check(path, found, ["model.keras"])
    (path / "model.keras").write_bytes(b"weighty")
    with pytest.raises(CheckpointError, match=r"model.keras is damaged: its SHA-256"):
        manifest.check(path, found, ["model.keras"])
    (path / "model.keras").unlink()
    with pytest.raises(CheckpointError, match=r"model.keras cannot be read: No such file"):
        manifest.check(path, found, ["model.keras"])


def test_a_manifest_that_is_torn_of_a_later_version_or_points_elsewhere_is_refused(tmp_path: Path) -> None:
    text = a_manifest().text()
    assert manifest.parse(text, "x") == a_manifest()
    with pytest.raises(CheckpointError, match="x: not a manifest of version 1: the text"):
        manifest.parse(text[:40], "x")
    with pytest.raises(CheckpointError, match="not a manifest of version 1: version"):
        manifest.parse(text.replace('"version": 1', '"version": 2'), "x")
    outside = json.loads(text) | {"files": [{"name": "../x", "nbytes": 1, "sha256": "0" * 64}]}
    with pytest.raises(CheckpointError, match=r"files\.0\.name"):
        manifest.parse(json.dumps(outside), "x")
    with pytest.raises(CheckpointError, match="no manifest can be read: No such file"):
        manifest.read(tmp_path)


def test_the_oldest_are_removed_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    for serial in (1, 2, 3, 4):
        a_checkpoint(tmp_path, serial)
    (folder.path_of(tmp_path, 4) / manifest.FILE).unlink()
    folder.prune(tmp_path, keep=2)
    assert folder.serials(tmp_path) == [4, 3, 2]


def test_what_a_dead_job_left_is_cleaned_and_nothing_else(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 1)
    folder.writing(tmp_path, 2, "b").mkdir()
    (folder.writing(tmp_path, 2, "b") / "model.keras").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    folder.clean(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-000001", folder.POINTER, "notes"]


def test_a_directory_is_known_by_its_marks(tmp_path: Path) -> None:
    folder.prepare(tmp_path / "a" / "b", "mark")
    assert folder.has_mark(tmp_path / "a" / "b", "mark")
    assert not folder.has_mark(tmp_path, "mark")
    folder.unmark(tmp_path / "a" / "b", "mark")
    assert not folder.has_mark(tmp_path / "a" / "b", "mark")
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        folder.prepare(tmp_path / "file" / "b", "mark")
