"""The DAWNBench recipe: its settings, schedules, network and pictures."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from resnet50 import network, pictures, settings, training
from resnet50.schedule import Steps
from resnet50.settings import SettingsError

from hvd_ext.data.cache import open_caches

SPECIFIED = {"smoke": (1,), "small": (1, 2, 4, 8), "dawnbench": (1, 64, 128), "imagenet90": (1, 8, 64)}


@pytest.mark.parametrize("name", settings.presets())
def test_a_preset_fits_the_jobs_that_it_is_for(name: str) -> None:
    chosen = settings.read(name)
    for ranks in SPECIFIED[name]:
        training.check(chosen, ranks)
    steps = Steps(chosen, 1_281_167 if name in ("dawnbench", "imagenet90") else chosen.data.synthetic)
    assert steps.all == sum(phase.epochs * one for phase, one in zip(chosen.phases, steps.in_epoch, strict=True))
    assert chosen.epochs == sum(phase.epochs for phase in chosen.phases)
    optimizer = training.plain(chosen.optimizer, steps)
    assert float(optimizer.learning_rate) == pytest.approx(chosen.optimizer.rate[0][1])


def test_dawnbench_is_the_public_entry() -> None:
    chosen = settings.read("dawnbench")
    steps = Steps(chosen, 1_281_167)
    assert [(phase.epochs, phase.pixels, phase.batch) for phase in chosen.phases] == [
        (13, 96, 32768),
        (11, 128, 32768),
        (3, 224, 32768),
        (1, 288, 16384),
    ]
    rate, momentum = steps.lines(chosen.optimizer.rate), steps.lines(chosen.optimizer.momentum)
    for epoch, expected in ((0, 0), (7, 12.5), (14, 25), (21, 12.6), (28, 0.2), (40, 0.2)):
        assert float(rate(steps.at(epoch))) == pytest.approx(expected, abs=1e-4)
    assert [float(momentum(steps.at(epoch))) for epoch in (0, 14, 28)] == pytest.approx([0.98, 0.9, 0.98])
    assert steps.sparse(("topk", "dense", "dense", "dense")) == 13 * 39
    assert steps.sparse(("dense",) * 4) == 0
    assert steps.sparse(("topk",) * 4) == steps.all == 13 * 39 + 11 * 39 + 3 * 39 + 78


def test_the_network_is_resnet50_with_last_gammas_of_0() -> None:
    model = network.build(settings.Network())
    assert len(model.trainable_variables) == 161
    assert sum(math.prod(one.shape) for one in model.trainable_variables) == 25_557_032
    gammas = {one.path: one.numpy() for one in model.trainable_variables if one.path.endswith("gamma")}
    zeros = sorted(path for path, values in gammas.items() if not values.any())
    assert zeros == sorted(path for path in gammas if path.split("/")[0].endswith("_3_bn"))
    assert len(zeros) == 16


def test_one_network_takes_pictures_of_all_sizes_and_mixed_precision_ends_in_float32() -> None:
    chosen = settings.read("smoke")
    model = network.build(chosen.network, mixed_precision=True)
    for rows, columns in ((16, 16), (32, 40)):
        logits = model(tf.zeros((2, rows, columns, 3), tf.uint8))
        assert logits.shape == (2, 16)
        assert logits.dtype == tf.float32
    assert {one.compute_dtype for one in model.layers if one.name.startswith("conv")} == {"float16"}
    assert {one.dtype for one in model.trainable_variables} == {"float32"}


def test_the_loss_gives_a_share_of_each_label_to_all_classes() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    labels = np.array([0, 3, 7, 3, 1])
    found = network.smoothed(0.1)(labels[:, None], tf.constant(logits)).numpy()
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert found == pytest.approx(-0.9 * logs[np.arange(5), labels] - 0.1 * logs.mean(1), rel=1e-5)


CHANGES = {
    "phases.pixels=24": lambda one: [phase.pixels for phase in one.phases] == [24] * 4,
    "phases.1.batch=48": lambda one: [phase.batch for phase in one.phases] == [24, 48, 24, 12],
    "optimizer.rate=[[0, 1], [3, 0.5]]": lambda one: one.optimizer.rate == ((0, 1), (3, 0.5)),
    "data.memory=null": lambda one: one.data.memory is None,
    "topk={density: 0.5}": lambda one: one.topk == {"density": 0.5},
    "topk.density=0.25": lambda one: one.topk == {"density": 0.25},
    "seed=7": lambda one: one.seed == 7,
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_value_is_changed(change: str) -> None:
    assert CHANGES[change](settings.read("smoke", [change]))


WRONG = {
    "phases.pixels": "KEY=VALUE",
    "=3": "KEY=VALUE",
    "seed=[": "the value must be YAML",
    "phases.4.pixels=8": "there are 4 of these, numbered from 0",
    "seed.more=1": "seed: Input should be",
    "phases.pixels=7": "phases.0.pixels",
    "phases.piksels=8": "phases.0.piksels",
    "phases.3.compression=topk": "must come before those that are dense",
    "phases.0.kept=8": r"kept \(8\) must be at least pixels \(16\)",
    "topk.until=3": "follows from the phases",
    "network.widths=[8]": "blocks and widths",
    "optimizer.rate=[[3, 1], [0, 1]]": "rising epochs",
    "optimizer.rate=[[0, -1]]": "at least 0",
    "optimizer.momentum=[[0, 1]]": "below 1",
    "optimizer.name=sgd": "that of sgd cannot change",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_change_is_refused_in_words(change: str) -> None:
    with pytest.raises(SettingsError, match=WRONG[change]):
        settings.read("smoke", [change])


def test_a_file_that_is_no_preset_is_named_with_the_presets(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="dawnbench, imagenet90, small, smoke"):
        settings.read(str(tmp_path / "none.yaml"))
    path = tmp_path / "mine.yaml"
    path.write_text(settings.written(settings.read("smoke")))
    assert settings.read(str(path)) == settings.read("smoke")
    path.write_text("[")
    with pytest.raises(SettingsError, match="cannot be read"):
        settings.read(str(path))


def test_a_training_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    settings.keep(settings.read("smoke"), folder)
    settings.keep(settings.read("smoke"), folder)
    other = settings.read("smoke", ["target=0.7", "entry.author=Somebody"])  # only reports read these
    settings.keep(other, folder)
    assert settings.read(str(folder / "settings.yaml")) == other
    with pytest.raises(SettingsError, match=r"phases\.1\.pixels \(24\): the training in .* has 20"):
        settings.keep(settings.read("smoke", ["phases.1.pixels=24"]), folder)
    with pytest.raises(SettingsError, match=r"network\.classes \(64\)"):
        settings.keep(settings.read("small"), folder)


def test_what_topk_takes_is_counted_in_steps_and_what_it_refuses_names_the_key() -> None:
    kinds = ("topk", "dense", "dense", "dense")
    for change in ("topk.densty=0.1", "topk.density=2"):
        chosen = settings.read("smoke", [change])
        with pytest.raises(SettingsError, match="^topk: .*dens"):
            training.compression(chosen, Steps(chosen, 96), kinds)
    for change, warmup, until in (("topk.warmup=1.5", 6, 8), ("topk.warmup=null", None, 8)):  # in epochs of 4 steps
        chosen = settings.read("smoke", [change])
        given = training.compression(chosen, Steps(chosen, 96), kinds)["compression"]
        assert (given.warmup and given.warmup.steps, given.until) == (warmup, until)
    assert training.compression(chosen, Steps(chosen, 96), ("topk",) * 4)["compression"].until is None
    assert training.compression(chosen, Steps(chosen, 96), ("dense",) * 4) == {}


def test_batches_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"phases\.0\.batch \(24\): 5 ranks cannot divide it evenly"):
        training.check(settings.read("smoke"), 5)
    with pytest.raises(SettingsError, match=r"phases\.0\.batch \(24\): there are only 23 pictures"):
        Steps(settings.read("smoke"), 23)


def jpeg(rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """A smooth picture, as a file and as values."""
    red, green = np.meshgrid(np.linspace(0, 255, columns), np.linspace(0, 255, rows))
    values = np.stack([red, green, np.full_like(red, 90)], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue(), values


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (48, 32), (20, 60)])
def test_a_decoded_picture_is_a_square_with_its_aspect_ratio(rows: int, columns: int) -> None:
    contents, values = jpeg(rows, columns)
    square, aspect = pictures.decoded(tf.constant(contents), 32)
    assert (square.shape, square.dtype) == ((32, 32, 3), tf.uint8)
    assert float(aspect) == pytest.approx(columns / rows)
    if rows == columns:
        assert np.array_equal(square, values)
    corners = square.numpy()[[0, -1]][:, [0, -1], :2]
    assert np.abs(corners.astype(int) - [[[0, 0], [255, 0]], [[0, 255], [255, 255]]]).max() < 12


def ramp(side: int, count: int = 1) -> tf.Tensor:
    """Pictures whose red is 4 times the column and whose green is 4 times the row."""
    across, down = np.meshgrid(np.arange(side), np.arange(side))
    one = np.stack([4 * across, 4 * down, 0 * down], -1).astype(np.uint8)
    return tf.constant(np.repeat(one[None], count, 0))


@pytest.mark.parametrize("samples", [1, 2])
def test_a_part_is_averaged_over_its_area(samples: int) -> None:
    # columns 8 to 24 and rows 0 to 16 of 32, in 8 pixels: each is the mean of two columns and two rows
    found = pictures.cut(ramp(32), tf.constant([[0.0, 0.25, 0.5, 0.75]]), 8, 8, samples).numpy().astype(int)
    assert np.abs(found[0, 0, :, 0] - 4 * (8.5 + 2 * np.arange(8))).max() <= 1
    assert np.abs(found[0, :, 0, 1] - 4 * (0.5 + 2 * np.arange(8))).max() <= 1
    whole, mirrored = [[0.0, 0.0, 1.0, 1.0]], [[0.0, 1.0, 1.0, 0.0]]
    assert np.array_equal(pictures.cut(ramp(32), tf.constant(whole), 32, 32, 1), ramp(32))
    assert np.array_equal(pictures.cut(ramp(32), tf.constant(mirrored), 32, 32, 1), ramp(32)[:, :, ::-1])


def test_random_crops_have_the_asked_areas_and_aspects_whatever_the_square() -> None:
    count, smallest = 200, 0.3
    aspects = np.exp(np.random.default_rng(2).uniform(-0.6, 0.6, count)).astype(np.float32)
    seeds = tf.constant(np.arange(2 * count).reshape(count, 2), tf.int32)
    found = pictures.cropped(ramp(60, count), tf.constant(aspects), seeds, 20, smallest).numpy().astype(float)
    # the red of the last column less that of the first one says how wide the crop was, in columns of the square
    across = (found[:, 0, -1, 0] - found[:, 0, 0, 0]) / 4 * 20 / 19 / 60
    down = (found[:, -1, 0, 1] - found[:, 0, 0, 1]) / 4 * 20 / 19 / 60
    assert 0.35 < (across < 0).mean() < 0.65  # half are mirrored
    area, ratio = np.abs(across) * down, np.abs(across) / down * aspects
    inside = (np.abs(across) < 0.98) & (down < 0.98)  # others were cut at the border
    assert inside.mean() > 0.5
    assert smallest - 0.03 < area.min()
    assert area[inside].max() < 1
    assert (np.abs(np.log(ratio[inside])) < math.log(4 / 3) + 0.06).all()
    again = pictures.cropped(ramp(60, count), tf.constant(aspects), seeds, 20, smallest).numpy()
    assert np.array_equal(found, again)


@pytest.mark.parametrize("aspect", [0.5, 0.75, 1.0, 1.33, 2.0])
def test_middles_have_one_aspect_ratio_and_seven_eighths_of_a_side(aspect: float) -> None:
    found = pictures.middles(ramp(64), tf.constant([aspect]), tf.constant(aspect), 24).numpy().astype(float)[0]
    rows, columns = found.shape[:2]
    assert min(rows, columns) == 24
    assert max(rows, columns) in (24, 8 * round(24 * max(aspect, 1 / aspect) / 8))
    across = (found[0, -1, 0] - found[0, 0, 0]) / 4 * columns / (columns - 1) / 64
    assert across == pytest.approx(7 / 8, abs=0.03)


def folder_of(path: Path, shapes: list[tuple[int, int]]) -> Path:
    for split in ("train", "val"):
        for number, (rows, columns) in enumerate(shapes):
            where = path / split / f"class{number % 2}"
            where.mkdir(parents=True, exist_ok=True)
            (where / f"{number}.png").write_bytes(jpeg(rows, columns)[0])
    return path


def opened(path: Path, **changes: Any) -> tuple[Any, pictures.Pictures]:
    values = {"data.source": str(path), "network.classes": 2, "data.memory": "10MB", "phases.batch": 4, **changes}
    chosen = settings.read("smoke", [f"{key}={value}" for key, value in values.items()])
    return chosen, pictures.Pictures(chosen)


@pytest.mark.parametrize("rectangular", [False, True])
def test_every_picture_is_validated_once(tmp_path: Path, rectangular: bool) -> None:
    shapes = [(20, 20), (20, 40), (40, 20), (30, 40), (20, 21), (24, 32), (20, 20), (28, 20), (20, 20)]
    chosen, found = opened(folder_of(tmp_path, shapes))
    phase = chosen.phases[3 if rectangular else 0]
    batches = [(seen.shape, labels.numpy().tolist()) for seen, labels in found.validation(phase)]
    assert sorted(label for _, labels in batches for label in labels) == [0] * 5 + [1] * 4
    sides = {tuple(shape[1:3]) for shape, _ in batches}
    assert (len(sides) > 2) == rectangular
    assert all(min(side) == phase.pixels for side in sides)
    found.close()


def test_training_pictures_are_new_in_each_epoch_and_the_same_in_each_job(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [(20, 24)] * 8)
    epochs, others = [], open_caches()
    for _ in range(2):
        chosen, found = opened(folder)
        data = found.training(chosen.phases[0], 2)
        epochs.append([np.concatenate([seen for seen, _ in data]) for _ in range(2)])
        assert found.train == 8
        assert [one.stats()["loaded"] for one in open_caches() if one not in others] == [8]
        found.close()
    assert np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0][0], epochs[0][1])
    assert epochs[0][0].shape == (8, 16, 16, 3)


def test_noise_needs_no_files_and_has_no_validation() -> None:
    chosen = settings.read("smoke", ["data.source=synthetic"])
    found = pictures.Pictures(chosen)
    assert found.train == 96
    (seen, labels), *others = list(found.training(chosen.phases[1], 3))
    assert (seen.shape, labels.shape, len(others)) == ((24, 20, 20, 3), (24,), 2)
    assert found.validation(chosen.phases[0]) is None


def test_tfrecord_files_are_read(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("validation", 3)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{split}-00000-of-00001")) as writer:
            for number in range(count):
                features = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg(20, 20)[0]])),
                    "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1 + number % 2])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    chosen, found = opened(tmp_path)
    assert found.train == 5
    labels = [label for _, labels in found.validation(chosen.phases[0]) for label in labels.numpy()]
    assert sorted(labels) == [0, 0, 1]
    found.close()
    chosen, found = opened(tmp_path, **{"data.first_label": 2})
    with pytest.raises(tf.errors.InvalidArgumentError, match="a label is below data.first_label"):
        list(found.validation(chosen.phases[0]))
    found.close()


def test_pictures_that_are_not_there_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--data FOLDER or --data synthetic"):
        pictures.Pictures(settings.read("smoke"))
    with pytest.raises(SettingsError, match=r"python examples/make_images\.py --output"):
        opened(tmp_path)
    folder_of(tmp_path, [(20, 20)] * 4)
    with pytest.raises(SettingsError, match=r"has 2; say --set network\.classes=2"):
        opened(tmp_path, **{"network.classes": 3})
