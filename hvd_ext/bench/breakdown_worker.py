"""One rank that trains with parts left out: `LAUNCHER python -m hvd_ext.bench.breakdown_worker FOLDER REQUEST`."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.bench.jobs import check_choices, check_least, rotated
from hvd_ext.bench.sampling import EVENTS, Argument, emit
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

# The parts of a step, in the order in which they are drawn. All but computation are found by leaving them out.
COMPUTE, INPUT, SELECTION, COMMUNICATION, UPDATE = "compute", "input", "top-k", "communication", "update"
PARTS = (COMPUTE, INPUT, SELECTION, COMMUNICATION, UPDATE)
WHOLE = "whole"
CACHED = "cached"  # the scheme with everything of ours
# How a scheme reduces gradients: the algorithm and the selector; None: dense. The order is that of the table.
SCHEMES: dict[str, tuple[str | None, str | None]] = {
    "dense": (None, None),
    "topk": ("naive_allgather", "exact"),
    "hitopk": ("hitopk", "mstopk"),
    CACHED: ("hitopk", "mstopk"),
}
DENSITY = 0.01
PICTURES, CLASSES, SEED = 128, 16, 1
ENDLESS = 10**6  # steps
UNTIMED = 3  # steps before the first sample: functions are traced, and caches filled


@dataclasses.dataclass(frozen=True)
class Request(Argument):
    """What to measure; the ranks of the job receive it when they start.

    Attributes:
        pixels: sides of the pictures that the network sees; each is measured on its own.
        width: channels of the network's first convolution.
        ranks: on this host; of no account with a launcher of the user's.

    Raises:
        InvalidError: a value breaks its rule.
    """

    schemes: tuple[str, ...] = tuple(SCHEMES)
    pixels: tuple[int, ...] = (32, 96)
    batch: int = 16
    width: int = 32
    repetitions: int = 5
    steps: int = 3
    ranks: int = 2
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        check_choices("scheme", self.schemes, SCHEMES)
        if not self.schemes or not self.pixels or len(set(self.pixels)) < len(self.pixels):
            raise InvalidError("schemes and pixels: name at least one of each, and each only once")
        check_least(16, pixels=self.pixels)
        check_least(
            1, batch=self.batch, width=self.width, repetitions=self.repetitions, steps=self.steps, ranks=self.ranks
        )
        if self.timeout_s <= 0:
            raise InvalidError(f"timeout ({self.timeout_s:g}): must be above 0")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A training of which something may be left out.

    Attributes:
        cached: decoded pictures come from a `DataCache`; else each step decodes its own.
        left_out: of the parts; computation never is.
        algorithm: how gradients are reduced, if they are; None: dense.
        selector: of a sparse scheme. A selection is left out by drawing elements at random: as many travel.
    """

    cached: bool
    left_out: frozenset[str]
    algorithm: str | None = None
    selector: str | None = None


def variants(scheme: str) -> dict[str, Variant]:
    """List what is trained for a scheme: the whole, and without each part; equal ones of two schemes are trained once.

    Returns:
        By "whole" or the part that is left out; "compute" has nothing else.
    """
    algorithm, selector = SCHEMES[scheme]
    cached = scheme == CACHED
    none: frozenset[str] = frozenset()
    trained = {
        WHOLE: Variant(cached, none, algorithm, selector),
        # of repeated batches it does not matter where they once came from
        INPUT: Variant(False, frozenset({INPUT}), algorithm, selector),
        COMMUNICATION: Variant(cached, frozenset({SELECTION, COMMUNICATION})),
        UPDATE: Variant(cached, frozenset({UPDATE}), algorithm, selector),
        COMPUTE: Variant(False, frozenset({INPUT, SELECTION, COMMUNICATION, UPDATE})),
    }
    if selector is not None:
        trained[SELECTION] = Variant(cached, frozenset({SELECTION}), algorithm, "random")
    return trained


def parts_of(seconds: dict[str, float]) -> dict[str, float]:
    """Give the seconds of each part of a step.

    Returns:
        By part. Each is what the step saves without it: time that is hidden behind other parts is in none of them.
        Without communication there is no selection either, which is taken off there.
    """
    saved = {name: seconds[WHOLE] - seconds[name] for name in seconds if name not in (WHOLE, COMPUTE)}
    selection = saved.get(SELECTION, 0.0)
    return {
        COMPUTE: seconds[COMPUTE],
        INPUT: saved[INPUT],
        SELECTION: selection,
        COMMUNICATION: saved[COMMUNICATION] - selection,
        UPDATE: saved[UPDATE],
    }


