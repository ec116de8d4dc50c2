"""VGG-19 (Simonyan and Zisserman 2015, Table 1, column E): 38 tensors, 143.7 million parameters."""

from __future__ import annotations

from hvd_ext.planning.models.layer import Convolutions, Layer

_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def layers(size: int = 224) -> list[Layer]:
    """Lists the layers in the order of the forward pass of pictures of size x size pixels."""
    net = Convolutions(size)
    for block, (filters, count) in enumerate(_BLOCKS, 1):
        for number in range(count):
            net.conv(f"conv{block}_{number + 1}", filters, 3)
        net.pool()
    net.dense("fc6", 512 * net.size * net.size, 4096)
    net.dense("fc7", 4096, 4096)
    net.dense("predictions", 4096, 1000)
    return net.layers
