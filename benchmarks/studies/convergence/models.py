"""The models of the convergence study: small ones of the three families that the CommLib paper trains (section 5.5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.studies.convergence.data import IMAGES, TEXT, VOCABULARY

if TYPE_CHECKING:
    import keras

# By model the data set that it learns.
DATA_OF = {"cnn": IMAGES, "vgg": IMAGES, "transformer": TEXT}


def build(model: str, shape: tuple[int, ...], labels: int, classes: int, width: int = 0) -> keras.Model:
    """Make a model; its first weights depend on Keras's seed alone.

    Args:
        model: "cnn": convolutions with batch normalisation and shortcuts, as ResNet has. "vgg": convolutions without
            them, and two wide dense layers, which have most of the parameters. "transformer": a causal language model.
        shape: of an example: [side, side, 3] or [length].
        labels: of an example.
        classes: of a label.
        width: filters of the first convolution, or the Transformer's width; 0 for the model's own.

    Returns:
        The model: uint8 images or int32 characters go in, logits [labels, classes] come out.
    """
    import keras

    keras.config.set_image_data_format("channels_last")
    makers: dict[str, Callable[..., Any]] = {"cnn": _cnn, "vgg": _vgg, "transformer": _transformer}
    inputs = keras.Input(shape, dtype="int32" if DATA_OF[model] == TEXT else "uint8")
    return keras.Model(inputs, makers[model](inputs, labels, classes, width))


def _logits(x: Any, labels: int, classes: int) -> Any:
    from keras import layers

    return layers.Reshape((labels, classes))(layers.Dense(labels * classes)(x))


def _cnn(inputs: Any, labels: int, classes: int, width: int) -> Any:
    from keras import layers

    width = width or 24

    def convolved(x: Any, filters: int, kernel: int = 3, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, kernel, strides, "same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    x = layers.Rescaling(1 / 64, -2)(inputs)
    x = layers.ReLU()(convolved(x, width, 5, 2))
    for filters, strides in ((2 * width, 2), (4 * width, 2)):
        x = layers.ReLU()(convolved(x, filters, 3, 1))
        x = layers.MaxPooling2D(strides)(x)
        y = layers.ReLU()(convolved(x, filters))
        x = layers.ReLU()(x + convolved(y, filters))
    return _logits(layers.GlobalAveragePooling2D()(x), labels, classes)


def _vgg(inputs: Any, labels: int, classes: int, width: int) -> Any:
    from keras import layers

    width = width or 24
    x = layers.Rescaling(1 / 64, -2)(inputs)
    # the first convolution halves the picture; two pairs of convolutions follow, with a pooling as in VGG
    convolution = functools.partial(layers.Conv2D, padding="same", activation="relu", kernel_initializer="he_normal")
    x = convolution(width, 3, strides=2)(x)
    for filters in (2 * width, 4 * width):
        x = layers.MaxPooling2D()(convolution(filters, 3)(convolution(filters, 3)(x)))
    x = layers.Flatten()(x)
    for units in (1024, 512):
        x = layers.Dropout(0.25)(layers.Dense(units, activation="relu", kernel_initializer="he_normal")(x))
    return _logits(x, labels, classes)


def _transformer(inputs: Any, length: int, classes: int, width: int) -> Any:
    import keras
    from keras import layers

    width = width or 128
    # those of Keras are 20 times smaller; the normalisation after them would make their gradients 20 times larger
    normal = keras.initializers.RandomNormal(stddev=1.0)
    places = layers.Embedding(length, width, embeddings_initializer=normal)(keras.ops.arange(length)[None])
    x = layers.Embedding(max(classes, VOCABULARY), width, embeddings_initializer=normal)(inputs) + places
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return layers.Dense(classes)(layers.LayerNormalization()(x))
