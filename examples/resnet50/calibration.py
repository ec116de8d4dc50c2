"""The rates of the device at hand: plain Keras' training step beside ours, on noise or on pictures."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvd_ext as hvd

from . import network, training
from .pictures import Pictures
from .price import cluster
from .schedule import Steps
from .settings import Phase, Settings, SettingsError

WARM, TURNS = 3, 5
# A sample has as many steps as this takes, so that a GPU works without pause and a clock's grain does not matter.
SAMPLE_S, MOST_STEPS = 0.2, 20
Run = Callable[[int], float]  # so many steps; gives their seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """The median times of a step with pictures of one size.

    Args:
        pixels: the side of the pictures.
        batch: pictures of a step of one device.
        plain_s: of plain Keras with the same network and optimizer.
        ours_s: with `hvd_ext.DistributedOptimizer`, of this rank alone.
        update_s: of the update of the weights, which is in both.
    """

    pixels: int
    batch: int
    plain_s: float
    ours_s: float
    update_s: float

    @property
    def rate(self) -> float:
        """Pictures for which the device makes gradients in a second, in a training with hvd_ext."""
        return self.batch / (self.ours_s - self.update_s)


def calibrate(settings: Settings, devices: int, tell: Callable[[str], None]) -> list[Measured]:
    """Measure this rank's device for each size of pictures; all ranks of the job call it after `hvd.init()`.

    Ranks measure at the same time, so that those of one host share its processors as in a training, and have the times
    of the slowest one; none sends gradients to another. Where the settings name pictures, these are cut as in a
    training, on the same processors, and so their input is in the times.

    Args:
        settings: of the training.
        devices: of the training, which divide a phase's batch.
        tell: called on each rank with a line about the progress.

    Raises:
        SettingsError: the devices cannot divide a batch evenly, or the times make no sense.
    """
    training.check(settings, devices)
    if not settings.data.source:
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"source": "synthetic"})})
    pictures = Pictures(settings, hvd.rank(), hvd.size())
    steps = Steps(settings, pictures.train)
    tell("the update of the weights")
    (update_s,) = _in_turns([_update(settings, steps)])
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else []
    alone = sets[hvd.rank()] if sets else None
    dense = ("dense",) * len(settings.phases)
    fits = [
        _Fit(settings, training.plain(settings.optimizer, steps)),
        _Fit(settings, training.distributed(settings, steps, dense, alone)),
    ]
    found: dict[int, Measured] = {}
    for phase in settings.phases:
        if phase.pixels in found:
            continue
        batch = phase.batch // devices
        tell(f"{phase.pixels} pixels, {batch} pictures a step")
        synthetic = settings.data.source == "synthetic"
        data = _batches(pictures, phase, batch, 1 if synthetic else max(1, pictures.train // (batch * hvd.size())))
        for fit in fits:
            fit.take(data)
        plain_s, ours_s = _in_turns(fits)
        if update_s >= ours_s:
            raise SettingsError(
                f"--calibrate, {phase.pixels} pixels: an update took {update_s * 1e3:.3g} ms and a whole step "
                f"{ours_s * 1e3:.3g} ms; measure again, with nothing else at work, or a larger batch"
            )
        found[phase.pixels] = Measured(phase.pixels, batch, plain_s, ours_s, update_s)
    pictures.close()
    for one in sets:
        hvd.remove_process_set(one)
    return list(found.values())


def show(settings: Settings, topology: Path | None, tell: Callable[[str], None]) -> None:
    """Measure, and tell the rates as settings on rank 0.

    Args:
        settings: of the training.
        topology: a file with the cluster of the training, whose devices divide a phase's batch; None for this job.
        tell: called with lines.

    Raises:
        SettingsError: as for calibrate(), or the file cannot be read.
    """
    say = tell if hvd.rank() == 0 else lambda _: None
    devices = hvd.size() if topology is None else cluster(topology).size
    measured = calibrate(settings, devices, lambda line: say(f"# measuring {line}"))
    on_cores = not tf.config.list_physical_devices("GPU")
    say(text(measured, max(1.0, hvd.local_size() / (os.cpu_count() or 1)) if on_cores else 1.0))


def text(measured: list[Measured], ranks_per_core: float) -> str:
    """Write what was measured as settings, with the shares of plain Keras' speed as comments."""
    rates = ", ".join(f"{one.pixels}: {one.rate:.4g}" for one in measured)
    lines = ["price:", f"  rates: {{{rates}}}", f"  update: {measured[0].update_s:.2g}"]
    if ranks_per_core > 1:
        lines.append(f"  ranks_per_core: {ranks_per_core:.4g}")
    for one in measured:
        line = f"# {one.pixels} pixels, {one.batch} pictures a step: {one.plain_s * 1e3:.4g} ms with plain Keras"
        lines.append(f"{line}, {one.ours_s * 1e3:.4g} ms with hvd_ext, {one.plain_s / one.ours_s:.2f} of its speed")
    return "\n".join(lines)


