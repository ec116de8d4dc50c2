"""LARS and LAMB beside a NumPy reference in float64, and Keras' own Lamb; what they save; what they refuse."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError
from hvd_ext.tensorflow import norms

STEPS = 50
# the last two stay where they are excluded: a scalar, and weights that begin at 0
SHAPES = {"dense/kernel": (40, 30), "dense/bias": (30,), "head/kernel": (7,), "scalar": (), "zeros": (5,)}
BIASES = r"bias$"
EXCLUDES = ("exclude_from_trust", "exclude_from_weight_decay")


@dataclasses.dataclass
class Lars:
    """LARS in NumPy and float64, step by step as the docstring of `hvd_ext.optimizers.LARS` has it."""

    rate: float
    momentum: float
    nesterov: bool
    inside: bool
    coefficient: float
    decay: float
    least: float = 0.0
    most: float = np.inf
    plain: Sequence[int] = ()  # places without a trust ratio
    undecayed: Sequence[int] = ()
    velocities: list[np.ndarray] | None = None

    def step(self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives the weights after a step."""
        self.velocities = self.velocities or [np.zeros_like(one) for one in weights]
        after = []
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            decay = 0.0 if place in self.undecayed else self.decay
            below = np.linalg.norm(g) + decay * np.linalg.norm(w)
            trust = self.coefficient * np.linalg.norm(w) / below if np.linalg.norm(w) > 0 and below > 0 else 1.0
            trust = 1.0 if place in self.plain else np.clip(trust, self.least, self.most)
            update = trust * (self.rate if self.inside else 1.0) * (g + decay * w)
            velocity = self.velocities[place] = self.momentum * self.velocities[place] + update
            moved = self.momentum * velocity + update if self.nesterov else velocity
            after.append(w - (1.0 if self.inside else self.rate) * moved)
        return after


