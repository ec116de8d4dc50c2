"""The networks of the papers: what is known of them, and the times that are made of their operations."""

from __future__ import annotations

import itertools

import pytest

from hvd_ext.errors import PlanError
from hvd_ext.planning import models
from hvd_ext.planning.models import convolutional, transformers

# the parameters of Keras' applications and of Hugging Face's BertModel, and Caffe's GoogleNet with both side branches
KNOWN = {
    "resnet50": (convolutional.resnet50, 161, 25_557_032, 3.88e9),
    "vgg19": (convolutional.vgg19, 38, 143_667_240, 19.63e9),
    "googlenet": (convolutional.googlenet, 128, 13_378_280, 1.59e9),
    "bert_base": (transformers.bert_base, 199, 109_482_240, 11.2e9),
    "transformer_base": (transformers.transformer_base, 255, 110_186_496, 18.1e9),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_network_has_the_tensors_and_the_operations_of_its_paper(name: str) -> None:
    layers, tensors, elements, macs = KNOWN[name]
    found = layers()
    assert sum(len(layer.tensors) for layer in found) == tensors
    assert sum(layer.elements for layer in found) == elements
    assert sum(layer.forward_macs for layer in found) == pytest.approx(macs, rel=0.01)
    names = [tensor for layer in found for tensor, _ in layer.tensors]
    assert len(set(names)) == len(names)
    if name == "resnet50":  # operations shrink with the picture
        small = sum(layer.forward_macs for layer in layers(96))
        assert small / macs == pytest.approx((96 / 224) ** 2, rel=0.02)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_times_of_a_model_add_up_to_the_papers(name: str) -> None:
    times = models.times_of(name)
    assert times.computed_s == pytest.approx(models.MODELS[name].compute_s)
    assert times.forward_s == pytest.approx(times.computed_s / 3), "a backward pass takes twice its forward pass"
    assert all(one >= other for one, other in itertools.pairwise(times.ready_s)), "the last layer is ready first"
    assert min(times.ready_s) > times.forward_s
    assert models.times_of(name, 3.0).forward_s == pytest.approx(1.0)


def test_a_layer_takes_its_share_of_the_operations() -> None:
    layers = [models.Layer("a", (("a/w", 5), ("a/b", 2)), 30.0), models.Layer("b", (("b/w", 7),), 10.0)]
    times = models.step_times(layers, 6.0)
    assert [tensor.elements for tensor in times.tensors] == [5, 2, 7]
    assert times.ready_s == pytest.approx((6.0, 6.0, 3.0))


def test_an_unknown_model_and_a_wrong_time_are_refused() -> None:
    with pytest.raises(PlanError, match="model 'alexnet': must be one of resnet50, "):
        models.times_of("alexnet")
    with pytest.raises(PlanError, match=r"compute_s \(0\): must be above 0 and finite"):
        models.times_of("resnet50", 0)
