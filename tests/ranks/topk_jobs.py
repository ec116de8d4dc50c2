"""What the tests of sparse training share: hosts that are far apart, gradients that are exact, weights to compare."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.compression import Codec
from hvd_ext.keras.optimizers.optimizer import channels
from hvd_ext.options import from_environment
from tests.ranks.compare import assert_equal
from tests.ranks.topk_model import Model
from tests.ranks.training import assert_same_bits_on_all_ranks, values

SHAPES = ((6, 7), (7,), (5, 9))
# of a TopK whose sums are exact, and which selects from small tensors
OPTIONS: dict[str, Any] = {"density": 0.125, "min_elements": 10, "wire": "fp32"}


def hosts_of(size: int) -> list[int]:
    """Give the numbers of ranks of two hosts, the first with one or two more where they cannot be equal; one of one."""
    return [size] if size == 1 else [size // 2 + (size > 2), size - size // 2 - (size > 2)]


def hosts() -> list[list[int]]:
    """Give the ranks of the virtual hosts of `apart`."""
    counts, ranks = hosts_of(hvd.size()), iter(range(hvd.size()))
    return [[next(ranks) for _ in range(count)] for count in counts]


def restart(hosts: Sequence[int], bucket_nbytes: int = 1 << 20, **options: Any) -> None:
    """Begin anew on virtual hosts with slow links between them, so that sparse steps are cheaper."""
    hvd.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        path = far_apart(hosts, Path(folder))
        hvd.init(from_environment().replace(topology=path, bucket_nbytes=bucket_nbytes, **options))


def far_apart(hosts: Sequence[int], folder: Path) -> Path:
    """Write the topology of virtual hosts with slow links between them."""
    lines = ["name: cluster", "link: {alpha_s: 10.0e-6, gbit_per_s: 0.001}", "children:"]
    first = 0
    for index, ranks in enumerate(hosts):
        lines += [f"  - name: host{index}", "    link: {alpha_s: 5.0e-6, gbit_per_s: 40}"]
        lines += [f"    ranks: {list(range(first, first + ranks))}"]
        first += ranks
    path = folder / "cluster.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def as_launched() -> None:
    """Begin anew on the hosts that there are, for the tests that follow."""
    hvd.shutdown()
    hvd.init()


def variables() -> list[keras.Variable]:
    """Zeros: after steps with the learning rate 1 they are what was applied."""
    return [keras.Variable(np.zeros(shape), dtype="float32", name=f"v{n}") for n, shape in enumerate(SHAPES)]


def gradients(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Sixteenths with few ties, so that sums over ranks and hosts are exact."""
    found = []
    for number, shape in enumerate(shapes):
        count = int(np.prod(shape))
        values = (np.arange(count) * 37 + rank * 11 + step * 53 + number * 17) % 97 - 48
        found.append((values.reshape(shape) / 16).astype(np.float32))
    return found


class LateLARS(hvd.optimizers.LARS):
    """LARS whose trust ratios have the gradients' norms of the step before, as where `TopK` has its momentum.

    Attributes:
        until: from this step on they have those of the step.
    """

    until: float = np.inf
    _before: tf.Variable | None = None

    def _norms(self, variables: Any, others: Any) -> Any:
        weights, now = super()._norms(variables, others)
        if self._before is None:
            with tf.init_scope():  # not one of Keras' variables, so that all others compare
                object.__setattr__(self, "_before", tf.Variable(tf.zeros(len(variables), tf.float64)))
        before = self._before.read_value()
        self._before.assign(now)
        return weights, tf.where(tf.cast(self._iterations.value, tf.float64) < self.until, before, now)

    def _ratios(self, places: Any, weights: Any, gradients: Any) -> Any:
        found = super()._ratios(places, weights, gradients)
        known = (np.array(self._has_trust)[places] == False) | (gradients > 0)  # noqa: E712 - of an array
        return tf.where(known, found, tf.zeros_like(found))


