"""What the processes of the data benchmark do: samples, sources, contestants, and what they find wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.bench import data_first, data_half, data_hits, data_many, data_pictures, data_second
from hvd_ext.bench.data_goals import CPU, DECODED, FIRST_BATCH, HITS, PRIVATE, SOURCE_BYTES, START, STATE
from hvd_ext.bench.data_memory import private_bytes, pss_bytes, spent
from hvd_ext.bench.data_pictures import Numbered, Source, decoded, write_pictures
from hvd_ext.bench.data_ways import theirs
from hvd_ext.bench.data_worker import Task, teller
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.data import store

SCALE = 1 / 4096  # as few samples as can be


def measured(module: Any, task: Task) -> dict[tuple[str, str], list[Any]]:
    """Measure a part in this process; give samples by contestant and quantity, and check that nothing was wrong."""
    task.path(EVENTS).unlink(missing_ok=True)
    module.measure(task, teller(task))
    found: dict[tuple[str, str], list[Any]] = {}
    for event in Follower(task.path(EVENTS)).new():
        assert not event["facts"].get("wrong"), event
        found.setdefault((event["contestant"], event["quantity"]), []).extend(event["samples"])
    return {key: samples for key, samples in found.items() if samples}


def test_a_numbered_picture_is_the_same_with_and_without_tensorflow() -> None:
    numbered = Numbered(8, pool=7)
    for number in (0, 6, 7, 5000):
        picture, label = numbered.load(tf.constant(number, tf.int64))
        np.testing.assert_array_equal(picture, numbered.pictures([number])[0])
        assert (int(label), label.dtype) == (number, tf.int32)
    assert len(np.unique(numbered.pictures(range(1000)).reshape(1000, -1), axis=0)) == 1000


def test_a_picture_of_another_sample_is_found() -> None:
    numbered = Numbered(8)
    pictures = numbered.pictures([3, 4, 5])
    assert numbered.fault(pictures, [3, 4, 5]) == ""
    assert "sample 7" in numbered.fault(pictures, [3, 7, 5])


def test_photographs_are_the_same_each_time_and_decode_to_their_size(tmp_path: Path) -> None:
    first = write_pictures(tmp_path / "a", 3, 40, 56)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "000000.jpg").write_bytes(Path(first[0]).read_bytes())
    second = write_pictures(tmp_path / "b", 3, 40, 56)
    assert [Path(one).read_bytes() for one in first] == [Path(one).read_bytes() for one in second]
    assert len({Path(one).read_bytes() for one in first}) == 3
    picture = decoded(tf.io.read_file(first[2]), 24)
    assert (picture.shape, picture.dtype) == ((24, 24, 3), tf.uint8)
    assert np.std(picture) > 20


def test_readers_of_a_slow_source_share_its_rate(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(20_000))
    readers = [Source(tmp_path / "shared", 1e6, 0.0) for _ in range(2)]
    begin = time.monotonic()
    for _ in range(3):
        assert [one.read(str(file).encode()) for one in readers] == [bytes(20_000)] * 2
    assert time.monotonic() - begin >= 0.119  # 120 kB at 1 MB/s
    assert [(one.files, one.bytes) for one in readers] == [(3, 60_000)] * 2


def test_a_file_takes_its_time_however_small_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    source = Source(tmp_path / "own", 1e9, 0.02)
    begin = time.monotonic()
    for _ in range(3):
        source.read(str(file))
    assert time.monotonic() - begin >= 0.06


def test_memory_of_a_process_is_seen() -> None:
    before, shared = private_bytes(), pss_bytes()
    kept = np.ones(30_000_000, np.uint8)
    assert private_bytes() - before > 25_000_000
    assert pss_bytes() - shared > 25_000_000
    assert spent(lambda: kept.sum())[2] == kept.size


def test_an_unknown_way_of_tf_data_keeps_nothing_and_ours_is_refused(tmp_path: Path) -> None:
    samples = tf.data.Dataset.range(3)
    assert theirs("decode", samples, tmp_path) is samples
    with pytest.raises(ValueError, match="is not one of"):
        theirs("datacache", samples, tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little pictures and small batches, in all parts."""
    monkeypatch.setattr(data_pictures, "HEIGHT", 40)
    monkeypatch.setattr(data_pictures, "WIDTH", 56)
    monkeypatch.setattr(data_hits, "BATCH", 8)
    for module in (data_first, data_second):
        monkeypatch.setattr(module, "BATCH", 4)
        monkeypatch.setattr(module, "write_pictures", lambda folder, count: write_pictures(folder, count, 40, 56))
    monkeypatch.setattr(data_half, "BATCH", 8)
    monkeypatch.setattr(data_half, "SIDE", 16)


