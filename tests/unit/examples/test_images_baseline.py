"""The classifiers that show that the image set needs learning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import images_baseline
import numpy as np
import pytest
from images.manifest import Recipe
from images.writing import write

SCRIPT = Path(images_baseline.__file__)
KEPT = SCRIPT.parents[1] / "benchmarks" / "results" / "images_baseline.json"


def test_the_histogram_counts_colours_and_forgets_places() -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    found = images_baseline.colour_histogram(images)
    assert found.shape == (3, 512)
    assert np.allclose((found**2).sum(axis=1), 1)
    shuffled = images.reshape(3, -1, 3)[:, ::-1].reshape(images.shape)
    assert np.array_equal(images_baseline.colour_histogram(shuffled), found)
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    assert np.flatnonzero(images_baseline.colour_histogram(red)).tolist() == [7 * 64]


@pytest.mark.parametrize("side", [16, 40, 64])
def test_thumbnails_are_means_of_blocks(side: int) -> None:
    images = np.random.default_rng(2).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    found = images_baseline.thumbnails(images)
    block = side // 16
    assert found.shape == (2, 768)
    assert np.allclose(found[1, :3], images[1, :block, :block].mean(axis=(0, 1)) / 127.5 - 1, atol=1e-5)


def test_the_kept_figures_are_of_the_set_as_the_script_makes_it_and_show_that_it_needs_learning() -> None:
    kept = json.loads(KEPT.read_text())
    assert Recipe(**kept["recipe"]) == Recipe()
    accuracy = {score["name"]: score["accuracy"] for score in kept["scores"]}
    network = accuracy.pop("convolutional network")
    assert network > 4 * max(accuracy.values())


def test_the_page_about_the_images_shows_the_kept_figures() -> None:
    page = (SCRIPT.parents[1] / "docs" / "images.md").read_text()
    kept = json.loads(KEPT.read_text())
    assert kept["sha256"][:16] in page
    for score in kept["scores"]:
        assert f"| {score['name']} | {score['accuracy']:.1%} |" in page


@pytest.mark.slow
def test_the_command_trains_all_classifiers_on_a_small_set_and_needs_one(tmp_path: Path) -> None:
    write(tmp_path / "set", Recipe(train=60, test=30, classes=3, pixels=32), 1, lambda count: None)
    result = tmp_path / "result.json"
    images_baseline.main(tmp_path / "set", epochs=1, result=result)
    assert [score["epochs"] for score in json.loads(result.read_text())["scores"]] == [0, 20, 20, 1]
    command = [sys.executable, str(SCRIPT), "--images", str(tmp_path / "none")]
    missing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "make_images.py" in missing.stderr