@dataclasses.dataclass
class Lamb:
    """LAMB in NumPy and float64, step by step as the docstring of `hvd_ext.optimizers.LAMB` has it."""

    rate: float
    decay: float
    least: float = 0.0
    most: float = np.inf
    plain: Sequence[int] = ()
    undecayed: Sequence[int] = ()
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    done: int = 0
    averages: list[list[np.ndarray]] | None = None

    def step(self, weights: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives the weights after a step."""
        self.averages = self.averages or [[np.zeros_like(one), np.zeros_like(one)] for one in weights]
        self.done += 1
        after = []
        for place, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            averages = self.averages[place]
            averages[0] = self.beta_1 * averages[0] + (1 - self.beta_1) * g
            averages[1] = self.beta_2 * averages[1] + (1 - self.beta_2) * g**2
            mean, square = averages[0] / (1 - self.beta_1**self.done), averages[1] / (1 - self.beta_2**self.done)
            update = mean / (np.sqrt(square) + self.epsilon) + (0.0 if place in self.undecayed else self.decay) * w
            both = np.linalg.norm(w) > 0 and np.linalg.norm(update) > 0
            trust = np.linalg.norm(w) / np.linalg.norm(update) if both else 1.0
            trust = 1.0 if place in self.plain else np.clip(trust, self.least, self.most)
            after.append(w - self.rate * trust * update)
        return after


def beginnings() -> list[np.ndarray]:
    random = np.random.default_rng(7)
    found = [np.asarray(0.1 * random.standard_normal(shape), np.float32) for shape in SHAPES.values()]
    found[-1][...] = 0
    return found


def gradients(step: int) -> list[np.ndarray]:
    """Gives the gradients of a step: none in every tenth, and never any of the head's kernel in the first half."""
    random = np.random.default_rng(1000 + step)
    found = [np.asarray(0.01 * random.standard_normal(shape), np.float32) for shape in SHAPES.values()]
    for place, one in enumerate(found):
        if step % 10 == 3 or (place == 2 and step < STEPS // 2):
            one[...] = 0
    return found


def variables() -> list[keras.Variable]:
    found = []
    for path, value in zip(SHAPES, beginnings(), strict=True):
        with keras.name_scope(path.rpartition("/")[0] or "model"):
            found.append(keras.Variable(value, name=path.rpartition("/")[2]))
    return found


def nothing(step: int) -> None:
    """Changes nothing before a step."""


def trained(optimizer: Any, steps: int = STEPS, change: Callable[[int], None] = nothing) -> list[np.ndarray]:
    weights = variables()

    @tf.function(autograph=False)
    def apply(*found: tf.Tensor) -> None:
        optimizer.apply(list(found), weights)

    optimizer.build(weights)
    for step in range(steps):
        change(step)
        apply(*[tf.constant(one) for one in gradients(step)])
    assert apply.experimental_get_tracing_count() == 1
    return [np.asarray(one) for one in weights]


def expected(reference: Any, steps: int = STEPS, change: Callable[[int], None] = nothing) -> list[np.ndarray]:
    weights = [one.astype(np.float64) for one in beginnings()]
    for step in range(steps):
        change(step)
        weights = reference.step(weights, [one.astype(np.float64) for one in gradients(step)])
    return weights


def same(seen: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for path, one, other in zip(SHAPES, seen, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.fixture(params=["with the library", "without"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ops of the native library, and without them."""
    if request.param == "without":
        monkeypatch.setattr(norms, "_is_there", lambda: False)
    else:
        assert norms.device_of(variables())


def float32(value: float) -> float:
    return float(np.float32(value))


def settings(decay: bool, limited: bool, excluded: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives the settings that both optimizers have, and those of their references."""
    ours: dict[str, Any] = {"weight_decay": 0.01 if decay else 0.0}
    ours |= {"min_trust": 0.01, "max_trust": 0.1} if limited else {}
    ours |= dict(zip(EXCLUDES, ([BIASES], [BIASES, "scalar$"]) if excluded else ([], []), strict=True))
    theirs: dict[str, Any] = {"decay": ours["weight_decay"]}
    theirs |= {"least": 0.01, "most": 0.1} if limited else {}
    theirs |= {"plain": (1,), "undecayed": (1, 3)} if excluded else {}
    return ours, theirs


def rows(texts: str) -> list[list[bool]]:
    """Reads rows of flags in which any two have each of their four values together."""
    return [[flag == "+" for flag in text] for text in texts.split()]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("nesterov", "inside", "decay", "limited", "excluded"), rows("----- -++++ +-++- ++--+ +++-- --+-+ +--++ -+-+-")
)
def test_lars_is_the_reference(nesterov: bool, inside: bool, decay: bool, limited: bool, excluded: bool) -> None:
    ours, theirs = settings(decay, limited, excluded)
    ours |= {"nesterov": nesterov, "rate_in_momentum": inside, "trust_coefficient": 0.02}
    reference = Lars(0.5, float32(0.9), nesterov, inside, 0.02, **theirs)
    same(trained(hvd.optimizers.LARS(0.5, 0.9, **ours)), expected(reference))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("decay", "limited", "excluded"), rows("--- ++- +-+ -++"))
def test_lamb_is_the_reference(decay: bool, limited: bool, excluded: bool) -> None:
    ours, theirs = settings(decay, limited, excluded)
    same(trained(hvd.optimizers.LAMB(0.01, **ours)), expected(Lamb(float32(0.01), **theirs)))


@pytest.mark.usefixtures("library")
def test_lamb_without_exclusions_and_decay_is_that_of_keras() -> None:
    ours = hvd.optimizers.LAMB(0.01, exclude_from_trust=(), exclude_from_weight_decay=())
    same(trained(ours), trained(keras.optimizers.Lamb(0.01)))


@pytest.mark.usefixtures("library")
def test_a_momentum_changes_between_steps_without_a_new_trace_or_is_a_schedule() -> None:
    values = [0.9375] * 5 + [0.75] * 5 + [0.5] * 10
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4, 9], [0.9375, 0.75, 0.5])
    for momentum in (0.5, schedule):
        optimizer = hvd.optimizers.LARS(0.5, momentum, exclude_from_trust=())
        reference = Lars(0.5, 0.5, False, True, 0.001, 0.0)

        def set_ours(step: int, optimizer: Any = optimizer) -> None:
            optimizer.momentum = values[step]

        def set_theirs(step: int, reference: Lars = reference) -> None:
            reference.momentum = values[step]

        seen = trained(optimizer, 20, nothing if momentum is schedule else set_ours)
        same(seen, expected(reference, 20, set_theirs))
        if momentum is not schedule:
            with pytest.raises(InvalidError, match=r"momentum \(1\): must be a number, at least 0 and below 1"):
                optimizer.momentum = 1
    with pytest.raises(InvalidError, match=r"momentum \(0.5\): .* was made with a schedule"):
        optimizer.momentum = 0.5


@pytest.mark.parametrize("make", [hvd.optimizers.LARS, hvd.optimizers.LAMB])
def test_slices_of_a_gradient_are_added_up(make: Any) -> None:
    found = []
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([2, 0, 2]), (4, 2))
    for gradient in (slices, tf.convert_to_tensor(slices)):
        table = keras.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="embeddings")
        optimizer = make(0.5, weight_decay=0.1)
        for _ in range(3):
            optimizer.apply([gradient], [table])
        found.append(np.asarray(table))
    np.testing.assert_array_equal(*found)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("make", [hvd.optimizers.LARS, hvd.optimizers.LAMB])
def test_variables_of_half_precision_train_too(make: Any) -> None:
    weights = keras.Variable(np.linspace(-1, 1, 50), dtype="bfloat16", name="kernel")
    make(0.5).apply([tf.ones([50], tf.bfloat16)], [weights])
    assert np.isfinite(np.asarray(weights, np.float32)).all()


