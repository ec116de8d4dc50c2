"""A fragment: a part of the weights that local steps change, and its outer steps, which join what the hosts have made.

The arithmetic of an outer step is part of the training step. The reduction runs in a Python function of the graph,
where the hosts agree, and perhaps in a thread beside training.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.state import Arrays, Everyone
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import carried, kinds

if TYPE_CHECKING:
    from hvd_ext.options.local_steps import LocalSteps
    from hvd_ext.tensorflow.gradients.reducer import Facts, GradientSet, Reducer

# the names of what is saved: arrays by number, and what the list of changes keeps
_GLOBAL, _OUTER, _SENT, _CHANGE = "global", "outer", "sent", "change"
_LAYOUT, _RESIDUALS = "layout/", "residuals/"


class Fragment:
    """Some of the variables of a list, the global weights in their places, and the outer optimizer.

    Attributes:
        variables: the model's.
        global_weights: a variable for each, equal on all ranks: the weights after the last outer step.

    Args:
        variables: see above.
        reducer: reduces the changes of the weights over all ranks.
        options: of the local steps.
        facts: returns what the ranks compare before the first outer step besides options and variables.
        take_again: is called where the ranks have different weights before the first outer step, which a broadcast will
            make equal.
        beside: runs outer steps beside training; None: training waits for them.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        reducer: Reducer,
        options: LocalSteps,
        facts: Facts,
        take_again: Callable[[], None],
        beside: concurrent.futures.Executor | None,
    ) -> None:
        import keras  # only users of local steps need it here

        self.variables = tuple(variables)
        self._reducer, self._facts, self._beside = reducer, facts, beside
        self._take_again = take_again
        self._list: GradientSet | None = None  # of the changes, once all ranks have joined
        # of the outer step under way: this rank's weights at its begin, and the mean change of all ranks
        self._sent: list[tf.Tensor] | None = None
        self._change: concurrent.futures.Future[list[tf.Tensor]] | None = None
        self.global_weights = tuple(
            keras.Variable(np.zeros(tuple(one.shape)), dtype=one.dtype, trainable=False, name=one.name)
            for one in variables
        )
        for one, variable in zip(self.global_weights, variables, strict=True):
            one.constraint = getattr(variable, "constraint", None)
        self._outer = _copied(options.outer)
        if self._outer is not None:
            self._outer.build(self.global_weights)

    def take(self) -> None:
        """Make the variables' values the global weights, eagerly or in a graph."""
        for one, variable in zip(self.global_weights, self.variables, strict=True):
            one.assign(variable)

    def give(self) -> None:
        """Make the global weights the variables' values."""
        for one, variable in zip(self.global_weights, self.variables, strict=True):
            variable.assign(one)

    def join(self) -> bool:
        """Agree with the other ranks before the first outer step; all ranks call it, in the main thread.

        Returns:
            Whether the global weights are equal on all ranks; else a broadcast follows, and all join again after it.

        Raises:
            InvalidError, MismatchError: as `Reducer.begin`.
        """
        if self._list is None:
            values = [tf.convert_to_tensor(one.value) for one in self.global_weights]
            step = self._reducer.begin(values, self.variables, self._facts, weights=self.global_weights)
            if step.began_equal:
                keys = [kinds.key(variable) for variable in self.variables]
                self._list = next(one for one in self._reducer.sets if one.keys == keys)
        return self._list is not None

    @ops.plain
    def meet(self, begins: tf.Tensor, flushing: tf.Tensor) -> None:
        """Join the other ranks if that is still due; then begin an outer step, or end the one under way.

        Args:
            begins: whether an outer step begins.
            flushing: whether one begins that ends at once, sends all residuals, and comes after the one under way.

        Raises:
            HvdExtError: the mean change of the weights is not finite. A running function raises TensorFlow's error.
            InvalidError, MismatchError: as `join`.
        """
        if self._beside is not None:
            self._update(self._call(self._collect, [tf.logical_or(flushing, tf.logical_not(begins))], copies=2))
        weights = [tf.convert_to_tensor(variable) for variable in self.variables]
        changes = [one.value - weight for one, weight in zip(self.global_weights, weights, strict=True)]
        if self._beside is None:
            self._update(self._call(self._exchange, [begins, flushing, *changes], copies=1))
        else:
            self._update(self._call(self._exchange, [begins, flushing, *changes, *weights], copies=2))

    def wait(self) -> None:
        """Wait until the outer step under way has been reduced, or has failed."""
        if self._change is not None:
            concurrent.futures.wait([self._change])

    def drop(self) -> None:
        """Forget the outer step under way; all ranks call it."""
        self.wait()
        self._sent = self._change = None

    def save(self) -> Arrays:
        """Copy what lies between two steps; an outer step under way is reduced first."""
        parts: dict[str, Sequence[Any]] = {_GLOBAL: self.global_weights}
        if self._outer is not None:
            parts[_OUTER] = self._outer.variables
        if self._change is not None and self._sent is not None:
            parts |= {_SENT: self._sent, _CHANGE: self._change.result()}
        saved = {
            f"{part}/{number}": carried.storable(np.asarray(one.numpy()))
            for part, values in parts.items()
            for number, one in enumerate(values)
        }
        if self._list is not None:
            saved |= {_LAYOUT + name: array for name, array in self._list.save_layout().items()}
            saved |= {_RESIDUALS + name: array for name, array in self._list.policy.save().items()}
        return saved

    def load(self, arrays: Arrays, everyone: Everyone, *, same: bool) -> None:
        """Restore what `save` returned, and join the other ranks; all ranks call it alike.

        Args:
            arrays: what this rank has saved, or the first one where the ranks or their hosts were others.
            everyone: returns what each rank of the earlier job has saved.
            same: whether the ranks and their hosts were the same; else the variables get the global weights.
        """
        self.drop()
        parts: list[tuple[str, Sequence[Any]]] = [(_GLOBAL, self.global_weights)]
        if self._outer is not None:
            parts.append((_OUTER, self._outer.variables))
        for part, values in parts:
            for number, variable in enumerate(values):
                saved = arrays.get(f"{part}/{number}")
                if saved is not None and saved.shape == tuple(variable.shape):
                    variable.assign(_value(saved, variable))
        self.join()
        assert self._list is not None  # nothing was compared that could differ
        if same and f"{_CHANGE}/0" in arrays:
            self._sent, change = (
                [_value(arrays[f"{part}/{number}"], one) for number, one in enumerate(self.variables)]
                for part in (_SENT, _CHANGE)
            )
            self._change = _done(change)
            if self._beside is None:  # outer steps did overlap in the earlier job
                self._update(self._collect(tf.constant(True)))
        if not same:
            self.give()
        layout = carried.under(_LAYOUT, arrays)
        if same and layout:
            self._list.load_layout(layout)
        residuals = carried.under(_RESIDUALS, arrays)
        if residuals and self._list.policy.keeps:
            self._list.policy.load(
                residuals if same else None, lambda: (carried.under(_RESIDUALS, of_rank) for of_rank in everyone())
            )

    def _exchange(self, begins: tf.Tensor, flushing: tf.Tensor, *tensors: tf.Tensor) -> list[Any]:
        """Join the other ranks, and begin an outer step; with an executor it is reduced beside training.

        Args:
            begins, flushing: see `meet`.
            tensors: the changes of the weights; with an executor the weights too.

        Returns:
            Whether the outer step has ended; then the mean change, and the weights at its begin if they were given.
        """
        changes, weights = list(tensors[: len(self.variables)]), list(tensors[len(self.variables) :])
        if not self.join():
            self._take_again()
        elif begins or flushing:
            assert self._list is not None
            if flushing:
                self._list.policy.flush(1)
            elif self._beside is not None:
                self._sent, self._change = weights, self._beside.submit(self._mean, changes)
                return [False, *tensors]
            return [True, *self._mean(changes), *weights]
        return [False, *tensors]

    def _collect(self, ends: tf.Tensor) -> list[Any]:
        """Wait for the outer step under way if it is to end; returns what `_exchange` does."""
        if self._change is None or self._sent is None or not ends:
            return [False, *(tf.zeros(0, kinds.dtype(one)) for one in self.variables * 2)]
        sent, under_way, self._sent, self._change = self._sent, self._change, None, None
        return [True, *under_way.result(), *sent]

    def _mean(self, changes: list[tf.Tensor]) -> list[tf.Tensor]:
        """Reduce changes of weights over all ranks."""
        step = self._reducer.begin(changes, self.variables)
        mean = step.reduce_all()
        finite = all(bool(np.isfinite(one.numpy()).all()) for one in mean)
        if not finite or (step.applies is not None and not bool(step.applies)):
            raise HvdExtError(
                f"{self._reducer.label}: the weights of some rank are not finite, so that they cannot be averaged; the "
                "global weights are still those of the last outer step; look for NaN or infinity in the data and in "
                "the loss, lower the learning rate, or clip gradients"
            )
        return mean

    def _call(self, function: Callable[..., list[Any]], given: list[tf.Tensor], *, copies: int) -> list[Any]:
        """Call a function that exchanges, which returns `copies` values of each variable; in a graph, in each step."""
        if tf.executing_eagerly():
            return function(*given)
        dtypes = [kinds.dtype(variable) for variable in self.variables] * copies
        return list(tf.py_function(function, given, [tf.bool, *dtypes]))

    def _update(self, result: list[Any]) -> None:
        """If an outer step has ended: update the global weights, and add what was changed since its begin."""
        count = len(self.variables)

        def update() -> None:
            shapes = [tuple(variable.shape) for variable in self.variables] * 2
            values = [tf.ensure_shape(one, shape) for one, shape in zip(result[1:], shapes, strict=False)]
            change, sent = values[:count], values[count:]
            if self._outer is None:
                for one, mean in zip(self.global_weights, change, strict=True):
                    new = one.value - mean
                    one.assign(new if one.constraint is None else one.constraint(new))
            else:
                self._outer.apply(change, self.global_weights)
            for number, (one, variable) in enumerate(zip(self.global_weights, self.variables, strict=True)):
                since = tf.convert_to_tensor(variable) - sent[number] if sent else 0
                variable.assign(one.value + since)

        ops.only_if(tf.ensure_shape(result[0], ()), update)


def divided(variables: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide variables into lists of about equal size, which keep their order; fewer lists if there are too few."""
    sizes = np.cumsum([0, *(max(1, np.prod(tuple(one.shape))) * kinds.dtype(one).size for one in variables)])
    middles = (sizes[:-1] + sizes[1:]) / 2
    lists: list[list[Any]] = [[] for _ in range(count)]
    for variable, middle in zip(variables, middles, strict=True):
        lists[min(count - 1, int(middle * count / sizes[-1]))].append(variable)
    return [one for one in lists if one]


def _copied(outer: Any) -> Any:
    if outer is None:
        return None
    if isinstance(outer, str):
        import keras

        return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return type(outer).from_config(outer.get_config())


def _done(value: list[tf.Tensor]) -> concurrent.futures.Future[list[tf.Tensor]]:
    future: concurrent.futures.Future[list[tf.Tensor]] = concurrent.futures.Future()
    future.set_result(value)
    return future


def _value(array: np.ndarray, like: Any) -> tf.Tensor:
    return tf.constant(np.asarray(array, order="C").view(kinds.dtype(like).as_numpy_dtype))
