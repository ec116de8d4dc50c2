"""GoogleNet (Szegedy et al. 2015, Table 1) with both auxiliary classifiers, as in Caffe: 13.4 million weights."""

from __future__ import annotations

from hvd_ext.planning.models.layer import Convolutions, Layer

# #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj
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


def layers(size: int = 224) -> list[Layer]:
    """Lists the layers in the order of the forward pass of pictures of size x size pixels."""
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
