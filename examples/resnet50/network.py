"""A residual network v1.5 for pictures of any size, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import layers, ops

from .settings import Network

# Of a channel's value from 0 to 255: about the mean and the deviation over ImageNet and the procedural pictures.
MIDDLE, SPREAD = 118.0, 59.0


def build(network: Network, mixed_precision: bool = False) -> keras.Model:
    """Make the network: pictures, 0 to 255, [batch, rows, columns, 3], to float32 logits [batch, classes].

    It is ResNet v1.5: the 3 x 3 convolution of a block has its stride. The last gamma of each block is 0 at first, so
    that blocks begin as their shortcuts (Goyal et al. 2017, section 5.1). One model serves pictures of all sizes. The
    default has 25,557,032 parameters in 161 tensors.

    Args:
        network: the settings.
        mixed_precision: compute in float16, with variables in float32.
    """
    with _policy("mixed_float16" if mixed_precision else "float32"):
        inputs = keras.Input((None, None, 3))
        small = network.stem == "small"
        found = layers.Rescaling(1 / SPREAD, -MIDDLE / SPREAD)(inputs)
        found = _convolution(found, 32 if small else 64, 3 if small else 7, 2, "conv1")
        if not small:
            found = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(found)
        for stage, (blocks, width) in enumerate(zip(network.blocks, network.widths, strict=True)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                found = _block(found, width, stride, f"conv{stage + 2}_{block + 1}")
        found = layers.GlobalAveragePooling2D(name="pool5")(found)
        logits = layers.Dense(
            network.classes, kernel_initializer=keras.initializers.RandomNormal(stddev=0.01), name="predictions"
        )(found)
        return keras.Model(inputs, layers.Activation("linear", dtype="float32", name="logits")(logits))


def smoothed(smoothing: float) -> Any:
    """Give the loss of a training: cross entropy, with a share of each label given to all classes alike."""

    def loss(labels: Any, logits: Any) -> Any:
        wanted = ops.one_hot(ops.reshape(labels, (-1,)), logits.shape[-1])
        return keras.losses.categorical_crossentropy(wanted, logits, from_logits=True, label_smoothing=smoothing)

    return loss


@contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _convolution(found: Any, filters: int, kernel: int, stride: int, name: str, last: str = "relu") -> Any:
    """Add a convolution and its normalisation, then a "relu"; or nothing, with gammas that begin as 1 or as 0."""
    found = layers.Conv2D(
        filters, kernel, stride, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )(found)
    gamma = "zeros" if last == "zeros" else "ones"
    found = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}_bn")(found)
    return layers.ReLU(name=f"{name}_relu")(found) if last == "relu" else found


def _block(found: Any, width: int, stride: int, name: str) -> Any:
    shortcut = found
    if stride > 1 or found.shape[-1] != 4 * width:
        shortcut = _convolution(found, 4 * width, 1, stride, f"{name}_0", last="ones")
    found = _convolution(found, width, 1, 1, f"{name}_1")
    found = _convolution(found, width, 3, stride, f"{name}_2")
    found = _convolution(found, 4 * width, 1, 1, f"{name}_3", last="zeros")
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([found, shortcut]))