class Expected:
    """What an optimizer with the learning rate 1 makes of zeros.

    Args:
        optimizer: that has taken a step: its buckets are asked for.
        hosts: the number of ranks of each.
        kind: of the model of a bucket.
        **model: of `Model`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        hosts: Sequence[int],
        kind: type[Model] = Model,
        **model: Any,
    ) -> None:
        layout = self._layout = channels(optimizer)[-1].layout
        sizes = [sum(layout.tensors[place].elements for place in bucket.tensors) for bucket in layout.buckets]
        self.models = [kind(hosts, size, **model) for size in sizes]
        self.weights = [np.zeros(shape, np.float32) for shape in SHAPES]
        self.sums = [np.zeros(shape, np.float32) for shape in SHAPES]
        self._size = sum(hosts)

    def step(self, of_ranks: Sequence[Sequence[np.ndarray]], density: float) -> None:
        """Take a step with the gradients of each rank."""
        for bucket, model in zip(self._layout.buckets, self.models, strict=True):
            joined = [np.concatenate([own[index].reshape(-1) for index in bucket.tensors]) for own in of_ranks]
            selection = bucket.selection
            whole = selection is None or density >= selection.dense_above or len(model.hosts) == 1
            result = model.step(joined, density, dense=whole) / np.float32(self._size)
            for index in bucket.tensors:
                count = self._layout.tensors[index].elements
                self.weights[index] -= result[:count].reshape(SHAPES[index])
                result = result[count:]
        for own in of_ranks:
            for total, one in zip(self.sums, own, strict=True):
                total += one

    def waiting(self) -> float:
        """Give the sum of all that waits, over hosts and elements."""
        return float(sum(model.waiting().astype(np.float64).sum() for model in self.models))


class Beside:
    """Training with a codec beside its model, which is compared after every step.

    Args:
        codec: the compression.
        density: of each step.
        kind: of the model.
        model: more of the model; with SGD's options.
        hosts: the number of ranks of each; None: those of `hosts_of`.
        **sgd: of SGD.
    """

    def __init__(
        self,
        codec: Codec,
        density: Callable[[int], float] = lambda step: 0.125,
        kind: type[Model] = Model,
        model: dict[str, Any] | None = None,
        hosts: Sequence[int] | None = None,
        **sgd: Any,
    ) -> None:
        self.hosts = hosts_of(hvd.size()) if hosts is None else hosts
        self.weights, self.density, self.expected = variables(), density, None
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, **sgd), compression=codec, check_every=2)
        self.kind, self.model = kind, {**(model or {}), **sgd}

    def train(self, first: int, end: int) -> None:
        """Take the steps from the first to the one before the end."""
        for step in range(first, end):
            every = [gradients(rank, step) for rank in range(hvd.size())]
            apply(self.optimizer, every[hvd.rank()], self.weights)
            self.expected = self.expected or Expected(self.optimizer, self.hosts, self.kind, **self.model)
            self.expected.step(every, self.density(step))
            assert_equal(self.weights, self.expected.weights)
        assert_same_bits_on_all_ranks(self.weights)

    def assert_all_is_applied(self) -> None:
        """All that was given has been applied, but for the rounding of scales and sums."""
        assert self.expected.waiting() == 0
        applied = -sum(weight.astype(np.float64).sum() for weight in values(self.weights)) * hvd.size()
        given = sum(total.astype(np.float64).sum() for total in self.expected.sums)
        assert applied == pytest.approx(given, abs=1e-3)

    def assert_a_nan_skips_a_step(self) -> None:
        """A NaN in the last rank's gradients changes no rank's weights."""
        before, bad = values(self.weights), gradients(hvd.rank(), 9)
        if hvd.rank() == hvd.size() - 1:
            bad[0][2, 3] = np.nan
        apply(self.optimizer, bad, self.weights)
        assert_equal(self.weights, before)


def apply(optimizer: keras.optimizers.Optimizer, own: Sequence[np.ndarray], to: Sequence[keras.Variable]) -> None:
    """Take a step with this rank's gradients."""
    optimizer.apply([tf.constant(one) for one in own], list(to))


def step_of(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable], traced: bool = True
) -> Callable[[Sequence[np.ndarray | None]], None]:
    """Make a function that takes a step with gradients; None is a gradient that is not there.

    Each set of gradients that are there has a traced function of its own.
    """

    @functools.cache
    def of(present: tuple[bool, ...]) -> Callable[..., None]:
        def step(*parts: tf.Tensor) -> None:
            rest = iter(parts)
            optimizer.apply([next(rest) if there else None for there in present], list(weights))

        return tf.function(step, autograph=False) if traced else step

    def call(parts: Sequence[np.ndarray | None]) -> None:
        of(tuple(part is not None for part in parts))(*[tf.constant(part) for part in parts if part is not None])

    return call


def summed(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Give the sums of the ranks' gradients."""
    every = [gradients(rank, step, shapes) for rank in range(hvd.size())]
    return [np.sum(parts, axis=0, dtype=np.float32) for parts in zip(*every, strict=True)]


def averaged(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Give the averages of the ranks' gradients."""
    return [total / np.float32(hvd.size()) for total in summed(step, shapes)]


def nothing(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """Give gradients of zeros: a step with them applies what waits after a flush, and else what is selected of it."""
    return [np.zeros(shape, np.float32) for shape in shapes]
