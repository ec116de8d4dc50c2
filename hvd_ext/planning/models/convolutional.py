"""Convolutional networks: ResNet-50, VGG-19, GoogleNet, and a list of layers from which others can be made."""

from __future__ import annotations

from hvd_ext.planning.models.layer import Layer, dense, norm

# ResNet-50: width, blocks, stride of the first block
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
# VGG-19: filters, layers
_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
# GoogleNet: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj
_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_POOLED_BEFORE = ("3a", "4a", "5a")
_CLASSIFIED_AFTER = {"4a": "loss1", "4d": "loss2"}


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
        """Adds a batch normalisation with scale and offset.

        Args:
            channels: the number of channels; None for those of the layer before.
            size: the height and width of the picture; None for those of the layer before.
        """
        size = size or self.size
        self.layers.append(norm(name, channels or self.channels, size * size))

    def pool(self, stride: int = 2) -> None:
        """Adds a pooling layer, which divides the size of the picture by its stride."""
        self.size = -(-self.size // stride)

    def dense(self, name: str, inputs: int, outputs: int) -> None:
        """Adds a dense layer with a bias."""
        self.layers.append(dense(name, inputs, outputs))


def resnet50(size: int = 224) -> list[Layer]:
    """Lists the layers of ResNet-50 (He et al. 2016, Table 1) in the order of the forward pass.

    It has 161 tensors, 25.6 million parameters, and 3.9 G multiply-adds at 224 x 224.

    Args:
        size: the height and width of the pictures in pixels.
    """
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


def vgg19(size: int = 224) -> list[Layer]:
    """Lists the layers of VGG-19 (Simonyan and Zisserman 2015, Table 1, column E) in the order of the forward pass.

    It has 38 tensors and 143.7 million parameters.

    Args:
        size: the height and width of the pictures in pixels.
    """
    net = Convolutions(size)
    for block, (filters, count) in enumerate(_BLOCKS, 1):
        for number in range(count):
            net.conv(f"conv{block}_{number + 1}", filters, 3)
        net.pool()
    net.dense("fc6", 512 * net.size * net.size, 4096)
    net.dense("fc7", 4096, 4096)
    net.dense("predictions", 4096, 1000)
    return net.layers


def googlenet(size: int = 224) -> list[Layer]:
    """Lists the layers of GoogleNet (Szegedy et al. 2015, Table 1) in the order of the forward pass.

    It has both auxiliary classifiers, as in Caffe: 13.4 million weights.

    Args:
        size: the height and width of the pictures in pixels.
    """
    net = Convolutions(size)
    net.conv("conv1", 64, 7, 2)
    net.pool()
    net.conv("conv2_reduce", 64, 1)
    net.conv("conv2", 192, 3)
    for name, (single, reduce3, three, reduce5, five, pool) in _INCEPTIONS.items():
        if name in _POOLED_BEFORE:
            net.pool()
        inputs = net.channels
        net.conv(f"{name}_1x1", single, 1, of=inputs)
        net.conv(f"{name}_3x3_reduce", reduce3, 1, of=inputs)
        net.conv(f"{name}_3x3", three, 3, of=reduce3)
        net.conv(f"{name}_5x5_reduce", reduce5, 1, of=inputs)
        net.conv(f"{name}_5x5", five, 5, of=reduce5)
        net.conv(f"{name}_pool_proj", pool, 1, of=inputs)
        net.channels = single + three + five + pool
        if name in _CLASSIFIED_AFTER:
            loss = _CLASSIFIED_AFTER[name]
            side = Convolutions(4, net.channels)  # average pooling of 5 x 5 with stride 3
            side.conv(f"{loss}_conv", 128, 1)
            side.dense(f"{loss}_fc", 128 * 4 * 4, 1024)
            side.dense(f"{loss}_classifier", 1024, 1000)
            net.layers += side.layers
    net.dense("loss3_classifier", 1024, 1000)
    return net.layers