class Trainings:
    """The models of one size of pictures, in pixels of a side; all ranks make and use them alike."""

    def __init__(self, request: Request, pixels: int, paths: list[str]) -> None:
        self._request, self._pixels, self._paths = request, pixels, paths
        self._caches: list[Any] = []
        self._steps: dict[Variant, Callable[[], None]] = {}
        self.parameters = self.tensors = 0

    def add(self, variant: Variant) -> None:
        """Make a model and take its first steps."""
        if variant in self._steps:
            return
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(SEED)
        model = _network(self._request.width)
        self.parameters = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
        self.tensors = len(model.trainable_weights)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(_optimizer(variant), loss, jit_compile=False)
        data = self._batches(variant.cached)
        if INPUT in variant.left_out:
            data = tf.data.Dataset.from_tensors(next(iter(data)))
        steps = iter(data.repeat())

        def step() -> None:
            pictures, labels = next(steps)
            float(model.train_on_batch(pictures, labels, return_dict=True)["loss"])

        self._steps[variant] = step
        for _ in range(max(UNTIMED, PICTURES // self._request.batch if variant.cached else 0)):
            step()

    def seconds(self, variant: Variant) -> float:
        """Give the seconds of a step, the mean of a sample, on the slowest rank."""
        import hvd_ext as hvd

        step = self._steps[variant]
        step()  # the input of the first one was made while others were measured
        hvd.barrier()
        begin = time.perf_counter()
        for _ in range(self._request.steps):
            step()
        return float(max(hvd.allgather_object((time.perf_counter() - begin) / self._request.steps)))

    def close(self) -> None:
        """Close the caches."""
        for cache in self._caches:
            cache.close()

    def _batches(self, cached: bool) -> tf.data.Dataset:
        import tensorflow as tf

        import hvd_ext as hvd
        from hvd_ext.bench.pictures import decoded

        side, batch, labels = self._pixels, self._request.batch, np.arange(len(self._paths)) % CLASSES

        def load(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return decoded(tf.io.read_file(path), side), label

        if cached:
            cache = hvd.DataCache(
                f"breakdown-{side}", (np.array(self._paths), labels), load, memory="256MB", progress=False
            )
            self._caches.append(cache)
            # without end, in whole batches as the other data has them
            return cache.dataset(batch, shuffle=True, steps=ENDLESS).prefetch(2)
        data = tf.data.Dataset.from_tensor_slices((self._paths, labels)).shuffle(PICTURES, seed=SEED + hvd.rank())
        return data.repeat().map(load, tf.data.AUTOTUNE).batch(batch).prefetch(2)


def _network(width: int) -> Any:
    """Make a network of eight convolutions in four stages; a width of 32 has 1.2 million parameters."""
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input((None, None, 3)), layers.Rescaling(1 / 64, -2)])
    for stage, channels in enumerate((width, 2 * width, 4 * width, 8 * width)):
        for place in range(2):
            stride = 2 if place == 0 else 1
            name = f"conv{stage}_{place}"
            model.add(layers.Conv2D(channels, 3, stride, padding="same", use_bias=False, name=name))
            model.add(layers.BatchNormalization(name=f"{name}_bn"))
            model.add(layers.ReLU(name=f"{name}_relu"))
    model.add(layers.GlobalAveragePooling2D(name="pool"))
    model.add(layers.Dense(CLASSES, name="predictions"))
    return model


def _optimizer(variant: Variant) -> Any:
    import hvd_ext as hvd

    optimizer: Any = hvd.optimizers.LARS(0.1, weight_decay=1e-4, parallel=False)  # a trial would be in the samples
    if UPDATE in variant.left_out:
        optimizer = _still()
    if COMMUNICATION in variant.left_out:
        return optimizer
    if variant.selector is None:
        return hvd.DistributedOptimizer(optimizer)
    topk = hvd.TopK(density=DENSITY, selector=variant.selector, momentum_correction=False)
    return hvd.DistributedOptimizer(optimizer, algorithm=variant.algorithm, compression=topk)


def _still() -> Any:
    """Make an optimizer that waits for its gradients and updates nothing."""
    import keras
    import tensorflow as tf

    class Still(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            super().build(variables)
            self._seen = self.add_variable((), dtype="float32", name="seen")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self._seen.assign(tf.reshape(gradient, (-1,))[0])  # or the gradient would not be computed

    return Still(0.1)


def measured(request: Request, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure; all ranks do so in step.

    Yields:
        A row for each scheme and size: the seconds of each variant, and of each part, medians and samples.
    """
    import hvd_ext as hvd
    from hvd_ext.bench.expected import Cluster
    from hvd_ext.bench.pictures import write_pictures
    from hvd_ext.job import runtime

    place = Cluster(tuple(runtime.current().hosts), runtime.current().tree).place
    for first in (True, False):  # hosts may share the folder
        if (hvd.rank() == 0) == first and hvd.local_rank() == 0:
            write_pictures(folder, PICTURES)
        hvd.barrier()
    paths = write_pictures(folder, PICTURES)
    for pixels in request.pixels:
        trainings = Trainings(request, pixels, paths)
        listed = {scheme: variants(scheme) for scheme in request.schemes}
        distinct = list(dict.fromkeys(variant for of_scheme in listed.values() for variant in of_scheme.values()))
        for variant in distinct:
            trainings.add(variant)
        samples: dict[Variant, list[float]] = {variant: [] for variant in distinct}
        for turn in range(request.repetitions):
            for variant in rotated(distinct, turn):
                samples[variant].append(trainings.seconds(variant))
        for scheme, of_scheme in listed.items():
            medians = {name: float(np.median(samples[variant])) for name, variant in of_scheme.items()}
            yield {
                **place,
                "scheme": scheme,
                "pixels": pixels,
                "batch": request.batch,
                "bytes": 4 * trainings.parameters,
                "tensors": trainings.tensors,
                "step_seconds": medians[WHOLE],
                "parts": parts_of(medians),
                "samples": {name: samples[variant] for name, variant in of_scheme.items()},
            }
        trainings.close()


def main(folder: str, text: str) -> None:
    """Measure what the parent has asked for; rank 0 writes the rows as events."""
    import hvd_ext as hvd

    hvd.init()
    pictures = Path(tempfile.gettempdir()) / f"{Path(folder).name}_pictures"
    try:
        for row in measured(Request.read(text), pictures):
            if hvd.rank() == 0:
                emit(Path(folder) / EVENTS, "row", row=row)
        hvd.barrier()
    finally:
        shutil.rmtree(pictures, ignore_errors=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
