"""Callbacks for `fit`: equal variables at the start, equal metrics at the end of each epoch."""

from __future__ import annotations

import numbers
from typing import Any

import keras

from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizer import Distributed
from hvd_ext.objects import allgather_object
from hvd_ext.process import size
from hvd_ext.tensorflow.variables import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the variables of one rank when `fit` begins: the model's weights and the optimizers' variables.

    What exists when training begins is sent before the first step; what the first batch builds is sent after it. Seed
    generators keep their own state, so that dropout differs from rank to rank; metrics are not sent.

    Args:
        root_rank: the rank whose values all get.
        device: accepted for Horovod's sake; it changes nothing.

    Raises:
        InvalidError: there is no such rank.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        if isinstance(root_rank, bool) or not isinstance(root_rank, int) or root_rank < 0:
            raise InvalidError(f"root_rank ({root_rank!r}): must be a rank, a whole number from 0")
        self.root_rank = root_rank
        self._sent: set[int] = set()
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Send what exists on all ranks."""
        if self._done:
            return
        if self.root_rank >= size():
            raise InvalidError(f"root_rank ({self.root_rank}): must be below the number of ranks, {size()}")
        _refuse_plain(self.model)
        optimizers = _optimizers(self.model)
        weights = self.model.weights
        ranks = allgather_object((len(weights), [optimizer.built for optimizer in optimizers]))
        if any((count, len(built)) != (len(weights), len(optimizers)) for count, built in ranks):
            return  # some rank has built or loaded the model and another has not: after the first batch all have
        self._send(weights)
        for optimizer, *built in zip(optimizers, *(flags for _, flags in ranks), strict=True):
            if built[self.root_rank] and optimizer is self.model.optimizer:
                if not optimizer.built:
                    optimizer.build(self.model.trainable_variables)
                self._send(optimizer.variables)
            elif len(set(built)) == 1:
                self._send(optimizer.variables)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """After the first batch, send what it has built."""
        if self._done:
            return
        self._done = True
        late = [weight for weight in self.model.weights if id(weight) not in self._sent]
        if late:
            # slots that the first step made from unequal weights may be unequal too
            self._send(late)
            for optimizer in _optimizers(self.model):
                self._send(optimizer.variables)

    def _send(self, variables: list[keras.Variable]) -> None:
        broadcast_variables(variables, root_rank=self.root_rank)
        self._sent.update(id(variable) for variable in variables)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics of each epoch, those of validation too, by their averages over the ranks.

    Put it in front of callbacks that read metrics (checkpoints, early stopping), so that all ranks see the same numbers
    and take the same decisions. A metric that some ranks do not have (validation on one rank only) is left alone.

    Args:
        device: accepted for Horovod's sake; it changes nothing.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """See that the ranks train together."""
        _refuse_plain(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics in place, in double precision; all ranks get the same bits."""
        own = {name: float(value) for name, value in (logs or {}).items() if _is_number(value)}
        ranks = allgather_object(own)
        for name in own:
            if logs is not None and all(name in metrics for metrics in ranks):
                logs[name] = sum(metrics[name] for metrics in ranks) / len(ranks)


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizers: the compiled one, and those that a training step of one's own keeps as attributes."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in (getattr(model, "optimizer", None), *vars(model).values()):
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
    return list(found.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Number):
        return not isinstance(value, complex)
    return getattr(value, "shape", None) == () and hasattr(value, "dtype")


def _refuse_plain(model: keras.Model) -> None:
    """Refuse Keras' own training step with an optimizer that is not wrapped: each rank would train alone."""
    optimizer = getattr(model, "optimizer", None)
    if size() == 1 or optimizer is None or type(model).train_step is not keras.Model.train_step:
        return
    candidates = (optimizer, getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ()))
    if not any(isinstance(candidate, Distributed) for candidate in candidates):
        raise InvalidError(
            f"optimizer {optimizer.name!r}: it is not wrapped, so each rank would train alone; loaded, cloned and "
            "copied models have plain optimizers: model.optimizer = hvd_ext.DistributedOptimizer(model.optimizer)"
        )
