"""The benchmark of data: samples, sources, contestants, how rows are judged by goals, and the study of pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.data import (
    cached_pictures as study,
    first as data_first,
    half as data_half,
    hits as data_hits,
    many as data_many,
    second as data_second,
)
from benchmarks.studies.data.goals import (
    CPU,
    DECODED,
    FIRST_BATCH,
    FIRST_WAIT,
    GOALS,
    HITS,
    LATER_WAIT,
    MEMORY,
    PRIVATE,
    SOURCE_BYTES,
    START,
    STATE,
    TRAINING,
    UNITS,
    judged,
)
from benchmarks.studies.data.jobs import CONTESTANTS, NAMES, PARTS, rows_of
from benchmarks.studies.data.memory import private_bytes, pss_bytes, spent
from benchmarks.studies.data.ranks import NOTHING, beside_nothing
from benchmarks.studies.data.results import BENCHMARK, figure, missed
from benchmarks.studies.data.samples import Numbered, Source
from benchmarks.studies.data.ways import theirs
from benchmarks.studies.data.worker import Task, teller
from hvd_ext.bench import pictures, results
from hvd_ext.bench.pictures import decoded, write_pictures
from hvd_ext.bench.sampling import EVENTS, Follower
from hvd_ext.data import store
from hvd_ext.errors import InvalidError

SCALE = 1 / 4096  # as few samples as can be


def event(place: str, contestant: str, quantity: str, samples: list[float], **facts: Any) -> dict[str, Any]:
    return {"place": place, "contestant": contestant, "quantity": quantity, "samples": samples, "facts": facts}


def by_contestant(rows: list[dict[str, Any]], place: str) -> dict[str, dict[str, Any]]:
    return {row["contestant"]: row for row in rows if row["place"] == place}


def test_every_part_has_a_module_contestants_and_names() -> None:
    assert set(PARTS) == set(CONTESTANTS)
    assert all(find_spec(f"benchmarks.studies.data.{part}") for part in PARTS)
    assert {name for names in CONTESTANTS.values() for name in names} == set(NAMES)
    assert {goal.part for goal in GOALS} == set(PARTS)
    assert {goal.quantity for goal in GOALS} <= set(UNITS)


def test_samples_of_several_processes_are_one_row_and_the_first_fault_stays() -> None:
    told = [
        event("photographs", "decode", FIRST_BATCH, [0.5], count=10),
        event("photographs", "decode", FIRST_BATCH, [0.7], count=10, wrong="9 samples"),
        event("photographs", "decode", FIRST_BATCH, [0.6], count=10, wrong=""),
        event("photographs", "cache", FIRST_BATCH, []),
    ]
    (row,) = rows_of("second", told)
    assert row["samples"] == [0.5, 0.7, 0.6]
    assert (row["wrong"], row["unit"], row["count"]) == ("9 samples", "s", 10)


def test_goals_are_medians_of_the_ratios_of_turns_with_what_was_measured() -> None:
    micros = {"27.6 kB": {"memcpy": 4, "datacache": 6, "cache": 8}, "3.1 kB": {"datacache": 3, "cache": 5}}
    told = [
        event(place, name, CPU, [0.9e-6 * micro, 1e-6 * micro, 1.3e-6 * micro])
        for place, times in micros.items()
        for name, micro in times.items()
    ]
    told[1]["samples"] = [9e-6, 6e-6, 7.8e-6]  # x memcpy 2.5, 1.5, 1.5
    rows = judged(rows_of("hits", told))
    large, small = (by_contestant(rows, place) for place in micros)
    memcpy, cache = large["datacache"]["goals"]
    assert (memcpy["over"], memcpy["most"], memcpy["measured"], memcpy["met"]) == (
        "memcpy",
        1.8,
        pytest.approx(1.5),
        True,
    )
    assert cache["measured"] == pytest.approx(0.75)
    (over_cache,) = small["datacache"]["goals"]
    assert (over_cache["measured"], over_cache["met"]) == (pytest.approx(0.6), False)
    assert all(not row["goals"] for row in rows if row["contestant"] != "datacache")
    assert [line for line in missed(rows) if "3.1 kB" in line and "at most 0.5: MISSED" in line] == missed(rows)
    (alone,) = judged(rows_of("hits", [event("27.6 kB", "datacache", CPU, [1e-5])]))
    assert alone["goals"] == []  # what it would be compared with was not measured


def test_memory_counts_beside_the_job_without_data() -> None:
    facts = {"data_bytes": 100_000_000, "ranks": 4}
    told = [
        event("summed PSS", NOTHING, MEMORY, [1.00e9, 1.01e9, 1.02e9], **facts),
        event("summed PSS", "datacache", MEMORY, [1.20e9, 1.21e9, 1.19e9], **facts),
        event("summed PSS", "cache", MEMORY, [1.5e9] * 3, **facts),
    ]
    rows = by_contestant(judged(beside_nothing(rows_of("ranks", told))), "summed PSS")
    assert set(rows) == {"datacache", "cache"}
    assert rows["datacache"]["median"] == pytest.approx(0.19e9)
    (goal,) = rows["datacache"]["goals"]
    assert (goal["most"], goal["met"]) == (pytest.approx(190e6), True)
    (goal,) = judged([{**rows["cache"], "contestant": "datacache"}])[0]["goals"]
    assert goal["met"] is False


def test_waiting_is_compared_with_our_first_epoch_and_training_with_reading_every_time() -> None:
    told = [
        event("2 hosts", "datacache", FIRST_WAIT, [0.08, 0.09, 0.1]),
        event("2 hosts", "datacache", LATER_WAIT, [0.008, 0.0045, 0.02]),
        event("2 hosts", "datacache", TRAINING, [4.0, 4.0, 4.0]),
        event("2 hosts", "decode", TRAINING, [9.0, 7.0, 10.0]),
    ]
    rows = {row["quantity"]: row for row in judged(rows_of("slow", told)) if row["contestant"] == "datacache"}
    (wait,) = rows[LATER_WAIT]["goals"]
    assert (wait["over"], wait["measured"], wait["met"]) == (FIRST_WAIT, pytest.approx(0.1), True)
    (speed,) = rows[TRAINING]["goals"]
    assert (speed["least"], speed["measured"], speed["met"]) == (2.0, 2.25, True)


def test_figures_have_their_units() -> None:
    figures = [(7.5e-6, "s"), (-0.002, "s"), (2e7, "bytes"), (12, "bytes"), (0.5004, "share"), (1024, "samples")]
    assert [figure(*pair) for pair in figures] == ["7.5 us", "-2 ms", "20 MB", "12 B", "0.5004", "1,024"]


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


def test_readers_of_a_slow_source_share_its_rate_and_a_file_takes_its_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(20_000))
    for rate, file_s, least_s in ((1e6, 0.0, 0.119), (1e9, 0.02, 0.06)):  # 120 kB at 1 MB/s; three reads one by one
        readers = [Source(tmp_path / f"shared{file_s}", rate, file_s) for _ in range(2)]
        begin = time.monotonic()
        for _ in range(3):
            assert [one.read(str(file).encode()) for one in readers] == [bytes(20_000)] * 2
        assert time.monotonic() - begin >= least_s
        assert [(one.files, one.bytes) for one in readers] == [(3, 60_000)] * 2


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
    monkeypatch.setattr(pictures, "HEIGHT", 40)
    monkeypatch.setattr(pictures, "WIDTH", 56)
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


def test_the_command_measures_a_part_in_a_process_and_keeps_every_sample(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    words = ["data", "--parts", "half", "--scale", "1/32", "--repetitions", "2", "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    kept = results.load(file, BENCHMARK)
    (row,) = kept["rows"]
    assert (row["part"], row["contestant"], row["quantity"]) == ("half", "datacache", HITS)
    assert len(row["samples"]) == 2 and all(0.3 < one < 0.6 for one in row["samples"])
    assert row["correct"] and len(row["goals"]) == 1
    assert "scale 0.03125" in kept["runs"][0]["notes"][0]


CLASSES = [f"shape{number}_texture{number}_colour{number}" for number in range(4)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of four classes."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 8), ("test", 4)):
        for place, path in enumerate(write_pictures(folder / "all" / split, count, study.SIDE, study.SIDE)):
            target = folder / split / CLASSES[place % 4] / Path(path).name
            target.parent.mkdir(parents=True, exist_ok=True)
            Path(path).rename(target)
    return folder


def ramp(side: int) -> np.ndarray:
    """A picture whose values tell the place, and are the same shares of the side at any size: [1, side, side, 3]."""
    places = (np.arange(side) + 0.5) / side * 248
    x, y = np.meshgrid(places, places)
    return np.stack([x, y, (x + y) / 2], -1)[None]


def test_the_network_sees_the_same_part_of_pictures_of_any_size() -> None:
    seed = tf.constant([3, 4])
    whole, half, quarter = (study.augmented(tf.constant(ramp(side)), seed).numpy() for side in (64, 32, 16))
    assert whole.shape == (1, study.SEEN, study.SEEN, 3)
    np.testing.assert_allclose(whole, half, atol=1e-3)
    np.testing.assert_allclose(whole[:, 2:-2, 2:-2], quarter[:, 2:-2, 2:-2], atol=1.0)
    middle = study.central(tf.constant(ramp(64))).numpy()
    np.testing.assert_allclose(middle[0, :, :, 0].mean(), 124, atol=1e-3)
    assert middle[0, 0, 0, 0] == pytest.approx(248 * (1 / 16 + 7 / 8 / 56), rel=1e-3)


def test_half_of_the_pictures_are_mirrored_and_parts_differ() -> None:
    seen = study.augmented(tf.constant(np.repeat(ramp(64), 200, 0)), tf.constant([1, 2])).numpy()
    rising = seen[:, 0, -1, 0] > seen[:, 0, 0, 0]
    assert 60 < rising.sum() < 140
    assert len(np.unique(seen[:, 0, 0, 1].round(3))) > 100


def test_what_is_kept_is_the_file_the_picture_or_means_of_it(images: Path) -> None:
    contents = tf.io.read_file(study.splits_of(images)[0].paths[0])
    file, whole, half, quarter = (kept.load(contents) for kept in study.KEPT)
    assert file.numpy() == contents.numpy()
    np.testing.assert_array_equal(study.KEPT[0].pictures(tf.stack([file]))[0], whole)
    means = whole.numpy().astype(int).reshape(32, 2, 32, 2, 3).sum((1, 3))
    np.testing.assert_array_equal(half, (means + 2) // 4)
    assert (quarter.shape, quarter.dtype) == ((16, 16, 3), tf.uint8)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="must be an image set"):
        study.splits_of(tmp_path)


@pytest.mark.slow
def test_the_study_measures_trains_and_writes_a_row_for_each_way(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BATCH", 4)
    monkeypatch.setattr(study, "TURNS", 1)
    monkeypatch.setattr(study, "KEPT", study.KEPT[:2])  # the others take as long again
    said: list[str] = []
    study.main([str(tmp_path / "x.json"), str(images), "1", "2"], said.append)
    result = json.loads((tmp_path / "x.json").read_text())
    compressed, full = result["rows"]
    assert full["picture_bytes"] == 12288
    assert 500 < compressed["picture_bytes"] < 12288
    assert compressed["samples"] == full["samples"] and len(full["samples"]) == 2
    assert all(0 <= row["accuracy_mean"] <= 1 and row["cpu_seconds_per_picture"] > 0 for row in result["rows"])
    written = study.markdown(result)
    assert (
        written.count("\n") == 4 and "| full size | 64 x 64 | 12,288 | 15.7 GB |" in written and "| +0.00 |" in written
    )
    assert any(words.startswith("full size: ") for words in said)
