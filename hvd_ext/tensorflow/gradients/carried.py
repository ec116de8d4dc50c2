"""What a channel carries over from one step to the next: held gradients of partial rounds, or a result that is late.

Both are saved with a checkpoint, like the residuals of `TopK` (`hvd_ext.tensorflow.topk.feedback`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.job.log import logger
from hvd_ext.options import Sum
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow.collectives.objects import broadcast_object

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.options.gradients import GradientOptions
    from hvd_ext.planning.tensors import Tensor
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.tensorflow.gradients.quorum import AutoQuorum

# the names of what is saved beside the tensors, whose names have a slash
_RANKS, _ROUNDS, _QUORUM = "ranks", "rounds", "quorum"


class Held:
    """This rank's gradients that came after their partial round; on rank 0 `auto` chooses the quorum, saved too."""

    def __init__(
        self, channel: Channel, options: GradientOptions, job: Runtime, auto: AutoQuorum | None = None
    ) -> None:
        self._channel, self._options, self._job, self._auto = channel, options, job, auto

    def save(self) -> Arrays:
        """Copy what this rank holds, and the number of rounds so far, between two steps."""
        handle, engine, partial = self._channel.handle, self._job.engine, self._channel.partial
        assert partial is not None
        state: Arrays = {
            _RANKS: np.array(engine.size),
            _ROUNDS: np.array(partial.before + engine.progress(handle).step),
        }
        if self._auto is not None:
            state[_QUORUM] = np.array(self._auto.quorum)
        if engine.holds(handle):
            for number, tensor in enumerate(self._channel.layout.engine_tensors):
                array = _empty(tensor)
                engine.read_held(handle, number, array)
                state[_key(number, tensor)] = _plain(array)
        return state

    def load(self, local: Arrays | None, of_ranks: Everyone) -> None:
        """Hold again what `save` returned in an earlier job, between two steps; see `Policy.load`.

        With another number of ranks, rank 0 holds the sum over the ranks; with op=Average times the ratio of the new
        number to the old one, so that the pending update stays the same.
        """
        engine = self._job.engine
        if local is not None and int(local[_RANKS]) == engine.size:
            self._write(_by_number(self._channel, local))
            if self._auto is not None and _QUORUM in local:
                self._auto.set(int(local[_QUORUM]))
        elif engine.rank == 0:
            try:
                self._write(self._sums(of_ranks()))
            except (HvdExtError, OSError, KeyError) as error:
                logger.warning(
                    "%s: it was saved by a job of another number of ranks, and rank 0 cannot read the files of all of "
                    "them, so the gradients that were held are dropped: %s: %s; save to a disk that all ranks share",
                    self._channel.name,
                    type(error).__name__,
                    error,
                )

    def _sums(self, states: Iterable[Arrays]) -> dict[int, np.ndarray]:
        totals: dict[int, np.ndarray] = {}
        scale = 1.0
        for state in states:
            if self._options.op != Sum:
                scale = self._job.engine.size / int(state[_RANKS])
            for number, values in _by_number(self._channel, state).items():
                totals[number] = totals.get(number, 0) + values.astype(np.float64)
        tensors = self._channel.layout.engine_tensors
        return {number: (total * scale).astype(_dtype(tensors[number])) for number, total in totals.items()}

    def _write(self, arrays: dict[int, np.ndarray]) -> None:
        for number, array in arrays.items():
            self._job.engine.write_held(self._channel.handle, number, array)


