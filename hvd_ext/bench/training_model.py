"""What the training benchmark trains: Keras models on handwritten digits, the same for every contestant."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits

SEED = 1
RATE = 0.05
SMALL = {"small-160": 160, "small-1000": 1000}  # the number of tensors
DEEP = "deep-60"  # the number of layers with weights


@functools.cache
def _added(library: Any) -> Any:
    """Make the class of a layer whose output is added to its input: gradients reach the first of hundreds of layers."""

    class Added(library.layers.Layer):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self._layer = layer  # its output has the shape of its input

        def build(self, input_shape: tuple[int | None, ...]) -> None:
            self._layer.build(input_shape)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            # a tenth: the sum of hundreds stays small
            return inputs + 0.1 * self._layer(inputs)

    return Added


def layers(model: str, width: int, library: Any = keras) -> list[Any]:
    """Give the layers of a model; images of 8 x 8 pixels go in, logits of 10 digits come out.

    Args:
        model: "mlp": five hidden dense layers, 4.3 M parameters at a width of 1,024, which are mostly sent. "cnn":
            three convolutions and a hidden dense layer, 1.3 M parameters at a width of 512, with far more computation
            for each byte that is sent. "small-160" and "small-1000": dense layers with so many kernels and biases in
            all, each layer added to its input; 4 kB a kernel at a width of 32, so that a step is mostly the handling
            of tensors. "deep-60": 59 convolutions in three stages and a dense layer, 1.2 M parameters at a width of 40,
            with about as much communication as computation on two hosts at 100 Mbit/s.
        width: units of each hidden dense layer; "deep-60": channels of the first stage, each further one has 8 more.
    """
    dense, added_layer = library.layers.Dense, _added(library)
    if model == "mlp":
        hidden = [dense(width, activation="relu") for _ in range(5)]
        return [library.Input((8, 8, 1)), library.layers.Flatten(), *hidden, dense(10)]
    if model in SMALL:
        added = [added_layer(dense(width, activation="tanh")) for _ in range(SMALL[model] // 2 - 2)]
        return [library.Input((8, 8, 1)), library.layers.Flatten(), dense(width), *added, dense(10)]
    convolution = library.layers.Conv2D
    if model == DEEP:
        stages: list[Any] = []
        for channels, stride, more in ((width, 1, 19), (width + 8, 2, 19), (width + 16, 2, 18)):
            stages.append(convolution(channels, 3, strides=stride, padding="same", activation="tanh"))
            stages += [added_layer(convolution(channels, 3, padding="same", activation="tanh")) for _ in range(more)]
        return [library.Input((8, 8, 1)), *stages, library.layers.GlobalAveragePooling2D(), dense(10)]
    return [
        library.Input((8, 8, 1)),
        convolution(64, 3, padding="same", activation="relu"),
        convolution(128, 3, padding="same", activation="relu"),
        library.layers.MaxPooling2D(),
        convolution(128, 3, padding="same", activation="relu"),
        library.layers.Flatten(),
        dense(width, activation="relu"),
        dense(10),
    ]


def batches(rank: int, size: int, batch: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Give the batches of a rank, in the order in which every contestant takes them, again and again.

    Returns:
        Images float32 [batch, 8, 8, 1] in 0..1 and labels int64 [batch]; the last batch is filled up from the first.
    """
    data = load_digits()
    mine = np.random.default_rng(SEED).permutation(len(data.target))[rank % len(data.target) :: size]
    images, labels = (data.images[mine, ..., None] / 16).astype(np.float32), data.target[mine]
    count = -(-len(mine) // batch)
    places = (np.arange(count * batch) % len(mine)).reshape(count, batch)
    return [(tf.constant(images[row]), tf.constant(labels[row], tf.int64)) for row in places]


class Learner:
    """A compiled model and its place in the batches."""

    def __init__(
        self,
        model: str,
        width: int,
        data: list[tuple[tf.Tensor, tf.Tensor]],
        *,
        kind: Callable[[list[keras.layers.Layer]], keras.Model] = keras.Sequential,
        wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer] = lambda optimizer: optimizer,
    ) -> None:
        """Build a model; its first weights depend on nothing but its size.

        Args:
            kind: makes the model of its layers; a subclass of Sequential has a training step of its own.
            wrap: makes another optimizer of the plain one.
        """
        keras.utils.set_random_seed(SEED)
        self._batches = itertools.cycle(data)
        self.model = kind(layers(model, width))
        self.optimizer = wrap(keras.optimizers.SGD(RATE))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # without XLA: neither Horovod's operations here nor ours have kernels for it
        self.model.compile(self.optimizer, loss, jit_compile=False)

    def step(self) -> float:
        """Train one batch and give its loss."""
        images, labels = next(self._batches)
        return float(self.model.train_on_batch(images, labels, return_dict=True)["loss"])

    def weights(self) -> NDArray[np.float32]:
        """Give the trained weights, float32 [parameters]."""
        return np.concatenate([np.asarray(weight).ravel() for weight in self.model.trainable_weights])


def fingerprint(weights: NDArray[np.float32]) -> str:
    """Give a digest that is equal if the weights are equal bit for bit."""
    return hashlib.sha256(weights.tobytes()).hexdigest()
