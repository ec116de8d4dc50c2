"""Sources of samples: what they find, what they read, and what they refuse."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from hvd_ext.data import arrays, folders, native, record_files, tar_files, tfrecord_files
from hvd_ext.data.cache import DataCache
from hvd_ext.errors import InvalidError
from tests.unit.data.caching import RECORDS, flip_a_bit, read_all


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


def write_records(path: Path, records: list[bytes]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def record_head(nbytes: int) -> bytes:
    """Give the head of a record, with its right checksum."""
    length = nbytes.to_bytes(8, "little")
    crc = native.load().hvd_ext_cache_crc32c(0, length, 8)
    return length + tfrecord_files._masked(crc).to_bytes(4, "little")


def test_a_folder_has_its_files_in_order_with_the_labels_of_their_class_folders(classes: Path) -> None:
    source = folders.folder(classes, "*.jpg")
    assert source.samples == 26
    assert source.class_names == ["cat", "dog"]
    paths = [source.place_of(index) for index in range(26)]
    assert paths == sorted(paths, key=lambda path: (str(Path(path).parent), path))
    for path, (contents, label) in zip(paths, read_all(source), strict=True):
        assert contents == Path(path).read_bytes()
        assert label == (0 if "/cat/" in path else 1)
    assert source.element_spec == (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32))
    plain = read_all(folders.folder(classes / "cat", "cat_*.jpg", labels=False))
    assert (plain[0], plain[11]) == (b"cat 0", b"cat 9")


def test_a_folder_is_known_again_by_names_sizes_and_times(classes: Path) -> None:
    first = folders.folder(classes, "*.jpg")
    assert folders.folder(classes, "*.jpg").digest == first.digest
    assert folders.folder(classes).digest != first.digest
    os.utime(classes / "cat" / "cat_3.jpg", (1, 1))
    touched = folders.folder(classes, "*.jpg")
    assert touched.digest != first.digest and touched.contents == first.contents
    (classes / "cat" / "cat_3.jpg").write_bytes(b"longer than before")
    assert folders.folder(classes, "*.jpg").contents != first.contents


def test_class_folders_without_files_count_because_they_shift_labels(classes: Path) -> None:
    first = folders.folder(classes, "*.jpg")
    without_labels = folders.folder(classes, "*.jpg", labels=False)
    (classes / "bird").mkdir()
    second = folders.folder(classes, "*.jpg")
    assert second.digest != first.digest and second.contents != first.contents
    assert folders.folder(classes, "*.jpg", labels=False).digest == without_labels.digest


def test_links_of_a_folder_are_followed(classes: Path) -> None:
    (classes / "puma").symlink_to(classes / "cat", target_is_directory=True)
    (classes / "dog" / "other.jpg").symlink_to(classes / "cat" / "cat_3.jpg")
    source = folders.folder(classes, "*.jpg")
    assert source.class_names == ["cat", "dog", "puma"]
    samples = read_all(source)
    assert [sum(label == number for _, label in samples) for number in range(3)] == [13, 14, 13]
    assert (b"cat 3", 1) in samples and (b"cat 3", 2) in samples


@pytest.mark.parametrize(
    ("place", "target", "words"),
    [
        ("cat/x.jpg", "missing", "cat/x.jpg.*it is a link to 'missing', which is missing or leads back to itself"),
        ("cat/x.jpg", "x.jpg", "cat/x.jpg.*it is a link to 'x.jpg', which is missing or leads back to itself"),
        ("cow", "missing", "cow.*it is a link to 'missing'"),  # a folder, as far as the name can tell
        ("cow", "cow", "cow.*it is a link to 'cow'"),
        ("cat/up", "..", "up.*it is a link to a folder that holds it, so its files would never end"),
        ("dog/back", "../cat", "cat/to/back.*it is a link to a folder that holds it"),
    ],
)
def test_links_that_lead_to_no_file_are_refused_in_words(classes: Path, place: str, target: str, words: str) -> None:
    if place == "dog/back":
        (classes / "cat" / "to").symlink_to("../dog")
    (classes / place).symlink_to(target)
    with pytest.raises(InvalidError, match=words):
        folders.folder(classes, "*.jpg")


def test_a_pipe_counts_only_if_its_name_matches(classes: Path) -> None:
    os.mkfifo(classes / "cat" / "notes")
    assert folders.folder(classes, "*.jpg").samples == 26
    os.mkfifo(classes / "cat" / "x.jpg")
    with pytest.raises(InvalidError, match="cat/x.jpg.*it is neither a file nor a folder"):
        folders.folder(classes, "*.jpg")


def test_a_folder_says_what_its_pattern_leaves_out(classes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (classes / "cat" / "a.JPG").write_bytes(b"")
    (classes / "cat" / "README").write_bytes(b"")
    source = folders.folder(classes, "*.jpg")
    words = ["'*.jpg' leaves out 2 *.txt", "1 *.JPG", "1 without an extension"]
    assert sorted(source.left_out.split(", ")) == sorted(words)
    assert source.words == f"folder {classes}: 26 files; {source.left_out}"
    assert folders.folder(classes).left_out == ""
    DataCache("left-out", source, memory="1MB").close()
    assert f"cache left-out: {source.words}" in capfd.readouterr().err
    with pytest.raises(InvalidError, match=r"no file is called '\*.jpeg'; .*leaves out 26 \*.jpg, 2 \*.txt, "):
        folders.folder(classes, "*.jpeg")
    with pytest.raises(InvalidError, match=r"no file is called '\*.png'; check the path and pattern="):
        folders.folder(classes, "*.png")
    (classes / "top.jpg").write_bytes(b"")
    with pytest.raises(InvalidError, match="'top.jpg' lies in no class folder, so it has no label"):
        folders.folder(classes, "*.jpg")


def test_records_of_several_files_are_read_by_number(tmp_path: Path) -> None:
    write_records(tmp_path / "b.tfrecord", RECORDS[30:])
    write_records(tmp_path / "a.tfrecord", RECORDS[:30])
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    source = tfrecord_files.tfrecord([tmp_path / "b.tfrecord", str(tmp_path / "*.tfrecord")])
    assert source.samples == 50  # each file once, in the order of their names
    assert read_all(source) == RECORDS
    assert source.place_of(31) == f"{tmp_path}/b.tfrecord, its sample 1"


def test_a_pattern_is_looked_for_from_the_working_directory_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "with [spaces] and * \u00fc"
    folder.mkdir()
    write_records(folder / "a b.tfrecord", RECORDS[:3])
    (folder / "folder.tfrecord").mkdir()
    monkeypatch.chdir(folder)
    for files in ("*.tfrecord", Path("a b.tfrecord"), folder / "a b.tfrecord"):
        source = tfrecord_files.tfrecord(files)
        assert read_all(source) == RECORDS[:3]
        assert source.place_of(1) == f"{folder}/a b.tfrecord, its sample 1"
    (folder / "b.tfrecord").symlink_to("missing")
    with pytest.raises(InvalidError, match="b.tfrecord.*it is a link to 'missing', which is missing"):
        tfrecord_files.tfrecord("*.tfrecord")


def test_an_index_is_kept_for_the_next_job_unless_it_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS)

    def opened() -> Any:
        source = tfrecord_files.tfrecord(path)
        source.open(tmp_path / "kept")
        return source

    opened()
    (index,) = (tmp_path / "kept").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tfrecord_files._TFRecord, "_scan", None)  # the file is not read again
        assert read_all(opened()) == RECORDS
    intact = index.read_bytes()
    for damaged in (intact[:100], intact[:-1] + bytes([intact[-1] ^ 1]), b""):
        index.write_bytes(damaged)
        assert opened().samples == 50
    write_records(path, RECORDS[:7])
    assert opened().samples == 7


def test_an_index_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    source = tfrecord_files.tfrecord(write_records(tmp_path / "a.tfrecord", RECORDS))
    source.open(tmp_path / "file")
    assert source.samples == 50


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[:-5], "it is torn: the record at byte .* has 1,813 bytes, and the file ends"),
        (lambda whole: whole + whole[:5], "it is torn: a record begins at byte"),
        # the first record has no data: the head of the second one begins at byte 16
        (lambda whole: whole[:16] + b"\0" + whole[17:], "at byte 16 is damaged, or this is no TFRecord file"),
        (lambda whole: whole + record_head(2**64 - 1), r"record at byte [\d,]+ has 18,446,744,073,709,551,615 bytes"),
        (gzip.compress, r"it is compressed \(gzip\)"),
        (lambda whole: b"", "the files hold no samples"),
    ],
)
def test_torn_damaged_and_compressed_records_are_refused_in_words(tmp_path: Path, damage: Any, words: str) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidError, match=words):
        _ = tfrecord_files.tfrecord(path).samples


def test_a_flipped_byte_of_a_record_is_found_and_its_file_and_record_are_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", RECORDS[10:14])
    flip_a_bit(path, -10)  # in the data of the last record
    with pytest.raises(tf.errors.DataLossError, match=rf"file \({path}\): the checksum of the 481 bytes from byte"):
        read_all(tfrecord_files.tfrecord(path))
    cache = DataCache("damaged", tfrecord_files.tfrecord(path), memory="1MB")
    with pytest.raises(tf.errors.OpError, match=r"sample 3 \(.*a.tfrecord, its sample 3\): it could not be loaded"):
        list(cache.dataset(4))
    replaced = DataCache("damaged", tfrecord_files.tfrecord(path), memory="1MB", on_error="replace")
    (batch,) = replaced.dataset(4)
    assert batch.numpy().tolist() == [*RECORDS[10:13], RECORDS[10]]
    cache.close()
    replaced.close()


def test_rows_of_arrays_are_samples(tmp_path: Path) -> None:
    file = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.int16, (100, 3))
    file[:] = np.arange(300).reshape(100, 3)
    file.flush()
    part = np.load(tmp_path / "x.npy", mmap_mode="r")[40:]
    source = arrays.as_source({"file": part, "memory": [np.arange(60) % 7 == 0, np.array(["a", "bc"] * 30)]})
    assert source.samples == 60
    sample = read_all(source)[5]
    assert sample["file"].tolist() == [135, 136, 137]
    assert [one.tolist() if hasattr(one, "tolist") else one for one in sample["memory"]] == [False, b"bc"]
    assert arrays._file_of(part) == (str(tmp_path / "x.npy"), 128 + 240)  # only its rows are read from the file


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int64", "float16", "float64"])
def test_rows_of_any_numbers_are_read_from_a_file(tmp_path: Path, dtype: str) -> None:
    rows = np.arange(-2, 2).reshape(2, 2).astype(dtype)
    np.save(tmp_path / "x.npy", rows)
    (first, second) = read_all(arrays.as_source(np.load(tmp_path / "x.npy", mmap_mode="r")))
    assert first.dtype == second.dtype == np.dtype(dtype)
    assert np.array_equal([first, second], rows)


def test_arrays_are_known_again_by_their_bytes_and_files_by_their_times(tmp_path: Path) -> None:
    array = np.arange(1000.0)
    first = arrays.as_source((array, array[::-1]))
    assert arrays.as_source((array.copy(), array[::-1].copy())).digest == first.digest
    assert arrays.as_source({"x": array, "y": array[::-1]}).digest != first.digest
    other = array.copy()
    other[999] += 1
    assert arrays.as_source((other, array[::-1])).digest != first.digest
    texts = [arrays.as_source(np.array(["a", text], object)).digest for text in "bc"]
    assert texts[0] != texts[1]


def test_an_array_in_a_file_that_was_changed_in_memory_is_read_from_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(6))
    changed = np.load(tmp_path / "y.npy", mmap_mode="c")
    changed -= 1
    source = arrays.as_source(changed)
    assert [int(row) for row in read_all(source)] == [-1, 0, 1, 2, 3, 4]
    assert source.digest == arrays.as_source(np.arange(6) - 1).digest


def test_arrays_in_files_count_with_the_names_of_the_files(tmp_path: Path) -> None:
    found = []
    for name in ("fold0.npy", "fold1.npy"):
        np.save(tmp_path / name, np.arange(6))
        os.utime(tmp_path / name, (1, 1))
        found.append(arrays.as_source(np.load(tmp_path / name, mmap_mode="r")))
    assert found[0].digest != found[1].digest


STRINGS = ["a", "b\u00fc"]


@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "T"] if hasattr(np.dtypes, "StringDType") else ["U3", "S3", "O"])
def test_strings_of_every_kind_are_read(dtype: str) -> None:
    texts = [text.encode() if dtype == "S3" else text for text in STRINGS]
    values = np.array(texts, np.dtypes.StringDType() if dtype == "T" else dtype)
    assert read_all(arrays.as_source(values)) == [text.encode() for text in STRINGS]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\].*give dates as numbers"),
        (np.array([1], "m8[s]"), r"timedelta64\[s\].*give times as numbers"),
        (np.array([np.datetime64("2020-01-01")], object), "objects: date.*make an array of numbers or of strings"),
        (np.array(["a", None], object), "objects: NoneType.*make an array of numbers or of strings"),
        (np.zeros(1, [("a", "i4"), ("b", "f4")]), "give its fields as arrays of their own"),
        (np.zeros(1, np.longdouble), r"float128\): must hold numbers or strings that TensorFlow has; cast it"),
    ],
)
def test_values_that_tensorflow_does_not_have_are_refused_in_words(values: np.ndarray, words: str) -> None:
    with pytest.raises(InvalidError, match=rf"arrays \(.*{words}"):
        arrays.as_source((np.zeros(1), values))


@pytest.mark.parametrize(
    ("source", "given", "words"),
    [
        (folders.folder, "nothing", "there is no such folder"),
        (folders.folder, "gs://bucket/data", "must be on a local or mounted file system"),
        (tfrecord_files.tfrecord, "*.tfrecord", "there is no such file"),
        (tar_files.tar, [], "no files were named"),
        (tar_files.tar, "https://host/a.tar", "must be on a local or mounted file system"),
        (tar_files.tar, [3], r"tar \(3\): must be a path"),
        (arrays.as_source, (np.arange(3), np.arange(4)), "must have the same number of rows; they have 3, 4"),
        (arrays.as_source, np.zeros((0, 3)), "must have at least one row"),
        (arrays.as_source, np.float32(3), r"arrays \(a scalar\): each array needs a first dimension"),
        (arrays.as_source, write_records, r"arrays \(function\): must be arrays"),
        (arrays.as_source, tf.ragged.constant([[1], [2, 3]]), r"arrays \(\w+\): must be dense; make a data set of it"),
        (arrays.as_source, tf.sparse.from_dense([[1], [0]]), r"arrays \(\w+\): must be dense; make a data set of it"),
        (arrays.as_source, scipy.sparse.csr_array([[1]]), r"arrays \(\w+\): must be dense; make a data set of it"),
        (arrays.as_source, tf.data.Dataset.range(3), "put the cache behind it instead"),
        (arrays.as_source, Path(), r"say what lies there: hvd.data.folder\(path\)"),
    ],
)
def test_what_cannot_be_a_source_is_refused_in_words(
    source: Callable[..., Any], given: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidError, match=words):
        _ = source(given).samples


def test_a_million_samples_are_a_few_bytes_each() -> None:
    for largest, dtype in ((255, np.uint8), (256, np.uint16), (1 << 20, np.uint32), (1 << 40, np.int64)):
        values = record_files.smallest([0, largest])
        assert values.dtype == dtype and values.tolist() == [0, largest]
    assert folders._common([b"n01_12.JPEG", b"n01_7.JPEG", b"n01_99.JPEG"]) == (b"n01_", b".JPEG")
    assert folders._common([b"aa", b"aaa"]) == (b"aa", b"")
