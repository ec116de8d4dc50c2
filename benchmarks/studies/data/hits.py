"""Samples that were read before: the processor time of an epoch, by the size of a sample, in one process."""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.data.goals import CPU, OURS, START
from benchmarks.studies.data.memory import spent
from benchmarks.studies.data.samples import Numbered
from benchmarks.studies.data.ways import ours, room, theirs
from benchmarks.studies.data.worker import Task, Tell
from hvd_ext.bench.jobs import rotated
from hvd_ext.bench.pictures import HEIGHT, WIDTH, decoded, write_pictures

if TYPE_CHECKING:
    import tensorflow as tf

BATCH = 128
# By the side of a picture: how many samples, and epochs of a turn. Together they do not fit into a processor's cache.
SAMPLES = {32: (40_960, 2), 96: (16_384, 3), 224: (3_072, 5)}
DECODED = 384  # samples of a turn of decoding, which takes a hundred times as long as the others
WRITTEN_AT_ONCE = 1024
# They take ten times as long as the others, or more, so that one epoch of a turn is enough.
SLOW = ("cache-file", "snapshot")

# So many epochs, one after the other, as batches of pictures and labels.
Epochs = Callable[[int], Iterator[tuple[Any, Any]]]


class Contestant:
    """A way to hand over samples.

    Attributes:
        name: a key of `jobs.NAMES`.
        epochs: gives the batches of so many epochs.
        passes: epochs of a turn.
        whole: whether an epoch has every sample once, and the same ones each time; else only what a batch holds is
            checked.
    """

    def __init__(self, name: str, epochs: Epochs, passes: int, whole: bool = True) -> None:
        self.name, self.epochs, self.passes, self.whole = name, epochs, passes, whole

    def turn(self) -> tuple[float, float, float]:
        """Take a turn.

        Returns:
            The seconds of the processor until the first batch is there, in an iteration of its own; those of all
            batches of the turn, per sample; and the seconds of the clock of these.
        """
        start_s, _, _ = spent(lambda: next(self.epochs(self.passes)))
        cpu_s, wall_s, count = spent(self.read)
        return start_s, cpu_s / count, wall_s / count

    def read(self) -> int:
        """Read all batches of a turn; give the number of their samples."""
        return sum(len(labels) for _, labels in self.epochs(self.passes))


class OfTensorFlow(Contestant):
    """A data set of TensorFlow, read with as little beside it as possible: about 15 us a batch.

    What reads it in a training costs more, whatever has made the batches: in a graph 80 us, in a loop of Python 100 to
    300 us a batch of two tensors. So a training sees smaller ratios of the same differences.
    """

    def __init__(self, name: str, data: tf.data.Dataset, passes: int, whole: bool = True) -> None:
        """Take batches of pictures and labels."""
        import tensorflow as tf

        super().__init__(name, lambda passes: iter(data.repeat(passes)), passes, whole)
        self._data = data.repeat(passes)
        flat = [tf.TensorSpec(one.shape, one.dtype) for one in tf.nest.flatten(data.element_spec)]
        more = tf.function(lambda count, _, labels: count + tf.size(labels), autograph=False)
        self._more = more.get_concrete_function(tf.TensorSpec([], tf.int32), *flat)

    def read(self) -> int:
        """Read all batches of a turn; give the number of their samples."""
        import tensorflow as tf

        (count,) = tf.raw_ops.ReduceDataset(
            input_dataset=tf.data.experimental.to_variant(self._data),
            initial_state=[tf.constant(0)],
            other_arguments=[],
            f=self._more,
            output_types=[tf.int32],
            output_shapes=[[]],
            use_inter_op_parallelism=False,
        )
        return int(count)


def measure(task: Task, tell: Tell) -> None:
    """Measure the contestants of a task with pictures of `task.facts["side"]`; the first two epochs are checked."""
    numbered = Numbered(task.facts["side"])
    whole, passes = SAMPLES.get(numbered.side, (4096, 1))
    count = task.count(whole, BATCH)
    makers = Makers(task, numbered, count, passes)
    contestants = [makers.make(name) for name in task.contestants]
    faults = {one.name: fault_of(one, numbered, count) for one in contestants}
    place = f"{numbered.nbytes / 1000:.1f} kB"
    found: dict[str, list[tuple[float, float, float]]] = {one.name: [] for one in contestants}
    for repetition in range(task.repetitions):
        for one in rotated(contestants, repetition):
            found[one.name].append(one.turn())
            tell(place, one.name, CPU, [])  # a sign of life
    for one in contestants:
        start_s, cpu_s, wall_s = zip(*found[one.name], strict=True)
        facts = {"sample_bytes": numbered.nbytes, "batch": BATCH, "count": count, "wrong": faults[one.name]}
        tell(place, one.name, CPU, cpu_s, wall_samples=wall_s, wall_median=statistics.median(wall_s), **facts)
        tell(place, one.name, START, start_s, **facts)
    makers.close()


def fault_of(contestant: Contestant, numbered: Numbered, count: int) -> str:
    """Read two epochs; say what is wrong with them, "" if nothing is."""
    for _ in range(2):
        seen: list[NDArray[Any]] = []
        for pictures, labels in contestant.epochs(1):
            if contestant.whole and (fault := numbered.fault(pictures, labels)):
                return fault
            seen.append(np.array(labels))
        if contestant.whole and not np.array_equal(np.sort(np.concatenate(seen)), np.arange(count)):
            return "an epoch does not have every sample once"
    return ""


