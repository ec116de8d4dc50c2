"""What to cache: compressed pictures, full-size decoded ones or reduced ones, by bytes, processor time and accuracy.

    python -m benchmarks.studies.data.cached_pictures FILE.json [IMAGES [EPOCHS [SEEDS]]]

The pictures are those of examples/make_images.py, 64 pixels wide. In each epoch a random part of each, seven eighths of
its side, is taken, perhaps mirrored, and brought to the 28 pixels that the network sees. Kept are the JPEG files, the
decoded pictures, their means over 2 x 2 pixels, or over 4 x 4. Of the files and of the decoded pictures the network
sees the same, so these two share a training. Processor time is that of the pipeline without the network, in the epochs
behind the first one, of `DataCache` and what must be done with what it kept.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.convergence.data import parts_of
from benchmarks.studies.data.memory import spent
from benchmarks.studies.data.ways import ours, room
from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.table import seconds
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

BENCHMARK = "cached pictures: bytes, CPU, accuracy"
HEADINGS = ("kept", "pixels", "bytes of a picture", "of 1.28 million", "CPU of a picture", "accuracy", "sd", "points")
SIDE, SEEN = 64, 28  # pixels of a picture, and of what the network sees
PART = 7 / 8  # of the side
BATCH, EPOCHS, SEEDS, TURNS = 64, 5, 3, 5
RATE, FILTERS = 0.05, (16, 32, 48)
IMAGENET = 1_281_167
EVERY = 2  # one of so many pictures is taken, so that the study takes minutes
LABELS = 12  # four shapes, textures and colours


@dataclass(frozen=True)
class Kept:
    """A row of the table: how pictures are kept.

    Attributes:
        name: in words.
        factor: by how much the side is reduced; 0 where the file is kept.
    """

    name: str
    factor: int

    @property
    def side(self) -> int:
        """The pixels of a kept picture's side."""
        return SIDE // max(self.factor, 1)

    def load(self, contents: tf.Tensor) -> tf.Tensor:
        """Make what is kept of a file's contents."""
        import tensorflow as tf

        if not self.factor:
            return contents
        picture = pixels_of(contents)
        if self.factor == 1:
            return picture
        size = (1, self.side, self.factor, self.side, self.factor, 3)
        sums = tf.reduce_sum(tf.reshape(tf.cast(picture, tf.int32), size[1:]), (1, 3))
        return tf.cast((sums + self.factor**2 // 2) // self.factor**2, tf.uint8)

    def pictures(self, kept: tf.Tensor) -> tf.Tensor:
        """Give the pictures of a batch of what was kept."""
        import tensorflow as tf

        return kept if self.factor else tf.map_fn(pixels_of, kept, fn_output_signature=tf.uint8)


KEPT = (
    Kept("compressed", 0),
    Kept("full size", 1),
    Kept("reduced to a half", 2),
    Kept("reduced to a quarter", 4),
)


def pixels_of(contents: tf.Tensor) -> tf.Tensor:
    """Decode a file: uint8 [side, side, 3]."""
    import tensorflow as tf

    return tf.ensure_shape(tf.io.decode_jpeg(contents, channels=3), (SIDE, SIDE, 3))


def augmented(pictures: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Take a random part of each picture of a batch, and mirror half of them.

    Args:
        pictures: uint8 [batch, side, side, 3].
        seed: int32 [2]; parts are the same shares of pictures of any size.

    Returns:
        float32 [batch, `SEEN`, `SEEN`, 3], from 0 to 255.
    """
    import tensorflow as tf

    count = tf.shape(pictures)[0]
    begins = tf.random.stateless_uniform((count, 2), seed, 0, 1 - PART)
    mirrored = tf.random.stateless_uniform((count, 1), seed + 1) < 0.5
    left = tf.where(mirrored, begins[:, 1:] + PART, begins[:, 1:])
    right = tf.where(mirrored, begins[:, 1:], begins[:, 1:] + PART)
    boxes = tf.concat([begins[:, :1], left, begins[:, :1] + PART, right], 1)
    return cut(pictures, boxes)


def central(pictures: tf.Tensor) -> tf.Tensor:
    """Take the middle of each picture of a batch, as `augmented` takes a part."""
    import tensorflow as tf

    edge = (1 - PART) / 2
    return cut(pictures, tf.tile([[edge, edge, edge + PART, edge + PART]], (tf.shape(pictures)[0], 1)))


def cut(pictures: tf.Tensor, boxes: tf.Tensor) -> tf.Tensor:
    """Bring parts of pictures to the size that the network sees.

    Args:
        pictures: uint8 [batch, side, side, 3].
        boxes: top, left, bottom, right as shares of the side, of the outer edges of the pixels.
    """
    import tensorflow as tf

    side = pictures.shape[1]
    # crop_and_resize counts from the middle of the first pixel to that of the last one, of the picture and of the part
    scale = max(1, round(PART * side / SEEN))  # pixels of the picture in one that the network sees
    samples = SEEN * scale
    step = (boxes[:, 2:] - boxes[:, :2]) / samples
    inner = tf.concat([boxes[:, :2] + step / 2, boxes[:, 2:] - step / 2], 1)
    # where pixels are larger than those that the network sees, half of an outer one lies outside of all middles
    edge = int(PART * side < SEEN)
    pictures = tf.pad(pictures, ((0, 0), (edge, edge), (edge, edge), (0, 0)), "SYMMETRIC") if edge else pictures
    places = (inner * side - 0.5 + edge) / (side + 2 * edge - 1)
    every = tf.range(tf.shape(pictures)[0])
    sampled = tf.image.crop_and_resize(tf.cast(pictures, tf.float32), places, every, (samples, samples))
    return tf.nn.avg_pool2d(sampled, scale, scale, "VALID") if scale > 1 else sampled


@dataclass(frozen=True)
class Split:
    """Files, and the numbers of the shape, the texture and the colour of each, int32 [files, 3]."""

    paths: Sequence[str]
    labels: Any


def splits_of(folder: Path) -> tuple[Split, Split]:
    """List training and test pictures of a set of examples/make_images.py, equally many of each class.

    Raises:
        InvalidError: there is no set in the folder.
    """
    found = []
    for split in ("train", "test"):
        names = sorted(path.name for path in (folder / split).glob("*") if path.is_dir())
        folders = [(folder / split / name, label) for label, name in enumerate(names)]
        places = [(path, label) for where, label in folders for path in sorted(where.glob("*.jpg"))]
        if not places:
            raise InvalidError(
                f"images ({folder}): must be an image set: python examples/make_images.py --output {folder}"
            )
        places = places[::EVERY]
        labels = parts_of(names)[[label for _, label in places]]
        found.append(Split([str(path) for path, _ in places], labels))
    return found[0], found[1]


class Pipeline:
    """Pictures of a split, kept in one way."""

    def __init__(self, kept: Kept, split: Split) -> None:
        """Open the cache."""
        import tensorflow as tf

        self.kept = kept

        def load(path: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return kept.load(tf.io.read_file(path)), labels

        memory = room(len(split.paths), 3 * SIDE * SIDE)
        self.cache = ours((np.array(split.paths), split.labels), load, memory)

    def dataset(self, seed: int, train: bool = True) -> tf.data.Dataset:
        """Give batches as the network sees them; each iterator is an epoch with other parts."""
        import tensorflow as tf

        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)
        batches = self.cache.dataset(batch_size=BATCH, shuffle=train, seed=seed)

        def prepared(batch: tuple[tf.Tensor, tf.Tensor], drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            pictures = self.kept.pictures(batch[0])
            return (augmented(pictures, tf.cast(drawn % 2**31, tf.int32)) if train else central(pictures)), batch[1]

        return tf.data.Dataset.zip(batches, seeds).map(prepared, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def network(seed: int, steps: int) -> Any:
    """Make the network: three convolutions, and three labels of four classes."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([layers.Input((SEEN, SEEN, 3)), layers.Rescaling(1 / 64, -2)])
    for place, filters in enumerate(FILTERS):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
        if place < len(FILTERS) - 1:
            model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(LABELS))
    model.add(layers.Reshape((3, LABELS // 3)))
    rate = keras.optimizers.schedules.CosineDecay(RATE, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["sparse_categorical_accuracy"])
    return model


def trained(train: Pipeline, test: Pipeline, epochs: int, seed: int) -> float:
    """Train once; give the share of test labels that are right."""
    data = train.dataset(seed)
    model = network(seed, epochs * int(data.cardinality()))
    model.fit(data, epochs=epochs, verbose=0)
    return float(
        model.evaluate(test.dataset(0, train=False), verbose=0, return_dict=True)["sparse_categorical_accuracy"]
    )


def prepared_s(train: Pipeline) -> float:
    """Give the seconds of the processor that a picture takes in an epoch without the network."""
    cpu_s, _, count = spent(lambda: sum(len(labels) for _, labels in train.dataset(1)))
    return cpu_s / count


def row_of(kept: Kept, picture_bytes: float, cpu_s: Sequence[float], samples: Sequence[float]) -> dict[str, Any]:
    """Make the row of a way to keep pictures.

    Args:
        kept: the way.
        picture_bytes: of a kept picture, in the mean.
        cpu_s: of a picture, of each turn.
        samples: the accuracy with each seed.
    """
    return {
        "kept": kept.name,
        "side": kept.side,
        "picture_bytes": picture_bytes,
        "cpu_seconds_per_picture": statistics.median(cpu_s),
        "cpu_samples": list(cpu_s),
        "accuracy_mean": statistics.fmean(samples),
        "accuracy_sd": statistics.stdev(samples) if len(samples) > 1 else None,
        "samples": list(samples),
    }


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table; points are those over the pictures of full size."""
    full = next((row["accuracy_mean"] for row in result["rows"] if row["kept"] == KEPT[1].name), None)
    lines = [
        [
            row["kept"],
            f"{row['side']} x {row['side']}",
            f"{row['picture_bytes']:,.0f}",
            f"{row['picture_bytes'] * IMAGENET / 1e9:,.1f} GB",
            seconds(row["cpu_seconds_per_picture"]),
            f"{row['accuracy_mean']:.2%}",
            "" if row["accuracy_sd"] is None else f"{100 * row['accuracy_sd']:.2f}",
            "" if full is None else f"{100 * (row['accuracy_mean'] - full):+.2f}",
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def main(arguments: Sequence[str], say: Callable[[str], None] = lambda words: print(words, flush=True)) -> None:
    """Measure and train; write the file.

    Args:
        arguments: the file, the folder of examples/make_images.py, epochs, and the number of seeds.
        say: takes what was found.
    """
    path, folder, epochs, seeds = [*arguments, *["", "out/images", str(EPOCHS), str(SEEDS)][len(arguments) :]]
    run = results.begin_run("one process")
    begin = time.perf_counter()
    train, test = splits_of(Path(folder))
    say(f"{len(train.paths):,} + {len(test.paths):,} pictures")
    trains = [Pipeline(kept, train) for kept in KEPT]
    for one in trains:
        prepared_s(one)  # the first epoch fills the cache
    say(f"caches are full: {time.perf_counter() - begin:.0f} s")
    cpu_s: dict[str, list[float]] = {kept.name: [] for kept in KEPT}
    for turn in range(TURNS):
        for one in rotated(trains, turn):
            cpu_s[one.kept.name].append(prepared_s(one))
    accuracies: dict[str, list[float]] = {}
    for one in trains[1:]:
        held = Pipeline(one.kept, test)
        begun, cpu = time.perf_counter(), time.process_time()
        accuracies[one.kept.name] = [trained(one, held, int(epochs), seed) for seed in range(int(seeds))]
        held.cache.close()
        spent_s = f"{time.perf_counter() - begun:.0f} s, CPU {time.process_time() - cpu:.0f} s"
        say(f"{one.kept.name}: {', '.join(f'{share:.2%}' for share in accuracies[one.kept.name])}; {spent_s}")
    accuracies[KEPT[0].name] = accuracies[KEPT[1].name]  # the network sees the same
    file_bytes = statistics.fmean(Path(name).stat().st_size for name in train.paths)
    rows = []
    for kept, one in zip(KEPT, trains, strict=True):
        nbytes = 3.0 * kept.side**2 if kept.factor else file_bytes
        rows.append(row_of(kept, nbytes, cpu_s[kept.name], accuracies[kept.name]))
        one.cache.close()
    results.save(Path(path), results.result_of(run, rows, BENCHMARK))
    say(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
