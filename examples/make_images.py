"""Make a procedural JPEG image data set whose classes are not trivial to learn.

python examples/make_images.py --output out/images
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from images.manifest import ImageSetError, Recipe
from images.scene import jpeg
from images.writing import write
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROWS, COLUMNS = 4, 12


def samples(recipe: Recipe) -> Image.Image:
    """Put the first training images of a recipe side by side, 12 in a row."""
    side = recipe.pixels
    picture = Image.new("RGB", (COLUMNS * side, ROWS * side))
    for index in range(ROWS * COLUMNS):
        data = jpeg(recipe.class_of(index), side, recipe.key("train", index))
        picture.paste(Image.open(io.BytesIO(data)), (index % COLUMNS * side, index // COLUMNS * side))
    return picture


def main(
    output: Annotated[Path, typer.Option(help="Folder of the image set.")] = Path("out/images"),
    train: Annotated[int, typer.Option(help="Number of training images.")] = Recipe.train,
    test: Annotated[int, typer.Option(help="Number of test images.")] = Recipe.test,
    classes: Annotated[int, typer.Option(help="Number of classes, 2 to 256.")] = Recipe.classes,
    pixels: Annotated[int, typer.Option(help="Side of an image.")] = Recipe.pixels,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = Recipe.seed,
    workers: Annotated[int, typer.Option(help="Processes that draw.")] = os.cpu_count() or 1,
    sheet: Annotated[Path | None, typer.Option(help="Only draw a picture of 48 samples into this file.")] = None,
) -> None:
    """Make the image set, or continue one that was begun; a complete set is checked and left as it is."""
    recipe = Recipe(train, test, classes, pixels, seed)
    console = Console()
    columns = (TextColumn("images"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    begin = time.perf_counter()
    try:
        if sheet is not None:
            recipe.check()
            samples(recipe).save(sheet)
            return
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("images", total=train + test)
            manifest = write(output, recipe, workers, lambda count: bar.advance(task, count))
    except (ImageSetError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "stopped; whole images were kept: the same command goes on from there", soft_wrap=True
        )
        sys.exit(130)
    nbytes = sum(manifest["nbytes"].values())
    console.print(
        f"{output}: {train:,} + {test:,} images of {classes} classes, {nbytes / 1e6:,.1f} MB; "
        f"{manifest['drawn']:,} drawn in {time.perf_counter() - begin:.1f} s; sha256 {manifest['sha256'][:16]}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
