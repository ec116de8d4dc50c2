"""A training: its optimizer, its phases, its validation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from images.manifest import write_whole

import hvd_ext as hvd
from hvd_ext.errors import HvdExtError
from hvd_ext.options import from_environment

from . import network
from .clock import Clock
from .pictures import Pictures
from .report import Report
from .rows import read
from .schedule import Steps
from .settings import Optimizer, Settings, SettingsError, keep

Kinds = tuple[str, ...]


def compiled(settings: Settings, steps: Steps, kinds: Kinds) -> keras.Model:
    """Make the model of a training, with the optimizer of the job."""
    model = network.build(settings.network, settings.mixed_precision)
    return with_optimizer(model, distributed(settings, steps, kinds), settings)


def with_optimizer(model: keras.Model, optimizer: Any, settings: Settings) -> keras.Model:
    """Compile a network with the loss of a training."""
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    model.compile(optimizer, network.smoothed(settings.smoothing), metrics=metrics)
    return model


def train(
    settings: Settings, kinds: Kinds, folder: Path, make: Callable[[Settings, Steps, Kinds], keras.Model] = compiled
) -> int:
    """Train all phases, or go on where a training in the folder stopped; all ranks call it after `hvd.init()`.

    Args:
        settings: of the training.
        kinds: "topk" or "dense" for each phase; a training that goes on keeps those that it has begun with.
        folder: of the results and checkpoints.
        make: makes the compiled model.

    Returns:
        0, or the exit status of a training that a signal has stopped.

    Raises:
        SettingsError: the settings do not fit the job, its pictures, or the training in the folder.
    """
    clock = Clock()
    check(settings, hvd.size())
    keras.utils.set_random_seed(settings.seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    pictures = Pictures(settings, hvd.rank(), hvd.size())
    steps = Steps(settings, pictures.train)
    compression(settings, steps, kinds)  # what it refuses must not be kept
    kinds = kept_by_root(settings, kinds, folder)
    if hvd.rank() == 0:
        clock.keep(folder / "clock.json")
    model = make(settings, steps, kinds)
    report = Report(settings, kinds, steps, folder, clock)
    checkpoint, validation = Checkpoint(folder / "checkpoints", clock), Validation(clock)
    for number, phase in enumerate(settings.phases):
        data = pictures.training(phase, steps.in_epoch[number])
        validation.pictures = pictures.validation(phase)
        callbacks = [hvd.callbacks.AverageStatistics(), validation, report]
        model.make_train_function(force=True)  # for this size: the old one would be traced for pictures of any size
        model.fit(
            data,
            initial_epoch=settings.begins[number],
            epochs=settings.begins[number + 1],
            callbacks=hvd.callbacks.synchronized([*callbacks, checkpoint], stop_every=None),
            shuffle=False,
            verbose=0,
        )
        clock.go_on()
        if checkpoint.stopped_by:
            break
    report.close()
    pictures.close()
    if hvd.rank() == 0 and not checkpoint.stopped_by:
        save(model, folder / "model.keras")
    return checkpoint.exit_status


def save(model: keras.Model, path: Path) -> None:
    """Save a model, whole or not at all.

    Raises:
        SettingsError: the disk is full, or does not work.
    """
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        model.save(part)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SettingsError(f"{path}: cannot be written: {error}; the same command tries it again") from error


def options(settings: Settings, topology: Path | None) -> hvd.Options:
    """Give the options of the job: of the settings, and of the environment what they leave open.

    Deterministic trainings have buckets that do not follow measured times.
    """
    fixed = {"buckets": "by_size", "replan_every": 0, "probe": "off"} if settings.deterministic else {}
    return from_environment().replace(algorithm=settings.algorithm, topology=topology, **fixed)


def check(settings: Settings, ranks: int) -> None:
    """Refuse batches that the ranks cannot divide evenly."""
    for number, phase in enumerate(settings.phases):
        if phase.batch % ranks:
            raise SettingsError(f"phases.{number}.batch ({phase.batch}): {ranks} ranks cannot divide it evenly")


def kept_by_root(settings: Settings, kinds: Kinds, folder: Path) -> Kinds:
    """Keep settings and kinds in the folder, on rank 0; what it refuses ends all ranks.

    Returns:
        The kinds that the training in the folder has begun with.
    """
    refused, path = "", folder / "compression.json"
    if hvd.rank() == 0:
        try:
            keep(settings, folder)
            if path.exists():
                kinds = tuple(json.loads(path.read_text(encoding="utf-8")))
            else:
                write_whole(path, json.dumps(kinds).encode())
            read(folder / "report.json")  # refused here if it cannot be read, for all ranks
        except (OSError, ValueError) as error:
            refused = str(error)
    refused, kinds = hvd.broadcast_object((refused, kinds))
    if refused:
        raise SettingsError(refused)
    return kinds


def compression(settings: Settings, steps: Steps, kinds: Kinds) -> dict[str, Any]:
    """Give what `hvd_ext.DistributedOptimizer` is told: sparse in the phases at the begin that are, dense after them.

    Raises:
        SettingsError: `topk` has what `hvd_ext.TopK` does not take.
    """
    sparse = steps.sparse(kinds)
    if not sparse:
        return {}
    given = dict(settings.topk)
    try:
        if given.get("warmup") is not None:
            given["warmup"] = hvd.Warmup(round(steps.at(given["warmup"])))
        topk = hvd.TopK(**given, until=sparse if sparse < steps.all else None)
    except (HvdExtError, TypeError) as error:
        raise SettingsError(f"topk: {error}") from error
    return {"compression": topk, "algorithm": settings.sparse_algorithm}


def distributed(settings: Settings, steps: Steps, kinds: Kinds, process_set: hvd.ProcessSet | None = None) -> Any:
    """Make the optimizer of the job, or of some of its ranks."""
    optimizer = plain(settings.optimizer, steps)
    if settings.mixed_precision:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)  # `compile` would put it around ours
    return hvd.DistributedOptimizer(optimizer, process_set=process_set, **compression(settings, steps, kinds))


def plain(how: Optimizer, steps: Steps) -> keras.optimizers.Optimizer:
    """Make the optimizer of one rank."""
    rate = steps.lines(how.rate)
    values = {value for _, value in how.momentum}
    momentum: Any = values.pop() if len(values) == 1 else steps.lines(how.momentum)
    if how.name == "sgd":
        sgd = keras.optimizers.SGD(rate, momentum, how.nesterov, weight_decay=how.weight_decay or None)
        sgd.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return sgd
    return hvd.optimizers.LARS(
        rate,
        momentum,
        nesterov=how.nesterov,
        trust_coefficient=how.trust_coefficient,
        weight_decay=how.weight_decay,
        min_trust=how.min_trust,
        max_trust=how.max_trust,
        parallel=how.parallel,
    )


class Checkpoint(hvd.callbacks.Checkpoint):
    """Leaves the time of saving out, also where a signal has stopped the training in the middle of an epoch.

    Args:
        directory: of the checkpoints.
        clock: of the training.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        super().__init__(directory)
        self._clock = clock

    def save(self, epoch: int, step: int = 0, reason: str = "asked for") -> None:
        """Save, with the clock stopped."""
        counted = self._clock.counts
        self._clock.stop()
        super().save(epoch, step, reason)
        if counted:
            self._clock.go_on()