def test_contestants_of_hits_hand_over_every_sample(tmp_path: Path, small: None) -> None:
    names = ("memcpy", "datacache", "cache", "cache-file", "snapshot", "memmap", "decode")
    found = measured(data_hits, Task("hits", str(tmp_path), 1 / 64, 2, names, {"side": 16}))
    assert set(found) == {(name, quantity) for name in names for quantity in (CPU, START)}
    assert all(len(samples) == 2 and min(samples) >= 0 for samples in found.values())


def test_contestants_that_lose_or_mix_samples_are_found() -> None:
    numbered = Numbered(8)

    def epochs(numbers: list[int], labels: list[int]) -> Any:
        def given(passes: int) -> Iterator[tuple[Any, Any]]:
            yield numbered.pictures(numbers), np.array(labels)

        return data_hits.Contestant("x", given, 1)

    assert data_hits.fault_of(epochs([2, 0, 1], [2, 0, 1]), numbered, 3) == ""
    assert "every sample once" in data_hits.fault_of(epochs([2, 0], [2, 0]), numbered, 3)
    assert "every sample once" in data_hits.fault_of(epochs([2, 0, 0], [2, 0, 0]), numbered, 3)
    assert "is another one" in data_hits.fault_of(epochs([2, 1, 0], [2, 0, 1]), numbered, 3)


def test_the_first_epoch_is_measured_with_an_empty_cache_each_time(tmp_path: Path, small: None) -> None:
    names = ("decode", "datacache", "cache-file")
    found = measured(data_first, Task("first", str(tmp_path), SCALE, 2, names))
    assert {key: len(samples) for key, samples in found.items()} == {(name, CPU): 2 for name in names}


def test_the_second_job_counts_what_it_reads(tmp_path: Path, small: None) -> None:
    names = ("datacache-disk", "datacache-keep", "cache-file", "decode")
    kept = data_second.kept_name(Task("second", str(tmp_path)))
    measured(data_second, Task("second", str(tmp_path), SCALE, 1, names, {"fill": True}))
    assert [one.name for one in store.in_memory()].count(kept) == 1
    found = measured(data_second, Task("second", str(tmp_path), SCALE, 1, names, {"turn": 0}))
    data_second.clear_kept(Task("second", str(tmp_path)))
    assert [one.name for one in store.in_memory()].count(kept) == 0
    assert {name: found[name, DECODED] for name in names} == {name: [8 * (name == "decode")] for name in names}
    assert found["datacache-disk", SOURCE_BYTES] == [0] and found["decode", SOURCE_BYTES][0] > 8 * 500
    assert all(found[name, FIRST_BATCH][0] > 0 for name in names)


def test_half_of_the_samples_find_room(tmp_path: Path, small: None) -> None:
    found = measured(data_half, Task("half", str(tmp_path), 1 / 64, 2, ("datacache",)))
    assert found["datacache", HITS] == pytest.approx([0.43, 0.43], abs=0.07)  # small samples have large headers


def test_an_iterator_that_shuffles_everything_is_kept_whole(tmp_path: Path) -> None:
    found = measured(data_many, Task("many", str(tmp_path), 1 / 256, 1, ("shuffle",)))
    assert found["shuffle", STATE][0] > 8 * 5000 and ("shuffle", PRIVATE) in found
