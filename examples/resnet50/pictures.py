"""The pictures of a training: read, decoded once for each host, and cut at random; and those for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import hvd_ext as hvd

from .settings import Phase, Settings, SettingsError

VALIDATION = ("validation", "val", "test")  # names of folders
# Random crops have an aspect ratio of 3/4 to 4/3; validation sees seven eighths of each side.
WIDEST, MIDDLE = 4 / 3, 7 / 8
# Rectangular pictures are validated in groups of these aspect ratios, width over height.
ASPECTS = (0.5, 0.6, 0.67, 0.75, 0.85, 1.0, 1.18, 1.33, 1.5, 1.67, 2.0)


@dataclass(frozen=True)
class Split:
    """Pictures by number.

    Args:
        source: of `hvd_ext.DataCache`.
        read: gives a file's contents, a string scalar, and its label, int32, from what the source gives.
    """

    source: Any
    read: Callable[..., tuple[tf.Tensor, tf.Tensor]]


class Pictures:
    """The pictures of all phases; one phase's decoded ones are kept at a time.

    Args:
        settings: of the training.
        rank: of this process; all ranks of the job make this together.
        ranks: their number.

    Attributes:
        train: the number of pictures for training.

    Raises:
        SettingsError: there are no such pictures.
    """

    def __init__(self, settings: Settings, rank: int = 0, ranks: int = 1) -> None:
        self._settings, self._rank, self._ranks = settings, rank, ranks
        self._synthetic = settings.data.source == "synthetic"
        self._splits = {} if self._synthetic else _splits(settings)
        self._caches: dict[tuple[str, int], hvd.DataCache] = {}
        self.train = settings.data.synthetic
        if not self._synthetic:
            self.train = self._open("train", settings.phases[0].side).samples

    def training(self, phase: Phase, steps: int) -> tf.data.Dataset:
        """Give this rank's batches: (uint8 [batch, pixels, pixels, 3], int32 labels [batch]), cropped in each epoch.

        Crops depend on the seed, the epoch and the picture; the order depends on the number of ranks too.

        Args:
            phase: of the training.
            steps: of an epoch.
        """
        batch = phase.batch // self._ranks
        if self._synthetic:
            return self._noise(batch, phase.pixels).repeat(steps)
        self._close_others("train", phase.side)
        cache = self._open("train", phase.side)
        batches = cache.dataset(batch, shuffle=True, seed=self._settings.seed, steps=steps, keys=True)

        def seen(sample: tuple[tf.Tensor, ...], seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            pictures, aspects, labels = sample
            return cropped(pictures, aspects, seeds, phase.pixels, phase.smallest_crop), labels

        return batches.map(seen, tf.data.AUTOTUNE).prefetch(2)

    def validation(self, phase: Phase) -> tf.data.Dataset | None:
        """Give this rank's pictures for validation, each once, in batches of one shape each; None if there are none."""
        if self._synthetic:
            return None
        self._close_others("validation", phase.side)
        batch = max(1, phase.batch // self._ranks)
        samples = self._open("validation", phase.side).dataset(batch, remainder="uneven").unbatch()
        aspects = tf.constant(ASPECTS if phase.rectangular else (1.0,))

        def group(_: tf.Tensor, aspect: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
            return tf.argmin(tf.abs(tf.math.log(aspects / aspect)))

        def of_group(key: tf.Tensor, found: tf.data.Dataset) -> tf.data.Dataset:
            aspect = aspects[key]
            return found.batch(batch).map(
                lambda pictures, own, labels: (middles(pictures, own, aspect, phase.pixels), labels)
            )

        return samples.group_by_window(group, of_group, batch).prefetch(2)

    def close(self) -> None:
        """Close the caches."""
        for cache in self._caches.values():
            cache.close()
        self._caches = {}

    def _open(self, split: str, side: int) -> hvd.DataCache:
        if (split, side) not in self._caches:
            found, data = self._splits[split], self._settings.data

            def load(*sample: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
                contents, label = found.read(*sample)
                return (*decoded(contents, side), label)

            self._caches[split, side] = hvd.DataCache(
                f"{split}-{side}", found.source, load, memory=data.memory, disk=data.disk
            )
        return self._caches[split, side]

    def _close_others(self, split: str, side: int) -> None:
        for key in [one for one in self._caches if one[0] == split and one[1] != side]:
            self._caches.pop(key).close()

    def _noise(self, batch: int, pixels: int) -> tf.data.Dataset:
        seed = (self._settings.seed, self._rank)
        pictures = tf.random.stateless_uniform((batch, pixels, pixels, 3), seed, 0, 256, tf.int32)
        labels = tf.random.stateless_uniform((batch,), seed, 0, self._settings.network.classes, tf.int32)
        return tf.data.Dataset.from_tensors((tf.cast(pictures, tf.uint8), labels))


def decoded(contents: tf.Tensor, side: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode a picture, and bring all of it to a square, which distorts it.

    Args:
        contents: of a JPEG or PNG file.
        side: of the square.

    Returns:
        uint8 [side, side, 3], and its width over its height, float32.
    """
    picture = tf.io.decode_image(contents, channels=3, expand_animations=False)
    shape = tf.shape(picture)
    square = tf.image.resize(picture, (side, side), antialias=True)
    aspect = tf.cast(shape[1], tf.float32) / tf.cast(shape[0], tf.float32)
    return tf.cast(tf.clip_by_value(tf.round(square), 0, 255), tf.uint8), aspect


def cropped(pictures: tf.Tensor, aspects: tf.Tensor, seeds: tf.Tensor, pixels: int, smallest: float) -> tf.Tensor:
    """Take a random part of each picture, with a random aspect ratio, and mirror half of them (Szegedy et al. 2015).

    Args:
        pictures: squares, uint8 [batch, side, side, 3], made of pictures with these aspect ratios:
        aspects: float32 [batch].
        seeds: int32 [batch, 2].
        pixels: the side of the result.
        smallest: the least share of a picture's area.

    Returns:
        uint8 [batch, pixels, pixels, 3].
    """
    draw = tf.map_fn(lambda seed: tf.random.stateless_uniform((5,), seed), seeds, fn_output_signature=tf.float32)
    area = smallest + (1 - smallest) * draw[:, 0]
    ratio = tf.exp((2 * draw[:, 1] - 1) * tf.math.log(WIDEST))
    heights = tf.minimum(tf.sqrt(area * aspects / ratio), 1)
    widths = tf.minimum(tf.sqrt(area * ratio / aspects), 1)
    tops, lefts = draw[:, 2] * (1 - heights), draw[:, 3] * (1 - widths)
    mirrored = draw[:, 4] < 0.5
    rights = lefts + widths
    boxes = tf.stack(
        [tops, tf.where(mirrored, rights, lefts), tops + heights, tf.where(mirrored, lefts, rights)], axis=1
    )
    return cut(pictures, boxes, pixels, pixels, max(1, round(pictures.shape[1] / pixels)))


def middles(pictures: tf.Tensor, aspects: tf.Tensor, aspect: tf.Tensor, pixels: int) -> tf.Tensor:
    """Take the middle of each picture, with one aspect ratio for all.

    Args:
        pictures: squares, uint8 [batch, side, side, 3], made of pictures with these aspect ratios:
        aspects: float32 [batch].
        aspect: of the results, float32.
        pixels: the shorter side of the results.

    Returns:
        uint8 [batch, rows, columns, 3]; sides are multiples of 8, but for the shorter one.
    """
    heights = MIDDLE * tf.minimum(aspects / aspect, 1)
    widths = MIDDLE * tf.minimum(aspect / aspects, 1)
    boxes = tf.stack([1 - heights, 1 - widths, 1 + heights, 1 + widths], axis=1) / 2
    longer = 8 * tf.cast(tf.round(pixels * tf.maximum(aspect, 1 / aspect) / 8), tf.int32)
    longer = tf.maximum(longer, pixels)
    rows, columns = tf.where(aspect < 1, longer, pixels), tf.where(aspect > 1, longer, pixels)
    return cut(pictures, boxes, rows, columns, max(1, round(MIDDLE * pictures.shape[1] / pixels)))


def cut(pictures: tf.Tensor, boxes: tf.Tensor, rows: Any, columns: Any, samples: int) -> tf.Tensor:
    """Bring parts of pictures to one size.

    Args:
        pictures: uint8 [batch, side, side, 3].
        boxes: top, left, bottom, right of each part as shares of the sides, of the outer edges of pixels; where left is
            larger than right the part is mirrored.
        rows: of the results.
        columns: of the results.
        samples: so many points in each direction are averaged for a pixel of a result.

    Returns:
        uint8 [batch, rows, columns, 3].
    """
    points = tf.stack([rows, columns]) * samples
    # crop_and_resize counts from the middle of the first pixel to that of the last one, of the picture and of the part
    step = (boxes[:, 2:] - boxes[:, :2]) / tf.cast(points, tf.float32)
    inner = tf.concat([boxes[:, :2] + step / 2, boxes[:, 2:] - step / 2], axis=1)
    side = pictures.shape[1]
    places = tf.clip_by_value((inner * side - 0.5) / (side - 1), 0, 1)
    found = tf.image.crop_and_resize(pictures, places, tf.range(tf.shape(pictures)[0]), points)
    if samples > 1:
        found = tf.nn.avg_pool2d(found, samples, samples, "VALID")
    return tf.cast(tf.round(found), tf.uint8)


def _splits(settings: Settings) -> dict[str, Split]:
    source = settings.data.source
    if not source:
        raise SettingsError("data.source: say where the pictures are, with --data FOLDER or --data synthetic")
    folder = Path(source)
    if any(folder.glob("train-*")):
        return {"train": _records(folder, "train", settings), "validation": _records(folder, "validation", settings)}
    held = next((name for name in VALIDATION if (folder / name).is_dir()), None)
    if held is None or not (folder / "train").is_dir():
        raise SettingsError(
            f"data.source ({folder}): must have files train-* and validation-*, or the folders train and one of "
            f"{', '.join(VALIDATION)}; pictures to try with: python examples/make_images.py --output {folder}"
        )
    splits = {"train": hvd.data.folder(folder / "train"), "validation": hvd.data.folder(folder / held)}
    for name, found in splits.items():
        _check_classes(f"{folder}, {name}", found.class_names, settings)
    return {name: Split(found, lambda contents, label: (contents, label)) for name, found in splits.items()}


def _check_classes(what: str, names: Sequence[str], settings: Settings) -> None:
    if len(names) != settings.network.classes:
        raise SettingsError(
            f"network.classes ({settings.network.classes}): {what} has {len(names)}; "
            f"say --set network.classes={len(names)}"
        )


def _records(folder: Path, name: str, settings: Settings) -> Split:
    """Read the usual TFRecord files of ImageNet."""
    if not any(folder.glob(f"{name}-*")):
        raise SettingsError(f"data.source ({folder}): has no files {name}-*")
    features = {
        "image/encoded": tf.io.FixedLenFeature((), tf.string),
        "image/class/label": tf.io.FixedLenFeature((), tf.int64),
    }

    def read(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.io.parse_single_example(record, features)
        label = tf.cast(found["image/class/label"], tf.int32) - settings.data.first_label
        tf.debugging.assert_less(label, settings.network.classes, "a label is above network.classes")
        tf.debugging.assert_non_negative(label, "a label is below data.first_label")
        return found["image/encoded"], label

    return Split(hvd.data.tfrecord(folder / f"{name}-*"), read)
