"""The inputs of the top-k benchmark: distributions, gradients of ResNet-50, and inputs that are hard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd_ext.errors import InvalidError

SEED = 6
# Inputs as in training, and inputs on which selections by thresholds fail or fast code may become slow.
ORDINARY = ("gauss", "laplace", "gradient")
HARD = ("ties", "zeros", "nan", "ascending", "outlier", "sparse")
INPUTS = (*ORDINARY, *HARD)
# ResNet-50 (He et al. 2016): blocks of each stage and their width.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
CLASSES = 1000
BATCH, PIXELS, RATE = 8, 32, 0.01

Array = NDArray[np.float32]


def count(density: float, elements: int) -> int:
    """Return the number of elements that a density selects from the first ones (tf_ops/engine/error_feedback.cc)."""
    return math.floor(density * elements + 0.5)


def share(density: float, begin: int, end: int) -> int:
    """Return the number of elements that a density selects from [begin, end) of a buffer."""
    return count(density, end) - count(density, begin)


def resnet50_sizes() -> tuple[int, ...]:
    """Give the elements of the 161 trained tensors of ResNet-50, 25,557,032 together.

    Returns:
        In the order of Keras's model: convolutions without bias, gamma and beta, then the dense layer.
    """
    sizes, inner = [7 * 7 * 3 * 64, 64, 64], 64
    for blocks, width in STAGES:
        outer = 4 * width
        for block in range(blocks):
            sizes += [inner * width, width, width, 9 * width * width, width, width]
            if block == 0:  # the shortcut has a convolution of its own
                sizes += [inner * outer, width * outer, outer, outer, outer, outer]
            else:
                sizes += [width * outer, outer, outer]
            inner = outer
    return (*sizes, inner * CLASSES, CLASSES)


def segments(elements: int) -> list[int]:
    """Divide a buffer as ResNet-50's tensors divide theirs.

    Args:
        elements: of the buffer.

    Returns:
        162 offsets from 0 to `elements`, ascending; of a small buffer some segments are empty.
    """
    sizes = resnet50_sizes()
    ends = np.cumsum(sizes)
    return [0, *(int(end) * elements // int(ends[-1]) for end in ends)]


def picks(density: float, offsets: list[int]) -> list[int]:
    """Give the number of elements to select from each segment; together they are that of the whole buffer."""
    return [share(density, begin, end) for begin, end in itertools.pairwise(offsets)]


def make(name: str, elements: int, kept: Path | None = None) -> Array:
    """Make an input.

    Args:
        name: one of `INPUTS`.
        elements: how many.
        kept: a folder for gradients, which take time to make; those of an earlier call are read from there.

    Returns:
        float32 [elements], the same in every call.

    Raises:
        InvalidError: an unknown name.
    """
    if name == "gradient":
        return _gradient(elements, kept)
    if name not in MAKERS:
        raise InvalidError(f"input ({name!r}): must be one of {', '.join(INPUTS)}")
    return np.ascontiguousarray(MAKERS[name](np.random.default_rng(SEED), elements), dtype=np.float32)


def _gauss(rng: np.random.Generator, elements: int) -> Array:
    return rng.standard_normal(elements, dtype=np.float32)


def _laplace(rng: np.random.Generator, elements: int) -> Array:
    sign = np.where(rng.random(elements, dtype=np.float32) < 0.5, np.float32(-1), np.float32(1))
    return rng.standard_exponential(elements, dtype=np.float32) * sign


def _ties(rng: np.random.Generator, elements: int) -> Array:
    return rng.integers(-4, 5, elements, dtype=np.int8).astype(np.float32)


def _nan(rng: np.random.Generator, elements: int) -> Array:
    x = _gauss(rng, elements)
    x[rng.random(elements, dtype=np.float32) < 0.01] = np.nan
    return x


def _outlier(rng: np.random.Generator, elements: int) -> Array:
    x = _gauss(rng, elements)
    x[elements // 3] = 1e8  # the mean of |x| is above nearly all elements then
    return x


def _sparse(rng: np.random.Generator, elements: int) -> Array:
    return np.where(rng.random(elements, dtype=np.float32) < 0.0002, _gauss(rng, elements), np.float32(0))


MAKERS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "gauss": _gauss,
    "laplace": _laplace,
    "ties": _ties,
    # written, not numpy.zeros: that maps one page of zeros for all, which then lies in the cache
    "zeros": lambda rng, elements: np.full(elements, np.float32(0)),
    "nan": _nan,
    "ascending": lambda rng, elements: np.linspace(0, 1, elements, dtype=np.float32),
    "outlier": _outlier,
    "sparse": _sparse,
}


def _gradient(elements: int, kept: Path | None) -> Array:
    path = None if kept is None else kept / f"gradient_{elements}.npy"
    if path is not None and path.exists():
        loaded: Array = np.load(path)
        return loaded
    found = layered(elements, resnet50_gradients())
    if path is not None:
        np.save(path, found)
    return found


def layered(elements: int, gradients: Iterator[list[Array]]) -> Array:
    """Make one buffer of the gradients of a model's tensors.

    Args:
        elements: of the buffer.
        gradients: of one training step after the other, a flat array for each tensor.

    Returns:
        The first part of every tensor, the same share of each; if one step is too short, of several steps.
    """
    steps = [next(gradients)]
    total = sum(len(one) for one in steps[0])
    while len(steps) * total < elements:
        steps.append(next(gradients))
    tensors = [one for step in steps for one in step]
    ends = np.cumsum([len(one) for one in tensors])
    offsets = [0, *(int(end) * elements // int(ends[-1]) for end in ends)]
    bounds = itertools.pairwise(offsets)
    return np.concatenate([one[: end - begin] for one, (begin, end) in zip(tensors, bounds, strict=True)])


def digits() -> tuple[Array, NDArray[np.int64]]:
    """Give handwritten digits as images float32 [BATCH, PIXELS, PIXELS, 3] in 0..1, and labels int64 [BATCH]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:BATCH, ..., None] / 16).astype(np.float32)
    scale = PIXELS // images.shape[1]
    return images.repeat(scale, 1).repeat(scale, 2).repeat(3, 3), data.target[:BATCH].astype(np.int64)


def resnet50_gradients() -> Iterator[list[Array]]:
    """Train Keras's ResNet-50 on a batch of digits and give the gradients of each step after the second.

    Returns:
        Without end, the flat gradient of each of the 161 tensors of `resnet50_sizes`. Keras's convolutions have biases,
        which the network of the paper does not have: they are trained, and left out here.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    model = keras.applications.ResNet50(weights=None, input_shape=(PIXELS, PIXELS, 3), classes=CLASSES)
    images, labels = digits()
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    step = 0
    while True:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        step += 1
        if step > 2:
            pairs = zip(variables, gradients, strict=True)
            yield [np.asarray(one).ravel() for variable, one in pairs if not variable.path.endswith("conv/bias")]
