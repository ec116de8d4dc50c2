"""Writing an image set: the same bytes however it is made, nothing half there, and words for what goes wrong.

What the images show: classes that need shape, texture and colour, and no single pixel statistic that tells them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import manifest, writing
from images.classes import COLOURS, MAX_CLASSES, SHAPES, TEXTURES, ImageClass, classes
from images.loading import load
from images.manifest import ImageSetError, Recipe, read_manifest, write_whole
from images.scene import draw, jpeg
from images.writing import space_needed, write
from PIL import Image

RECIPE = Recipe(train=230, test=70, classes=6, pixels=16, seed=3)
SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "make_images.py"


def make(folder: Path, recipe: Recipe = RECIPE, workers: int = 1) -> dict[str, Any]:
    return write(folder, recipe, workers, lambda count: None)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*/*/*"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", workers=2)
    assert one["sha256"] == two["sha256"]
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) == RECIPE.train + RECIPE.test
    assert one["drawn"] == two["drawn"] == 300


def test_the_layout_is_split_class_number_and_loads_with_the_right_labels(tmp_path: Path) -> None:
    found = make(tmp_path / "set")
    folders = sorted(path.name for path in (tmp_path / "set" / "train").iterdir())
    assert folders == found["class_names"]
    images, labels = load(tmp_path / "set", "test")
    assert images.shape == (70, 16, 16, 3)
    assert np.bincount(labels).tolist() == [12, 12, 12, 12, 11, 11]
    for label, name in enumerate(found["class_names"]):
        assert len(list((tmp_path / "set" / "test" / name).glob("*.jpg"))) == np.sum(labels == label)
    assert load(tmp_path / "set", "train", limit=12)[1].tolist() == [0, 1, 2, 3, 4, 5] * 2


# A run that is killed half-way through its 50th image.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from images import manifest, writing
whole, images = Path.write_bytes, []
def dying(path, data):
    images.append(path) if ".jpg" in path.name else None
    if len(images) == 50:
        whole(path, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path, data)
Path.write_bytes = dying
writing.write(Path(sys.argv[2]), manifest.Recipe(230, 70, 6, 16, 3), 1, lambda count: None)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED, str(SCRIPT.parent), str(tmp_path / "cut")], check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cut").rglob("*.part"))) == 1
    assert len(list((tmp_path / "cut").rglob("*.jpg"))) == 49
    with pytest.raises(ImageSetError, match="not whole yet"):
        load(tmp_path / "cut", "train")
    cut = make(tmp_path / "cut")
    assert cut["drawn"] == 300 - 49
    assert not list((tmp_path / "cut").rglob("*.part"))
    assert cut["sha256"] == make(tmp_path / "whole")["sha256"]


def test_a_file_that_was_cut_short_is_drawn_again_and_a_whole_set_is_left_alone(tmp_path: Path) -> None:
    assert space_needed(tmp_path, RECIPE) >= 300 * os.statvfs(tmp_path).f_frsize  # whole blocks
    first = make(tmp_path)
    assert space_needed(tmp_path, RECIPE) == 0
    victim = tmp_path / RECIPE.path("train", 5)
    victim.write_bytes(victim.read_bytes()[:100])
    (tmp_path / RECIPE.path("test", 1)).unlink()
    second, third = make(tmp_path), make(tmp_path)
    assert (second["sha256"], second["drawn"]) == (first["sha256"], 2)
    assert (third["sha256"], third["drawn"]) == (first["sha256"], 0)


def test_a_set_that_was_changed_or_made_with_another_recipe_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ImageSetError, match="seed 3, this call asks for 9"):
        make(tmp_path, Recipe(230, 70, 6, 16, seed=9))
    shutil.copy(tmp_path / RECIPE.path("train", 0), tmp_path / RECIPE.path("train", 1))
    with pytest.raises(ImageSetError, match="differs from its manifest"):
        make(tmp_path)


def test_a_folder_that_holds_something_else_or_is_being_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ImageSetError, match="not empty"):
        make(tmp_path)
    with pytest.raises(ImageSetError, match="must be a folder"):
        make(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "set").mkdir()
    with (tmp_path / "set" / writing.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ImageSetError, match="being written by another process"):
            make(tmp_path / "set")
    assert make(tmp_path / "set")["complete"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(classes=1), r"classes \(1\)"),
        (Recipe(classes=1000), r"classes \(1000\)"),
        (Recipe(test=63), r"test \(63\).*64 classes"),
        (Recipe(train=-1), r"train \(-1\)"),
        (Recipe(pixels=8), r"pixels \(8\)"),
        (Recipe(seed=-1), r"seed \(-1\)"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(tmp_path: Path, recipe: Recipe, words: str) -> None:
    with pytest.raises(ImageSetError, match=words):
        make(tmp_path / "set", recipe)
    with pytest.raises(ImageSetError, match=r"workers \(0\)"):
        make(tmp_path / "set", workers=0)
    assert not (tmp_path / "set").exists()


def test_a_disk_that_is_too_small_is_refused_before_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(ImageSetError, match=r"too small.*need about \d+ MB.*0 MB are free"):
        make(tmp_path)
    assert not list(tmp_path.rglob("*.jpg"))


def test_a_disk_that_fills_up_leaves_whole_files_only_and_tells_the_space_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        calls.append(path)
        if len(calls) > 30:
            whole(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(manifest.Path, "write_bytes", full)
        with pytest.raises(ImageSetError, match=r"cannot take more: No space left.*need about \d+ MB more"):
            make(tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert len(list(tmp_path.rglob("*.jpg"))) == 29
    assert not read_manifest(tmp_path, complete=False)["complete"]
    assert make(tmp_path)["drawn"] == 271


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "x", b"old")

    def refuse(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.os, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]


def test_a_set_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ImageSetError, match=r"make_images.py --output"):
        load(tmp_path, "train")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ImageSetError, match="cannot be read"):
        load(tmp_path, "train")


@pytest.mark.slow
def test_the_command_makes_a_set_and_refuses_in_words(tmp_path: Path) -> None:
    def command(*options: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "set"), "--pixels", "16", *options]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    made = command("--train", "10", "--test", "5", "--classes", "5", "--workers", "2")
    assert made.returncode == 0, made.stderr
    assert "10 + 5 images of 5 classes" in made.stdout
    assert json.loads((tmp_path / "set" / "manifest.json").read_text())["complete"]
    refused = command("--train", "10", "--test", "5", "--classes", "500")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: classes (500)")


def test_a_set_of_64_is_a_full_cube_so_that_two_attributes_never_tell_the_class() -> None:
    found = classes(64)
    assert len(set(found)) == 64
    for attributes in itertools.combinations(("shape", "texture", "colour"), 2):
        pairs = Counter(tuple(getattr(one, name) for name in attributes) for one in found)
        assert set(pairs.values()) == {4}


@pytest.mark.parametrize("count", [2, 50, 64, 100, MAX_CLASSES])
def test_classes_are_different_and_every_split_is_balanced(count: int) -> None:
    names = [one.name for one in classes(count)]
    assert len(set(names)) == count
    assert names == sorted(names)
    recipe = Recipe(train=200, test=128, classes=count)
    for split in ("train", "test"):
        counts = Counter(recipe.class_of(index) for index in range(recipe.count(split)))
        assert max(counts.values()) - min(counts.values()) <= 1
    assert Recipe(seed=1).key("train", 0) != Recipe(seed=2).key("train", 0)
    for wrong in (0, 1, MAX_CLASSES + 1):
        with pytest.raises(ValueError, match=f"classes \\({wrong}\\)"):
            classes(wrong)


@pytest.mark.parametrize("pixels", [16, 33, 64])
def test_the_same_key_gives_the_same_bytes_of_a_square_and_another_key_another_image(pixels: int) -> None:
    one = classes(64)[7]
    image = Image.open(io.BytesIO(jpeg(one, pixels, (1, 2, 0, 5))))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (pixels, pixels))
    assert jpeg(one, pixels, (1, 2, 0, 5)) == jpeg(one, pixels, (1, 2, 0, 5)) != jpeg(one, pixels, (1, 2, 0, 6))


def test_the_three_attributes_each_change_the_image() -> None:
    first = ImageClass(SHAPES[0], TEXTURES[0], "red")
    others = (
        ImageClass(SHAPES[1], TEXTURES[0], "red"),
        ImageClass(SHAPES[0], TEXTURES[1], "red"),
        ImageClass(SHAPES[0], TEXTURES[0], list(COLOURS)[2]),
    )
    plain = np.asarray(draw(first, 64, np.random.default_rng(4)), np.int32)
    for other in others:
        assert (np.abs(np.asarray(draw(other, 64, np.random.default_rng(4)), np.int32) - plain) > 40).mean() > 0.02


def test_the_mean_colour_of_an_image_does_not_tell_its_class() -> None:
    recipe = Recipe(train=320, test=320, classes=16, pixels=16)
    means, labels = {}, np.arange(320) % 16
    for split in ("train", "test"):
        images = [draw(recipe.class_of(i), 16, np.random.default_rng(recipe.key(split, i))) for i in range(320)]
        means[split] = np.stack([np.asarray(image, np.float64).mean(axis=(0, 1)) for image in images])
    centres = np.stack([means["train"][labels == label].mean(axis=0) for label in range(16)])
    nearest = np.argmin(((means["test"][:, None] - centres) ** 2).sum(axis=2), axis=1)
    # A guess is right in 6 % of cases; knowing the colour alone would make it 25 %.
    assert (nearest == labels).mean() < 0.2
