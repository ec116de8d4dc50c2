"""The models of the convergence study: what goes in and out, and what makes them differ."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from benchmarks.studies.convergence import data as data_sets
from benchmarks.studies.convergence.models import build
from benchmarks.studies.convergence.worker import optimizer


@pytest.mark.parametrize(("model", "normalised"), [("cnn", True), ("vgg", False)])
def test_images_become_logits_with_and_without_batch_normalisation(model: str, normalised: bool):
    built = build(model, (16, 16, 3), 3, 5, width=2)
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    assert built.predict_on_batch(images).shape == (2, 3, 5)
    assert any(isinstance(layer, keras.layers.BatchNormalization) for layer in built.layers) is normalised


def test_the_transformer_does_not_see_what_it_must_predict():
    built = build("transformer", (6,), 6, 9, width=8)
    characters = np.arange(12, dtype=np.int32).reshape(2, 6)
    changed = characters.copy()
    changed[:, 4] = 7
    before, after = (built.predict_on_batch(text) for text in (characters, changed))
    assert before.shape == (2, 6, 9)
    assert np.allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not np.allclose(before[:, 4:], after[:, 4:], atol=1e-3)


def test_the_first_weights_depend_on_the_seed_alone():
    weights = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        weights.append(np.concatenate([np.ravel(part) for part in build("vgg", (16, 16, 3), 3, 5, 2).get_weights()]))
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["", "sgd", "lars"])
def test_the_optimizer_is_that_of_the_recipe(name: str):
    topk = {} if name == "sgd" else {"density": 0.01, "momentum_correction": True}
    recipe = {"learning_rate": 0.5, "momentum": 0.75, "nesterov": True}
    if name:
        recipe |= {"optimizer": name, "lars": {"weight_decay": 0.25} if name == "lars" else None}
    how = {"algorithm": "hitopk" if topk else "auto", "topk": topk, "warmup": 0}
    made = optimizer({"recipe": recipe, "how": how, "seed": 1}, 100)
    assert type(made).__name__ == ("LARS" if name == "lars" else "SGD")
    assert (float(made.momentum), made.nesterov) == (0.75, True)
    assert name != "lars" or made.weight_decay == 0.25
    assert (made._hvd_ext.reducer.momentum is not None) == bool(topk)


def test_the_parts_of_a_class_are_its_labels():
    names = ["disc_dots_red", "disc_grid_lime", "star_dots_lime"]
    assert data_sets.parts_of(names).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
