"""A layer of a network as the simulator sees it: its tensors, and the multiplications of one sample's forward pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with parameters.

    Args:
        tensors: the name of each of its parameters and the number of elements, in the order of the layer's variables.
        forward_macs: the multiply-adds of the forward pass of one sample, with those of the layers without parameters
            that follow it.
    """

    name: str
    tensors: tuple[tuple[str, int], ...]
    forward_macs: float

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(elements for _, elements in self.tensors)


class Convolutions:
    """A list of the layers of a convolutional network that is made layer by layer.

    Args:
        size: the height and width of the input in pixels.
        channels: the number of channels of the input.
    """

    def __init__(self, size: int, channels: int = 3) -> None:
        self.layers: list[Layer] = []
        self.size = size
        self.channels = channels

    def conv(
        self, name: str, filters: int, kernel: int, stride: int = 1, *, bias: bool = True, of: int | None = None
    ) -> None:
        """Adds a convolution with padding, which divides the size of the picture by its stride.

        Args:
            filters: the number of channels of its result.
            of: the number of channels of its input if that is not the result of the layer before; then the result is
                not the input of the next layer either, and `size` and `channels` stay.
        """
        channels, size = self.channels if of is None else of, -(-self.size // stride)
        weights = kernel * kernel * channels * filters
        tensors = ((f"{name}/kernel", weights), *(((f"{name}/bias", filters),) if bias else ()))
        self.layers.append(Layer(name, tensors, float(weights * size * size)))
        if of is None:
            self.size, self.channels = size, filters

    def norm(self, name: str, channels: int | None = None, size: int | None = None) -> None:
        """Adds a batch normalisation with scale and offset; an element takes about two multiply-adds.

        Args:
            channels: the number of channels; None for those of the layer before.
            size: the height and width of the picture; None for those of the layer before.
        """
        channels, size = channels or self.channels, size or self.size
        tensors = ((f"{name}/gamma", channels), (f"{name}/beta", channels))
        self.layers.append(Layer(name, tensors, 2.0 * channels * size * size))

    def pool(self, stride: int = 2) -> None:
        """Adds a pooling layer, which divides the size of the picture by its stride."""
        self.size = -(-self.size // stride)

    def dense(self, name: str, inputs: int, outputs: int) -> None:
        """Adds a dense layer with a bias."""
        tensors = ((f"{name}/kernel", inputs * outputs), (f"{name}/bias", outputs))
        self.layers.append(Layer(name, tensors, float(inputs * outputs)))
