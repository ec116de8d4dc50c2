"""The study of cached pictures: what the network sees of each way to keep them, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.studies.data import cached_pictures as study
from hvd_ext.bench.pictures import write_pictures
from hvd_ext.errors import InvalidError

NAMES = [f"shape{one}_texture{one}_colour{one}" for one in range(4)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of four classes."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 8), ("test", 4)):
        for place, path in enumerate(write_pictures(folder / "all" / split, count, study.SIDE, study.SIDE)):
            target = folder / split / NAMES[place % 4] / Path(path).name
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
