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


def dense(name: str, inputs: int, outputs: int, positions: int = 1, *, bias: bool = True) -> Layer:
    """Makes a dense layer, which a sample goes through at a number of positions."""
    tensors = ((f"{name}/kernel", inputs * outputs), *(((f"{name}/bias", outputs),) if bias else ()))
    return Layer(name, tensors, float(inputs * outputs * positions))


def norm(name: str, channels: int, positions: int) -> Layer:
    """Makes a normalisation with scale and offset; an element takes about two multiply-adds."""
    return Layer(name, ((f"{name}/gamma", channels), (f"{name}/beta", channels)), 2.0 * channels * positions)