class Makers:
    """Makes the contestants of one size; what they keep lives as long as this."""

    def __init__(self, task: Task, numbered: Numbered, count: int, passes: int) -> None:
        """Take what they are made of."""
        self._task, self._numbered, self._count, self._passes = task, numbered, count, passes
        self._folder = task.path(f"hits-{numbered.side}")
        self._folder.mkdir(exist_ok=True)
        self._open: list[Any] = []
        self._raw: Path | None = None

    def make(self, name: str) -> Contestant:
        """Make a contestant."""
        special = {
            "memcpy": self._memcpy,
            OURS: self._ours,
            "memmap": self._memmap,
            "decode": self._decode,
            "grain": self._grain,
            "streaming": self._streaming,
        }
        if name in special:
            return special[name]()
        import tensorflow as tf

        samples = tf.data.Dataset.range(self._count).map(self._numbered.load, num_parallel_calls=tf.data.AUTOTUNE)
        kept = theirs(name, samples, self._folder)
        data = kept.shuffle(self._count).batch(BATCH, drop_remainder=True)
        return OfTensorFlow(name, data, 1 if name in SLOW else self._passes)

    def close(self) -> None:
        """Give back what the contestants hold."""
        for one in self._open:
            one.close()

    def _ours(self) -> Contestant:
        room_bytes = room(self._count, self._numbered.nbytes + 4)
        cache = ours(np.arange(self._count), self._numbered.load, room_bytes)
        self._open.append(cache)
        data = cache.dataset(batch_size=BATCH, shuffle=True, seed=1)
        return OfTensorFlow(OURS, data, self._passes)

    def _numbers(self) -> Callable[[int], Iterator[NDArray[Any]]]:
        """Make a function that gives the numbers of the batches of so many epochs, each in an order of its own."""
        random = np.random.default_rng(1)
        return lambda passes: itertools.chain.from_iterable(
            random.permutation(self._count).reshape(-1, BATCH) for _ in range(passes)
        )

    def _memcpy(self) -> Contestant:
        """The yardstick: samples lie in shared memory, and a batch in memory that is used again."""
        nbytes = self._numbered.nbytes
        descriptor = os.memfd_create("samples")
        os.ftruncate(descriptor, self._count * nbytes)
        memory = mmap.mmap(descriptor, self._count * nbytes)
        os.close(descriptor)
        samples = np.frombuffer(memory, np.uint8).reshape(self._count, nbytes)
        for begin in range(0, self._count, WRITTEN_AT_ONCE):
            numbers = np.arange(begin, min(begin + WRITTEN_AT_ONCE, self._count))
            samples[numbers[0] : numbers[-1] + 1] = self._numbered.pictures(numbers).reshape(len(numbers), -1)
        batch, ordered = np.zeros((BATCH, nbytes), np.uint8), self._numbers()
        shaped = batch.reshape(BATCH, self._numbered.side, self._numbered.side, 3)

        def epochs(passes: int) -> Iterator[tuple[Any, Any]]:
            for numbers in ordered(passes):
                np.take(samples, numbers, 0, out=batch, mode="clip")  # any other mode copies once more
                yield shaped, numbers

        return Contestant("memcpy", epochs, self._passes)

    def _file(self) -> Path:
        """Give a file with all pictures, one after the other."""
        if self._raw is None:
            self._raw = self._folder / "raw"
            with self._raw.open("wb") as file:
                for begin in range(0, self._count, WRITTEN_AT_ONCE):
                    numbers = range(begin, min(begin + WRITTEN_AT_ONCE, self._count))
                    file.write(self._numbered.pictures(numbers).tobytes())
        return self._raw

    def _mapped(self) -> Any:
        side = self._numbered.side
        return np.memmap(self._file(), np.uint8, "r", shape=(self._count, side, side, 3))

    def _memmap(self) -> Contestant:
        samples, ordered = self._mapped(), self._numbers()

        def epochs(passes: int) -> Iterator[tuple[Any, Any]]:
            for numbers in ordered(passes):
                yield samples.take(numbers, 0), numbers

        return Contestant("memmap", epochs, self._passes)

    def _decode(self) -> Contestant:
        import tensorflow as tf

        side, count = self._numbered.side, self._task.count(DECODED, BATCH)
        # a picture of 32 pixels is not made of a photograph
        height, width = (side, side) if side < 64 else (HEIGHT, WIDTH)
        paths = write_pictures(self._folder / "jpeg", count, height, width)
        data = tf.data.Dataset.from_tensor_slices((paths, tf.range(count))).shuffle(count)
        data = data.map(lambda path, label: (decoded(tf.io.read_file(path), side), label), tf.data.AUTOTUNE)
        return OfTensorFlow("decode", data.batch(BATCH), 1, whole=False)

    def _grain(self) -> Contestant:
        from benchmarks.studies.data.peers import grain_epochs

        return Contestant("grain", grain_epochs(self._mapped(), BATCH), 1)

    def _streaming(self) -> Contestant:
        from benchmarks.studies.data.peers import streaming_epochs

        samples = (self._numbered.pictures([number])[0] for number in range(self._count))
        return Contestant("streaming", streaming_epochs(samples, self._folder / "mds", BATCH), 1)
