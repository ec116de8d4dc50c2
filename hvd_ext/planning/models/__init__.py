"""The networks of the papers by name, with layer times that are made of floating-point operations.

The paper gives the time of a whole step of one GPU. It is divided over the layers by their multiply-adds; the backward
pass of a layer takes twice its forward pass, because it makes the gradients of the inputs and of the parameters. Real
layers do not all reach the same rate: a measured model (`trace FOLDER --model FILE`) is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hvd_ext.errors import PlanError
from hvd_ext.planning.models.convolutional import googlenet, resnet50, vgg19
from hvd_ext.planning.models.layer import Layer as Layer
from hvd_ext.planning.models.transformers import bert_base, transformer_base
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Model:
    """A network of a paper.

    Args:
        compute_s: the time of a forward and a backward pass on one GPU, seconds.
        layers: lists the layers in the order of the forward pass.
    """

    name: str
    compute_s: float
    source: str
    layers: Callable[[], list[Layer]]


_LISTED = (
    Model("resnet50", 0.163, "BlueConnect, Section 4.2: 32 pictures on a P100", resnet50),
    Model(
        "resnet50-k80",
        32 * 2 / 76.85,
        "MG-WFBP: 32 pictures on a K80; 76.85 pictures/s of two are in its authors' scripts/gmwfbp.py in B-Caffe",
        resnet50,
    ),
    Model(
        "googlenet-k80",
        0.403 * 1.5,
        "MG-WFBP: 64 pictures on a K80; a backward pass takes 403 ms by its authors' logdata/tmpcomm.log in B-Caffe, "
        "and their simulator takes half of it for the forward pass",
        googlenet,
    ),
    Model("resnet50-v100", 256 / 1150, "CommLib, Section 5.5.2: 256 pictures, 1150 a second", resnet50),
    Model(
        "resnet50-96-v100",
        256 / 4400,
        "CommLib, Table 4: 256 pictures of 96 x 96, 4400 a second",
        partial(resnet50, 96),
    ),
    Model("vgg19-v100", 256 / 560, "CommLib, Section 5.5.2: 256 pictures, 560 a second", vgg19),
    Model(
        "transformer-v100",
        16 / 32,
        "CommLib, Section 5.5.2: 32 sentences a second; a batch of 16 is assumed",
        transformer_base,
    ),
    Model("resnet50-p100", 1 / 1.56, "eager-SGD, Section 6.2.2: 128 pictures, 1.56 steps a second", resnet50),
    Model("bert-base", 0.2, "an assumption: 32 sequences of 128 tokens on a V100", bert_base),
)
MODELS: Mapping[str, Model] = {model.name: model for model in _LISTED}


def times_of(name: str, compute_s: float | None = None) -> StepTimes:
    """Makes the times of a step from the operations of a network.

    Args:
        compute_s: the time of a forward and a backward pass in seconds; None for the paper's.

    Returns:
        The times. All parameters of a layer are ready when its backward pass ends.

    Raises:
        PlanError: there is no such model, or the time is not above 0.
    """
    if name not in MODELS:
        raise PlanError(f"model {name!r}: must be one of {', '.join(MODELS)}")
    total_s = MODELS[name].compute_s if compute_s is None else compute_s
    if not 0 < total_s < float("inf"):
        raise PlanError(f"compute_s ({total_s}): must be above 0 and finite")
    return step_times(MODELS[name].layers(), total_s)


def step_times(layers: list[Layer], compute_s: float) -> StepTimes:
    """Divides the time of a step over the layers by their operations."""
    forward_s = FORWARD_SHARE * compute_s
    macs = sum(layer.forward_macs for layer in layers)
    done, ready = 0.0, []
    for layer in reversed(layers):
        done += layer.forward_macs
        at_s = forward_s + (compute_s - forward_s) * done / macs
        ready += [at_s] * len(layer.tensors)
    tensors = tuple(Tensor(name, (elements,), "float32") for layer in layers for name, elements in layer.tensors)
    return StepTimes(tensors, tuple(reversed(ready)), forward_s)
