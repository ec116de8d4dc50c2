"""Sources of samples: what they find, what they read, and what they refuse."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import record_files, sources
from hvd_ext.data.cache import DataCache
from hvd_ext.errors import InvalidError

RECORDS = [bytes([index % 251]) * (index * 37) for index in range(50)]


def read_all(source: sources.Source) -> list[Any]:
    """Read the samples as a cache does: in a graph that captures the index."""
    numbers = tf.data.Dataset.range(source.samples).batch(max(1, source.samples))
    located = numbers.map(source.locate).unbatch()
    # a tuple that says where a sample lies is one argument
    return list(located.map(lambda *parts: source.read(parts if len(parts) > 1 else parts[0])).as_numpy_iterator())


def test_a_flipped_byte_of_a_record_is_found_and_its_file_and_record_are_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS[10:14])
    content = bytearray(path.read_bytes())
    content[-10] ^= 1  # in the data of the last record
    path.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match=rf"file \({path}\): the checksum of the 481 bytes from byte"):
        read_all(sources.tfrecord(path))
    cache = DataCache("damaged", sources.tfrecord(path), memory="1MB")
    with pytest.raises(tf.errors.OpError, match=r"sample 3 \(.*a.tfrecord, its sample 3\): it could not be loaded"):
        list(cache.dataset(4))
    replaced = DataCache("damaged", sources.tfrecord(path), memory="1MB", on_error="replace")
    (batch,) = replaced.dataset(4)
    assert batch.numpy().tolist() == [*RECORDS[10:13], RECORDS[10]]


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for name in ("dog", "cat"):
        (tmp_path / "data" / name / "more").mkdir(parents=True)
        for index in range(12):
            (tmp_path / "data" / name / f"{name}_{index}.jpg").write_bytes(f"{name} {index}".encode())
        (tmp_path / "data" / name / "more" / "x.jpg").write_bytes(b"more " + name.encode())
        (tmp_path / "data" / name / "notes.txt").write_bytes(b"")
        (tmp_path / "data" / name / ".hidden.jpg").write_bytes(b"")
    return tmp_path / "data"


def write_records(path: Path, records: list[bytes], options: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), options or None) as writer:
        for record in records:
            writer.write(record)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=form) as archive:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return path


def test_a_folder_has_its_files_in_order_with_the_labels_of_their_class_folders(classes: Path) -> None:
    source = sources.folder(classes, "*.jpg")
    assert source.samples == 26
    assert source.class_names == ["cat", "dog"]
    paths = [source.place_of(index) for index in range(26)]
    assert paths == sorted(paths, key=lambda path: (str(Path(path).parent), path))
    for path, (contents, label) in zip(paths, read_all(source), strict=True):
        assert contents == Path(path).read_bytes()
        assert label == (0 if "/cat/" in path else 1)
    assert source.element_spec == (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))


def test_a_folder_without_labels_gives_contents_alone(classes: Path) -> None:
    source = sources.folder(classes / "cat", "cat_*.jpg", labels=False)
    assert [read_all(source)[index] for index in (0, 11)] == [b"cat 0", b"cat 9"]


def test_a_folder_is_known_again_by_names_sizes_and_times(classes: Path) -> None:
    first = sources.folder(classes, "*.jpg")
    assert sources.folder(classes, "*.jpg").digest == first.digest
    assert sources.folder(classes).digest != first.digest
    os.utime(classes / "cat" / "cat_3.jpg", (1, 1))
    touched = sources.folder(classes, "*.jpg")
    assert touched.digest != first.digest and touched.contents == first.contents
    (classes / "cat" / "cat_3.jpg").write_bytes(b"longer than before")
    assert sources.folder(classes, "*.jpg").contents != first.contents


def test_class_folders_without_files_count_because_they_shift_labels(classes: Path) -> None:
    first = sources.folder(classes, "*.jpg")
    (classes / "bird").mkdir()
    second = sources.folder(classes, "*.jpg")
    assert second.digest != first.digest and second.contents != first.contents
    alone = [sources.folder(classes, "*.jpg", labels=False).digest]
    (classes / "bird").rmdir()
    assert alone == [sources.folder(classes, "*.jpg", labels=False).digest]


def test_an_array_in_a_file_that_was_changed_in_memory_is_read_from_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(6))
    changed = np.load(tmp_path / "y.npy", mmap_mode="c")
    changed -= 1
    source = sources.as_source(changed)
    assert [int(row) for row in read_all(source)] == [-1, 0, 1, 2, 3, 4]
    assert source.digest == sources.as_source(np.arange(6) - 1).digest


def test_arrays_in_files_count_with_the_names_of_the_files(tmp_path: Path) -> None:
    found = []
    for name in ("fold0.npy", "fold1.npy"):
        np.save(tmp_path / name, np.arange(6))
        os.utime(tmp_path / name, (1, 1))
        found.append(sources.as_source(np.load(tmp_path / name, mmap_mode="r")))
    assert found[0].digest != found[1].digest


def test_a_link_to_a_folder_further_up_does_not_go_round_for_ever(classes: Path) -> None:
    (classes / "cat" / "up").symlink_to(classes, target_is_directory=True)
    assert sources.folder(classes, "*.jpg").samples == 26


def test_what_a_folder_cannot_be_is_refused_in_words(classes: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="there is no such folder"):
        sources.folder(tmp_path / "nothing")
    with pytest.raises(InvalidError, match=r"no file is called '\*.png'; check the path and pattern="):
        sources.folder(classes, "*.png")
    with pytest.raises(InvalidError, match="must be on a local or mounted file system"):
        sources.folder("gs://bucket/data")
    (classes / "top.jpg").write_bytes(b"")
    with pytest.raises(InvalidError, match="'top.jpg' lies in no class folder, so it has no label"):
        sources.folder(classes, "*.jpg")


def test_records_of_several_files_are_read_by_number(tmp_path: Path) -> None:
    write_records(tmp_path / "b.tfrecord", RECORDS[30:])
    write_records(tmp_path / "a.tfrecord", RECORDS[:30])
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    source = sources.tfrecord([tmp_path / "b.tfrecord", str(tmp_path / "*.tfrecord")])
    assert source.samples == 50  # each file once, in the order of their names
    assert read_all(source) == RECORDS
    assert source.place_of(31) == f"{tmp_path}/b.tfrecord, its sample 1"


def test_an_index_is_kept_for_the_next_job_and_is_not_believed_when_it_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    sources.tfrecord(path).open(tmp_path / "kept")
    (index,) = (tmp_path / "kept").iterdir()

    def nothing(paths: object) -> object:
        raise AssertionError("the file was read again")

    with monkeypatch.context() as patch:
        patch.setattr(record_files, "tfrecord_columns", nothing)
        source = sources.tfrecord(path)
        source.open(tmp_path / "kept")
        assert read_all(source) == RECORDS
    index.write_bytes(index.read_bytes()[:100])
    source = sources.tfrecord(path)
    source.open(tmp_path / "kept")
    assert source.samples == 50
    write_records(path, RECORDS[:7])
    source = sources.tfrecord(path)
    source.open(tmp_path / "kept")
    assert source.samples == 7


def test_an_index_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    source = sources.tfrecord(write_records(tmp_path / "a.tfrecord", RECORDS))
    source.open(tmp_path / "file")
    assert source.samples == 50


def test_torn_damaged_and_compressed_records_are_refused_in_words(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(InvalidError, match="it is torn: the record at byte .* has 1,813 bytes, and the file ends"):
        _ = sources.tfrecord(path).samples
    path.write_bytes(whole + whole[:5])
    with pytest.raises(InvalidError, match="it is torn: a record begins at byte"):
        _ = sources.tfrecord(path).samples
    flipped = bytearray(whole)
    flipped[16] ^= 1  # the first record has no data: the head of the second one begins here
    path.write_bytes(flipped)
    with pytest.raises(InvalidError, match="the head of the record at byte 16 is damaged, or this is no TFRecord file"):
        _ = sources.tfrecord(path).samples
    write_records(path, RECORDS, "GZIP")
    with pytest.raises(InvalidError, match=r"it is compressed \(gzip\)"):
        _ = sources.tfrecord(path).samples
    path.write_bytes(b"")
    with pytest.raises(InvalidError, match="the files hold no samples"):
        _ = sources.tfrecord(path).samples


def test_files_that_are_not_there_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="there is no such file"):
        sources.tfrecord(tmp_path / "*.tfrecord")
    with pytest.raises(InvalidError, match="no files were named"):
        sources.tar([])
    with pytest.raises(InvalidError, match="must be on a local or mounted file system"):
        sources.tar("https://host/a.tar")
    with pytest.raises(InvalidError, match=r"tar \(3\): must be a path"):
        sources.tar([3])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_tar_files_are_the_members_of_one_base_name(tmp_path: Path, form: int) -> None:
    long = "folder/" * 20 if form != tarfile.USTAR_FORMAT else "folder/" * 12
    members = []
    for index in range(20):
        base = f"{long if index % 2 else ''}{index:05}"
        members += [(f"{base}.jpg", RECORDS[index]), (f"{base}.seg.PNG", b"s%d" % index), ("README", b"no sample")]
    if form == tarfile.PAX_FORMAT:
        members = [(f"ü{name}" if name != "README" else name, data) for name, data in members]
    source = sources.tar(write_tar(tmp_path / "a.tar", members, form))
    assert source.samples == 20
    assert sorted(source.element_spec) == ["jpg", "seg.png"]
    assert read_all(source) == [{"jpg": RECORDS[index], "seg.png": b"s%d" % index} for index in range(20)]


def test_bad_tar_files_are_refused_in_words(tmp_path: Path) -> None:
    members = [(f"{index:03}.{key}", RECORDS[index]) for index in range(20) for key in ("cls", "jpg")]
    path = write_tar(tmp_path / "a.tar", members[:-1])
    with pytest.raises(
        InvalidError, match=r"the first sample of the data has cls, jpg, and in sample '019' 019.jpg is missing"
    ):
        _ = sources.tar(path).samples
    write_tar(path, [*members, ("020.cls", b""), ("020.jpg", b""), ("020.txt", b"")])
    with pytest.raises(InvalidError, match=r"in sample '020' 020.txt is there"):
        _ = sources.tar(path).samples
    write_tar(path, [("0.jpg", b""), ("0.JPG", b"")])
    with pytest.raises(InvalidError, match="is there twice in one sample"):
        _ = sources.tar(path).samples
    write_tar(path, members)
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(InvalidError, match="it is torn|is damaged"):
        _ = sources.tar(path).samples
    path.write_bytes(b"x" * 5000)
    with pytest.raises(InvalidError, match="the head at byte 0 is damaged, or this is no tar file"):
        _ = sources.tar(path).samples
    write_tar(path, members, mode="w:gz")
    with pytest.raises(InvalidError, match=r"it is compressed \(gzip\)"):
        _ = sources.tar(path).samples
    write_tar(path, [("README", b"")])
    with pytest.raises(InvalidError, match="the files hold no samples"):
        _ = sources.tar(path).samples


def test_rows_of_arrays_are_samples(tmp_path: Path) -> None:
    file = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.int16, (100, 3))
    file[:] = np.arange(300).reshape(100, 3)
    file.flush()
    part = np.load(tmp_path / "x.npy", mmap_mode="r")[40:]
    source = sources.as_source({"file": part, "memory": [np.arange(60) % 7 == 0, np.array(["a", "bc"] * 30)]})
    assert source.samples == 60
    sample = read_all(source)[5]
    assert sample["file"].tolist() == [135, 136, 137]
    assert [one.tolist() if hasattr(one, "tolist") else one for one in sample["memory"]] == [False, b"bc"]
    assert sources._file_of(part) == (str(tmp_path / "x.npy"), 128 + 240)  # only its rows are read from the file


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int64", "float16", "float64"])
def test_rows_of_any_numbers_are_read_from_a_file(tmp_path: Path, dtype: str) -> None:
    rows = np.arange(-2, 2).reshape(2, 2).astype(dtype)
    np.save(tmp_path / "x.npy", rows)
    (first, second) = read_all(sources.as_source(np.load(tmp_path / "x.npy", mmap_mode="r")))
    assert first.dtype == second.dtype == np.dtype(dtype)
    assert np.array_equal([first, second], rows)


def test_arrays_are_known_again_by_their_bytes_and_files_by_their_times(tmp_path: Path) -> None:
    array = np.arange(1000.0)
    first = sources.arrays((array, array[::-1]))
    assert sources.arrays((array.copy(), array[::-1].copy())).digest == first.digest
    assert sources.arrays({"x": array, "y": array[::-1]}).digest != first.digest
    other = array.copy()
    other[999] += 1
    assert sources.arrays((other, array[::-1])).digest != first.digest
    assert sources.arrays(np.array(["a", "b"], object)).digest != sources.arrays(np.array(["a", "c"], object)).digest


def test_what_no_array_is_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="must have the same number of rows; they have 3, 4"):
        sources.arrays((np.arange(3), np.arange(4)))
    with pytest.raises(InvalidError, match="must have at least one row"):
        sources.arrays(np.zeros((0, 3)))
    with pytest.raises(InvalidError, match=r"arrays \(a scalar\): each array needs a first dimension"):
        sources.arrays(np.float32(3))
    with pytest.raises(InvalidError, match=r"arrays \(function\): must be arrays"):
        sources.as_source(write_tar)
    with pytest.raises(InvalidError, match="put the cache behind it instead"):
        sources.as_source(tf.data.Dataset.range(3))
    with pytest.raises(InvalidError, match=r"say what lies there: hvd.data.folder\(path\)"):
        sources.as_source(tmp_path)


def test_a_million_samples_are_a_few_bytes_each() -> None:
    for largest, dtype in ((255, np.uint8), (256, np.uint16), (1 << 20, np.uint32), (1 << 40, np.int64)):
        values = record_files.smallest([0, largest])
        assert values.dtype == dtype and values.tolist() == [0, largest]
    assert sources._common([b"n01_12.JPEG", b"n01_7.JPEG", b"n01_99.JPEG"]) == (b"n01_", b".JPEG")
    assert sources._common([b"aa", b"aaa"]) == (b"aa", b"")
