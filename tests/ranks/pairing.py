"""Trains with any set of the features of `compatibility`, distributed, and plainly on the joined batch."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_ext as hvd
from tests.ranks.training import fill

SCALE, FACTOR = 4.0, 2.0
SHAPES = {"table": (7, 3), "kernel": (3, 5), "own": (4,)}
KEYWORDS: dict[str, dict[str, Any]] = {
    "op=Sum": {"op": hvd.Sum},
    "compression": {"compression": hvd.Compression.fp16},
    "top-k": {"compression": hvd.TopK(0.5, min_elements=1, wire="fp32")},
    "top-k until": {"compression": hvd.TopK(0.5, min_elements=1, wire="fp32", until=2)},
    "low rank": {"compression": hvd.LowRank(2, saving=0.0)},
    "predivide": {"gradient_predivide_factor": FACTOR},
    "backward_passes_per_step": {"backward_passes_per_step": 2},
    "groups": {"groups": 2},
    "sparse_as_dense": {"sparse_as_dense": True},
    "partial rounds": {"sync": "majority", "staleness": 0},
    "delay": {"delay": 1},
    # with SGD the mean of weights that each have one more step is a step by the mean of the gradients
    "local steps": {"local_steps": hvd.LocalSteps(1, outer=None, within="rank")},
}
# with these the mean of the ranks' updates is not the update by the mean of their gradients
NOT_LINEAR = {"clipping", "global_clipnorm", "mixed_float16", "LARS, LAMB"}
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"clipnorm": 0.25},
    "global_clipnorm": {"global_clipnorm": 0.25},
    "EMA": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
}


class Case:
    """A set of features.

    Args:
        features: of `hvd_ext.options.compatibility.FEATURES`; and "LAMB", which takes it in place of LARS.
        process_set: what "process_set" takes.
    """

    def __init__(self, features: set[str], process_set: hvd.ProcessSet) -> None:
        self.features = features
        self.process_set = process_set
        self.members = list(range(hvd.size()))
        if "process_set" in features:
            self.members = list(process_set.ranks) if process_set.included() else [hvd.rank()]
        self.alone = "process_set" in features and not process_set.included()
        self.keras2 = "Keras 2" in features
        self.passes = 2 if features & {"accumulation", "backward_passes_per_step"} else 1

    @property
    def keywords(self) -> dict[str, Any]:
        """What the optimizer or the tape is given."""
        found: dict[str, Any] = {"process_set": self.process_set} if "process_set" in self.features else {}
        for feature in self.features:
            found |= KEYWORDS.get(feature, {})
        if "local steps" in self.features and self.features & NOT_LINEAR:
            found["local_steps"] = dataclasses.replace(found["local_steps"], start=100)
        asked = [name for name in ("compression", "top-k", "top-k until", "low rank") if name in self.features]
        if len(asked) > 1:
            both = tuple(KEYWORDS[name]["compression"] for name in asked)
            found["compression"] = both[-1] if asked == ["top-k", "top-k until"] else both
        topk = found.get("compression")
        if "LARS, LAMB" in self.features and isinstance(topk, hvd.TopK):  # else its trust ratios would be late
            found["compression"] = dataclasses.replace(topk, momentum_correction=False)
        return found

    def optimizer(self, plain: bool) -> Any:
        """Make an optimizer; plain: Keras itself adds up what ours does."""
        settings: dict[str, Any] = {"momentum": 0.5}
        for feature in self.features:
            settings |= SETTINGS.get(feature, {})
        if plain and self.passes > 1 and not self.keras2:
            settings["gradient_accumulation_steps"] = self.passes
        if self.keras2:
            import tf_keras

            if "LARS, LAMB" in self.features:
                return tf_keras.optimizers.get(hvd.optimizers.LARS())
            made = tf_keras.optimizers.SGD(0.5, **settings)
            if "mixed_float16" in self.features:
                made = tf_keras.mixed_precision.LossScaleOptimizer(made, initial_scale=SCALE)
            return made
        made = keras.optimizers.SGD(0.5, **settings)
        if "LARS, LAMB" in self.features:
            alone = plain or self.features & {"partial rounds", "local steps", "tape", "XLA"}
            # SyncBatchNormalization has its gamma in the place of "own"
            excluded = {"exclude_from_trust": ["own", "gamma$"], "exclude_from_weight_decay": ["own", "gamma$"]}
            settings |= {"weight_decay": 0.125, "parallel": not alone, **excluded}
            if "LAMB" in self.features:
                del settings["momentum"]
                made = hvd.optimizers.LAMB(0.05, **settings)
            else:
                made = hvd.optimizers.LARS(0.5, trust_coefficient=0.25, **settings)
        if "mixed_float16" in self.features:
            made = keras.optimizers.LossScaleOptimizer(made, initial_scale=SCALE)
        return made

    def variables(self) -> list[Any]:
        """Make the variables, equal on all ranks."""
        if self.keras2:
            found = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
        else:
            found = [keras.Variable(np.zeros(shape), dtype="float32", name=name) for name, shape in SHAPES.items()]
        if "SyncBatchNormalization" in self.features:
            layer = hvd.SyncBatchNormalization()
            layer.build((None, *SHAPES["own"]))
            found[2] = layer.gamma
        fill(found)
        return found

    @property
    def steps(self) -> int:
        """How many applies there are; in mixed precision the second is bad on the last rank."""
        if "top-k until" in self.features:  # the third update is the first dense one, and one is left out
            return 5 * self.passes
        return 3 if "mixed_float16" in self.features else 2

    def gradients(self, rank: int, step: int) -> list[Any]:
        """Give one rank's gradients; the first has repeated rows if it is sparse."""
        bad = np.inf if "mixed_float16" in self.features and step == 1 and rank == hvd.size() - 1 else 1.0
        found: list[Any] = [
            tf.constant((np.arange(np.prod(shape)).reshape(shape) * 3 + rank * 5 + step * 7) % 16 - 7, tf.float32) / 8
            for shape in SHAPES.values()
        ]
        found[1] = found[1] * bad
        if self.features & {"sparse gradients", "sparse_as_dense"}:
            found[0] = tf.IndexedSlices(found[0][:3], tf.constant([rank % 7, 5, 5]), tf.constant(SHAPES["table"]))
        return found

    def joined(self, step: int) -> list[tf.Tensor]:
        """Give the gradients of the batch of all ranks that train together, dense."""
        every = [[tf.convert_to_tensor(one) for one in self.gradients(rank, step)] for rank in self.members]
        size = 1 if "op=Sum" in self.features else len(self.members)
        found = [tf.add_n(list(parts)) / size for parts in zip(*every, strict=True)]
        if "local variables" in self.features:
            found[2] = self.gradients(hvd.rank(), step)[2] / (1 if self.alone else len(self.members))
        if self.features >= {"partial rounds", "mixed_float16"} and step == 2:  # the finite ones are held again
            good = [self.gradients(rank, 1) for rank in self.members if rank != hvd.size() - 1]
            for again in good:
                found = [one + tf.convert_to_tensor(part) / size for one, part in zip(found, again, strict=True)]
        return found

    def plainly(self) -> list[np.ndarray]:
        """Train with an optimizer of Keras alone."""
        optimizer, variables, kept = self.optimizer(True), self.variables(), []
        sums = "backward_passes_per_step" in self.features
        for step in range(self.steps):
            given = [scaled(optimizer, part, self.keras2) for part in self.joined(step)]
            kept.append(given)
            if self.keras2 and self.passes > 1:
                if len(kept) == self.passes:
                    given = [tf.add_n(list(parts)) for parts in zip(*kept, strict=True)]
                    optimizer.apply_gradients(zip(given, variables, strict=True))
                    kept.clear()
                continue
            given = [part * self.passes for part in given] if sums else given
            optimizer.apply_gradients(zip(given, variables, strict=True))
        return [variable.numpy() for variable in variables]

    def together(self) -> list[list[np.ndarray]]:
        """Train with ours; a list of values for each optimizer."""
        count = 2 if "two optimizers" in self.features else 1
        taped = "tape" in self.features
        optimizers = [self.optimizer(False) for _ in range(count)]
        lists = [self.variables() for _ in range(count)]
        if not taped:
            optimizers = [hvd.DistributedOptimizer(optimizer, **self.keywords) for optimizer in optimizers]
            if "local variables" in self.features:
                for optimizer, variables in zip(optimizers, lists, strict=True):
                    optimizer.register_local_var(variables[2])
        # with a delay the last results are applied with the first pass of one more update
        more = self.passes if "delay" in self.features else 0
        for step in [*range(self.steps), *([0] * more)]:
            for optimizer, variables in zip(optimizers, lists, strict=True):
                given = [scaled(optimizer, part, self.keras2) for part in self.gradients(hvd.rank(), step)]
                given = self.from_tape(given, variables) if taped else given
                optimizer.apply_gradients(zip(given, variables, strict=True))
        return [[variable.numpy() for variable in variables] for variables in lists]

    def from_tape(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Reduce gradients by a tape that has them as those of a loss."""
        tape = hvd.DistributedGradientTape(tf.GradientTape(), **self.keywords)
        if "local variables" in self.features:
            tape.register_local_source(variables[2])
        with tape:
            loss = tf.constant(0.0)
            for gradient, variable in zip(gradients, variables, strict=True):
                value = tf.convert_to_tensor(variable)
                if isinstance(gradient, tf.IndexedSlices):
                    table = variable if self.keras2 else variable.value
                    loss += tf.reduce_sum(tf.gather(table, gradient.indices) * gradient.values)
                else:
                    loss += tf.reduce_sum(value * gradient)
        return tape.gradient(loss, variables)

    def compiled(self) -> None:
        """Take one step inside a function that XLA compiles."""
        variables, optimizer = self.variables(), self.optimizer(False)
        if "tape" not in self.features:
            optimizer = hvd.DistributedOptimizer(optimizer, **self.keywords)
        with contextlib.suppress(AttributeError):  # some have nothing to build
            optimizer.build(variables)

        @tf.function(jit_compile=True, autograph=False)
        def step() -> None:
            given = self.gradients(hvd.rank(), 0)
            given = self.from_tape(given, variables) if "tape" in self.features else given
            optimizer.apply_gradients(list(zip(given, variables, strict=True)))

        step()


def scaled(optimizer: Any, gradient: Any, keras2: bool) -> Any:
    """Scale a gradient as its loss would be."""
    if not hasattr(optimizer, "inner_optimizer"):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(optimizer, gradient.values, keras2), gradient.indices, gradient.dense_shape)
    return optimizer.get_scaled_loss(gradient) if keras2 else optimizer.scale_loss(gradient)