class Validation(keras.callbacks.Callback):
    """Adds the shares of pictures whose label is the first, or among the first five, to the logs of each epoch.

    Each rank classifies its own pictures, and the ranks add up what they have counted.

    Args:
        clock: which leaves validation out.

    Attributes:
        pictures: batches (pictures, labels) of this rank; None for no validation.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.pictures: tf.data.Dataset | None = None
        self._clock, self._counted = clock, None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Validate, unless a signal has stopped the epoch in its middle."""
        self._clock.stop()
        if self.model.stop_training or self.pictures is None:
            return
        counted = self._counted = self._counted or self._traced()
        counts = np.zeros(3, np.int64)
        for pictures, labels in self.pictures:
            counts += counted(pictures, labels).numpy()
        first, five, total = hvd.allreduce(counts, op=hvd.Sum, name="validation").numpy().tolist()
        if logs is not None:
            logs["top1"], logs["top5"] = first / total, five / total

    def _traced(self) -> Any:
        """Make the function that counts a batch; pictures may have any shape."""
        model = self.model

        @tf.function(input_signature=[tf.TensorSpec((None, None, None, 3), tf.uint8), tf.TensorSpec((None,), tf.int32)])
        def counted(pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            logits = model(pictures, training=False)
            right = [tf.math.in_top_k(labels, logits, k) for k in (1, min(5, logits.shape[-1]))]
            counts = [tf.math.count_nonzero(one) for one in right]
            return tf.stack([*counts, tf.size(labels, tf.int64)])

        return counted
