"""ResNet-50 (He et al. 2016, Table 1): 161 tensors, 25.6 million parameters, 3.9 G multiply-adds at 224 x 224."""

from __future__ import annotations

from hvd_ext.planning.models.layer import Convolutions, Layer

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first block


def layers(size: int = 224) -> list[Layer]:
    """Lists the layers in the order of the forward pass of pictures of size x size pixels."""
    net = Convolutions(size)
    net.conv("conv1", 64, 7, 2, bias=False)
    net.norm("conv1_bn")
    net.pool()
    for stage, (width, blocks, first) in enumerate(_STAGES, 2):
        for block in range(blocks):
            stride, name, inputs = first if block == 0 else 1, f"conv{stage}_{block + 1}", net.channels
            if block == 0:
                net.conv(f"{name}_0", 4 * width, 1, stride, bias=False, of=inputs)
                net.norm(f"{name}_0_bn", 4 * width, -(-net.size // stride))
            for number, (filters, kernel, step) in enumerate(((width, 1, stride), (width, 3, 1), (4 * width, 1, 1)), 1):
                net.conv(f"{name}_{number}", filters, kernel, step, bias=False)
                net.norm(f"{name}_{number}_bn")
    net.dense("predictions", 2048, 1000)
    return net.layers