def test_biases_and_normalization_are_excluded_by_default_and_others_in_the_way_of_keras() -> None:
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.LayerNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = hvd.optimizers.LARS()
    optimizer.build(model.trainable_variables)
    with_trust = [one.path for one, has in zip(model.trainable_variables, optimizer._has_trust, strict=True) if has]
    assert [path.rpartition("/")[2] for path in with_trust] == ["kernel"]
    optimizer = hvd.optimizers.LARS(weight_decay=0.1, exclude_from_weight_decay=())
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(variables())
    assert [bool(has) for has in optimizer._has_decay] == [True, False, True, True, True]


LOADED = """
import sys
import {imports}
import keras
import numpy as np

for name in ("lars", "lamb"):
    model = keras.models.load_model(f"{folder}/{{name}}.keras")
    assert type(model.optimizer).__name__.lower() == name
    assert type(model.optimizer).__module__.startswith("hvd_ext."), type(model.optimizer)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    np.testing.assert_array_equal(model.get_weights()[0], np.load(f"{folder}/{{name}}.npy"))
    if name == "lars":
        assert float(model.optimizer.momentum) == 0.75
"""


def test_a_saved_file_loads_where_hvd_ext_is_imported_before_or_after_keras(tmp_path: Path) -> None:
    x, y = np.ones((4, 3)), np.ones((4, 1))
    for name, kind in (("lars", hvd.optimizers.LARS), ("lamb", hvd.optimizers.LAMB)):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = kind(0.5, weight_decay=0.1, exclude_from_trust=["nothing"], max_trust=2)
        model.compile(optimizer, "mse", run_eagerly=True)
        if name == "lars":
            optimizer.momentum = 0.75
        model.train_on_batch(x, y)
        model.save(tmp_path / f"{name}.keras")
        model.train_on_batch(x, y)
        np.save(tmp_path / f"{name}.npy", model.get_weights()[0])
    started = []
    for imports in ("hvd_ext, tensorflow", "keras, hvd_ext"):
        program = LOADED.format(imports=imports, folder=tmp_path)
        started.append(subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True))
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


def test_a_configuration_makes_the_same_optimizer() -> None:
    schedule = keras.optimizers.schedules.PolynomialDecay(0.98, 100, 0.9)
    for optimizer in (
        hvd.optimizers.LARS(0.5, schedule, nesterov=True, rate_in_momentum=False, min_trust=1e-5, max_trust=1),
        hvd.optimizers.LARS(0.5, 0.98, trust_coefficient=8e-4, use_ema=True),
        hvd.optimizers.LAMB(0.5, 0.8, 0.9, 1e-5, weight_decay=0.1, clipnorm=1.0),
    ):
        again = type(optimizer).from_config(optimizer.get_config())
        assert again.get_config() == optimizer.get_config()


WRONG = [
    ({"momentum": 1.0}, r"momentum \(1.0\): must be a number, at least 0 and below 1"),
    ({"momentum": "0.9"}, r"momentum \('0.9'\): must be a number"),
    ({"momentum": True}, r"momentum \(True\): must be a number"),
    ({"trust_coefficient": 0}, r"trust_coefficient \(0\): must be above 0"),
    ({"trust_coefficient": -1}, r"trust_coefficient \(-1\): must be a number, at least 0"),
    ({"learning_rate": "fast"}, r"learning_rate \('fast'\): must be a number"),
    ({"learning_rate": -0.1}, r"learning_rate \(-0.1\): must be a number, at least 0"),
    ({"weight_decay": None}, r"weight_decay \(None\): must be a number, at least 0"),
    ({"weight_decay": float("nan")}, r"weight_decay \(nan\): must be a number, at least 0"),
    ({"min_trust": -1}, r"min_trust \(-1\): must be a number, at least 0"),
    ({"max_trust": 0}, r"max_trust \(0\): must be a number above 0"),
    ({"min_trust": 2, "max_trust": 1}, r"max_trust \(1\): .* at least min_trust, which is 2"),
    ({"exclude_from_trust": "bias"}, r"exclude_from_trust \('bias'\): must be a list of patterns"),
    ({"exclude_from_trust": [3]}, r"exclude_from_trust \(\[3\]\): must be a list of patterns"),
    ({"exclude_from_weight_decay": ["("]}, r"exclude_from_weight_decay: '\(' is no regular expression"),
    ({"exclude_from_weight_decay": [""]}, r"exclude_from_weight_decay \(\[''\]\): an empty pattern"),
]


OF_LAMB = [
    ({"beta_1": 1}, r"beta_1 \(1\): must be a number, at least 0 and below 1"),
    ({"beta_2": -0.1}, r"beta_2 \(-0.1\): must be a number"),
    ({"epsilon": 0}, r"epsilon \(0\): must be above 0"),
    *[row for row in WRONG if not {"momentum", "trust_coefficient"} & set(row[0])],
]


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [(hvd.optimizers.LARS, *row) for row in WRONG] + [(hvd.optimizers.LAMB, *row) for row in OF_LAMB],
)
def test_wrong_arguments_are_refused(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        make(**options)