class Delayed:
    """The result that a channel with a delay has not given yet."""

    def __init__(self, channel: Channel, job: Runtime, process_set: ProcessSet | None = None) -> None:
        self._channel, self._job, self._process_set = channel, job, process_set
        self._has_result: tf.Variable | None = None
        if tf.compat.v1.executing_eagerly_outside_functions():  # a session's variables would need an initializer
            with tf.init_scope(), tf.device("CPU:0"):
                self._has_result = tf.Variable(False, trainable=False, name="hvd_ext_delayed")
        self._set_result([np.zeros(tensor.shape, _dtype(tensor)) for tensor in channel.layout.engine_tensors])

    @property
    def is_there(self) -> bool:
        """Whether there is such a result, outside of functions."""
        return self._has_result is not None and bool(self._has_result.numpy())

    def next_step(self, gives: bool) -> tf.Tensor:
        """Say whether the step that begins now returns a result; `gives`: the next one will."""
        if self._has_result is None:
            return tf.constant(True)
        with tf.device("CPU:0"):
            has_result = tf.identity(self._has_result.read_value())
            with tf.control_dependencies([has_result] if not tf.executing_eagerly() else []):
                self._has_result.assign(gives, read_value=False)
        return has_result

    def save(self) -> Arrays:
        """Copy the result, between two steps; an empty dict if there is none."""
        if not self.is_there:
            return {}
        arrays = self._collected()
        self._set_result(arrays)
        saved = {_key(n, tensor): _plain(arrays[n]) for n, tensor in enumerate(self._channel.layout.engine_tensors)}
        return {_RANKS: np.array(self._job.engine.size), **saved}

    def load(self, local: Arrays | None, of_ranks: Everyone) -> None:
        """Return in the next step what `save` returned on all ranks of an earlier job; see `Policy.load`."""
        arrays = local
        if local is None or int(local.get(_RANKS, 0)) != self._job.engine.size:
            saved = None
            if self._job.engine.rank == 0:
                try:
                    saved = next(iter(of_ranks()), None)
                except (HvdExtError, OSError) as error:
                    logger.warning("%s: the result that was late is dropped: %s", self._channel.name, error)
            name, root = f"{self._channel.name}: late result", self._job.engine.ranks[0]
            arrays = broadcast_object(saved, root, name=name, process_set=self._process_set)
        if arrays and self._has_result is not None:
            self._set_result(_by_number(self._channel, arrays).values())
            self._has_result.assign(True)

    def take(self) -> list[tf.Tensor | None]:
        """Take the result, in place of a step: one tensor or None for each of the layout's tensors."""
        arrays = self._collected()
        self._set_result([np.zeros_like(array) for array in arrays])
        results: list[tf.Tensor | None] = [None] * len(self._channel.layout.tensors)
        for place, array in zip(self._channel.layout.sent_tensors, arrays, strict=True):
            results[place] = tf.constant(array)
        return results

    def _collected(self) -> list[np.ndarray]:
        arrays = [_empty(tensor) for tensor in self._channel.layout.engine_tensors]
        newest = self._job.engine.progress(self._channel.handle).step  # it may still be under way
        self._job.engine.collect(self._channel.handle, newest, arrays)
        return arrays

    def _set_result(self, arrays: Iterable[np.ndarray]) -> None:
        for number, array in enumerate(arrays):
            self._job.engine.give_result(self._channel.handle, number, array)


def rounds(local: Arrays | None, of_ranks: Everyone) -> int | None:
    """Give the number of rounds before a checkpoint, from what `Held.save` returned; None if it is not known."""
    saved = local
    if saved is None:
        try:
            saved = next(iter(of_ranks()), None)
        except (HvdExtError, OSError):
            saved = None
    return int(saved[_ROUNDS]) if saved and _ROUNDS in saved else None


def _key(number: int, tensor: Tensor) -> str:
    return f"{number}/{tensor.name}"


def _dtype(tensor: Tensor) -> Any:
    return tf.as_dtype(tensor.dtype).as_numpy_dtype


def _empty(tensor: Tensor) -> np.ndarray:
    return np.empty(tensor.shape, _dtype(tensor))


def _plain(array: np.ndarray) -> np.ndarray:
    """Give an array in a dtype that NumPy itself has: bfloat16 as its bits."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _by_number(channel: Channel, arrays: Arrays) -> dict[int, np.ndarray]:
    """Give the saved arrays of a channel's tensors by their numbers; names may have changed since (`dense_20`)."""
    saved = {int(key.split("/", 1)[0]): array for key, array in arrays.items() if "/" in key}
    tensors = channel.layout.engine_tensors
    return {
        number: np.ascontiguousarray(saved[number]).view(_dtype(tensors[number])).reshape(tensors[number].shape)
        for number in sorted(saved)
    }