def _batches(pictures: Pictures, phase: Phase, batch: int, steps: int) -> tf.data.Dataset:
    """Give batches of one device without end; those of an epoch have been seen, and the cache has what fits into it."""
    data = pictures.training(phase.model_copy(update={"batch": batch * hvd.size()}), steps)
    for _ in data:
        pass
    return data.repeat()


def _in_turns(runs: Sequence[Run]) -> list[float]:
    """Give each one's median time of a step; on several ranks that of the slowest."""
    counts = []
    for run in runs:
        run(WARM)
        hvd.barrier()
        counts.append(min(max(1, round(SAMPLE_S / run(1))), MOST_STEPS))
    counts = hvd.broadcast_object(counts)
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS):
        for run, count, mine in zip(runs, counts, samples, strict=True):
            hvd.barrier()
            mine.append(run(count) / count)
    return [max(hvd.allgather_object(statistics.median(mine))) for mine in samples]


class _Fit:
    """A model's calls of `fit`: so many steps, which gives their seconds."""

    def __init__(self, settings: Settings, optimizer: keras.optimizers.Optimizer) -> None:
        self._model = network.build(settings.network, settings.mixed_precision)
        self._model.compile(optimizer, network.smoothed(settings.smoothing))
        self._model.optimizer.build(self._model.trainable_variables)  # or the first step is traced twice

    def take(self, data: tf.data.Dataset) -> None:
        """Go on with other data, in a function of its own: a function for several sizes knows none of them."""
        self._data = data
        self._model.make_train_function(force=True)

    def __call__(self, steps: int) -> float:
        watch = _Watch()
        self._model.fit(self._data, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[watch])
        return watch.seconds


class _Watch(keras.callbacks.Callback):
    """Takes the time of the steps of one call of `fit`, without its begin."""

    seconds = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the call before."""
        self._begun_s: float | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin with the first step."""
        self._begun_s = self._begun_s or time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End with the last one, when its loss is there."""
        assert logs is not None and self._begun_s is not None
        float(logs["loss"])
        self.seconds = time.perf_counter() - self._begun_s


def _update(settings: Settings, steps: Steps) -> Run:
    optimizer = training.plain(settings.optimizer, steps)
    variables = network.build(settings.network, settings.mixed_precision).trainable_variables
    gradients = [tf.Variable(tf.random.normal(one.shape, stddev=1e-3)) for one in variables]
    optimizer.build(variables)

    @tf.function(jit_compile=bool(tf.config.list_physical_devices("GPU")))  # as Keras compiles a step
    def apply() -> None:
        optimizer.apply([tf.convert_to_tensor(one) for one in gradients], variables)

    def run(steps: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(steps):
            apply()
        variables[-1].numpy()  # a GPU has then done what it was given before
        return time.perf_counter() - begun_s

    return run
