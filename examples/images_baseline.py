"""Show that the image set is not trivial: compare a small convolutional network with linear classifiers.

python examples/images_baseline.py --images out/images
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import typer
from images.loading import load
from images.manifest import ImageSetError, read_manifest
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import keras

BINS = 8
THUMBNAIL = 16


@dataclass(frozen=True)
class Score:
    """The accuracy of one classifier on the test images."""

    name: str
    accuracy: float
    epochs: int
    seconds: float


def colour_histogram(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Count the colours of each image.

    Args:
        images: uint8 [count, rows, columns, 3].

    Returns:
        The square root of the frequency of each of 8 x 8 x 8 colours, float32 [count, 512].
    """
    cells = (images // (256 // BINS)).reshape(len(images), -1, 3).astype(np.int32)
    codes = (cells[..., 0] * BINS + cells[..., 1]) * BINS + cells[..., 2]
    counts = np.stack([np.bincount(row, minlength=BINS**3) for row in codes])
    return np.sqrt(counts / codes.shape[1]).astype(np.float32)


def thumbnails(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Shrink the images to 16 x 16 pixels and flatten them: float32 [count, 768], values -1 to 1."""
    count, side = images.shape[0], images.shape[1]
    step = side // THUMBNAIL
    cut = images[:, : step * THUMBNAIL, : step * THUMBNAIL].reshape(count, THUMBNAIL, step, THUMBNAIL, step, 3)
    return (cut.mean(axis=(2, 4), dtype=np.float32) / 127.5 - 1).reshape(count, -1)


def linear(features: int, classes: int) -> keras.Model:
    """Make a linear classifier of given features."""
    import keras

    return keras.Sequential([keras.Input((features,)), keras.layers.Dense(classes)])


def network(pixels: int, classes: int) -> keras.Model:
    """Make a convolutional network with 140,000 parameters that maps uint8 images to logits."""
    import keras
    from keras import layers

    steps: list[keras.layers.Layer] = [keras.Input((pixels, pixels, 3)), layers.Rescaling(1 / 127.5, -1)]
    for filters, kernel, strides, pool in ((24, 5, 2, False), (40, 3, 1, True), (80, 3, 1, True), (128, 3, 1, False)):
        steps += [layers.Conv2D(filters, kernel, strides, "same", use_bias=False), layers.BatchNormalization()]
        steps += [layers.ReLU(), *([layers.MaxPooling2D()] if pool else [])]
    return keras.Sequential([*steps, layers.GlobalAveragePooling2D(), layers.Dense(classes)])


def _fit(
    name: str,
    model: keras.Model,
    train: tuple[NDArray[np.generic], NDArray[np.int32]],
    test: tuple[NDArray[np.generic], NDArray[np.int32]],
    epochs: int,
    tell: Callable[[str], None],
) -> Score:
    import keras

    begin, batch = time.perf_counter(), 64
    steps = epochs * -(-len(train[1]) // batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = keras.optimizers.schedules.CosineDecay(3e-3, steps)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    show = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: tell(
            f"{name}: epoch {epoch + 1} of {epochs}, {logs['accuracy']:.1%} on training"
        )
    )
    model.fit(*train, batch_size=batch, epochs=epochs, verbose=0, callbacks=[show])
    _, accuracy = model.evaluate(*test, batch_size=256, verbose=0)
    return Score(name, float(accuracy), epochs, time.perf_counter() - begin)


def measure(folder: Path, epochs: int, limit: int | None, tell: Callable[[str], None]) -> list[Score]:
    """Train the classifiers on an image set.

    Args:
        folder: the folder of the image set.
        epochs: the network's passes over the training images; the linear classifiers make 20.
        limit: use only so many training images, the first ones; None for all.
        tell: called with one line about the progress.

    Returns:
        The scores; the network's is the last one.

    Raises:
        ImageSetError: there is no complete image set.
    """
    import keras

    keras.utils.set_random_seed(1)
    tell("reading the images")
    (train, train_labels), (test, test_labels) = load(folder, "train", limit), load(folder, "test")
    classes = len(read_manifest(folder)["class_names"])
    scores = [Score("chance", 1 / classes, 0, 0.0)]
    for name, features in (
        ("linear on 16 x 16 pixels", thumbnails),
        ("linear on a colour histogram", colour_histogram),
    ):
        columns, test_columns = features(train), features(test)
        model = linear(columns.shape[1], classes)
        scores.append(_fit(name, model, (columns, train_labels), (test_columns, test_labels), 20, tell))
    model = network(train.shape[1], classes)
    scores.append(_fit("convolutional network", model, (train, train_labels), (test, test_labels), epochs, tell))
    return scores


def main(
    images: Annotated[Path, typer.Option(help="Folder of the image set.")] = Path("out/images"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes of the network over the training images.")] = 12,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first training images.")] = None,
    result: Annotated[Path | None, typer.Option(help="Write the scores to this file, as JSON.")] = None,
) -> None:
    """Train the classifiers and print their accuracy on the test images."""
    console = Console()
    try:
        with console.status("starting") as status:
            scores = measure(images, epochs, limit, status.update)
        manifest = read_manifest(images)
    except ImageSetError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    table = Table("classifier", "test accuracy", "epochs", "seconds")
    for score in scores:
        table.add_row(score.name, f"{score.accuracy:.1%}", str(score.epochs or ""), f"{score.seconds:.0f}")
    console.print(table)
    if result:
        facts = {"recipe": manifest["recipe"], "sha256": manifest["sha256"], "limit": limit}
        result.write_text(json.dumps({**facts, "scores": [asdict(score) for score in scores]}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
