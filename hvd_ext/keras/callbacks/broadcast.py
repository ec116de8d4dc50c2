"""Equal variables on all ranks when `fit` begins."""

from __future__ import annotations

from typing import Any

from hvd_ext.errors import InvalidError
from hvd_ext.job.process import rank, size
from hvd_ext.keras import base
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.comparable import variables_of
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.collectives.objects import allgather_object
from hvd_ext.tensorflow.collectives.variables import broadcast_variables
from hvd_ext.tensorflow.gradients import kinds
from hvd_ext.tensorflow.gradients.policies import local_steps
from hvd_ext.tensorflow.gradients.reducer import reducer_of
from hvd_ext.tensorflow.gradients.round_flags import partial_reducer

_NAME = "BroadcastGlobalVariablesCallback"


class BroadcastGlobalVariablesCallback(base.Callback):
    """Gives all ranks the variables of one rank when `fit` begins: the model's weights and the optimizers' variables.

    Variables that exist when training begins are sent before the first step; those that the first batch makes are sent
    after it. So is what layers have besides variables: vocabularies, bin boundaries, constants computed from variables.
    Seed generators keep their own state, so that dropout differs from rank to rank; metrics are not sent.
    Unless `fit` is called with verbose=2, only rank 0 shows a progress bar.

    Args:
        root_rank: the rank whose values all get.
        device: accepted for Horovod's sake; it changes nothing.
        local_variables: one variable or several that are not sent, and neither are their slots in the optimizer.

    Raises:
        InvalidError: there is no such rank; local_variables are no variables; or, when `fit` begins, the ranks have
            unequal numbers of steps in an epoch, so that some would wait for ever.
        MismatchError: when `fit` begins, a layer does not take the vocabulary of the root; on all ranks.
    """

    works_on_batches = True

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = base.check_rank(root_rank)
        self._local: dict[Any, Any] = {}
        self._sent: set[int] = set()
        self._done = self._goes_on = False
        for variable in [local_variables] if hasattr(local_variables, "assign") else local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Keep a variable out of the broadcast.

        Args:
            variable: of Keras or TensorFlow.

        Raises:
            InvalidError: it is no variable.
        """
        if not hasattr(variable, "assign"):
            raise InvalidError(f"local_variables ({variable!r}): must be variables of Keras or TensorFlow")
        self._local[kinds.key(variable)] = variable  # the object too: its key is good only as long as it lives

    def goes_on(self, epoch: int, step: int) -> None:
        """Send nothing when `fit` begins: all ranks have the same variables already."""
        self._goes_on = True

    def set_model(self, model: Any) -> None:
        """Take the model of `fit`; a second one gets its variables as the first one did."""
        if model is not self._model:
            self._sent, self._done = set(), False
        self._done = self._done or self._goes_on
        self._goes_on = False
        super().set_model(model)

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Take the parameters of `fit`; on ranks other than 0, switch its bar off in them.

        Keras hands one dictionary to all callbacks of a list. Its own bar is the last of them, and takes `verbose` from
        that dictionary.
        """
        if params and params.get("verbose") in ("auto", 1) and rank() != 0:  # 2 is never a default
            params["verbose"] = 0
        super().set_params(params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Send the variables that all ranks have."""
        if self.root_rank >= size():
            raise InvalidError(f"root_rank ({self.root_rank}): must be below the number of ranks, {size()}")
        base.refuse_plain(self.model)
        optimizers = models.optimizers(self.model)
        self._announce(not self._done)
        if not self._done:
            layers.send(_NAME, self.model, self.root_rank, local_keys=self._local)
        weights = self._weights()
        even = base.trains_together(self.model) and partial_reducer(optimizers) is None
        steps = self.params.get("steps") if even else None
        built = [(base.is_built(optimizer), len(self._slots(optimizer))) for optimizer in optimizers]
        ranks = allgather_object((len(weights), built, steps), name=_NAME)
        check_steps([steps for _, _, steps in ranks])
        if self._done:
            return
        if any((count, len(built)) != (len(weights), len(optimizers)) for count, built, _ in ranks):
            return  # some ranks have not built the model yet; after the first batch all have
        self._send(weights)
        for optimizer, *built in zip(optimizers, *(flags for _, flags, _ in ranks), strict=True):
            # Keras' own step would make the slots of exactly these variables; slots that are sent after the first batch
            # would replace those that a checkpoint has restored for local variables
            own_step = bool(weights) and base.trains_together(self.model) and bool(self.model.trainable_variables)
            if (built[self.root_rank][0] or own_step) and optimizer is self.model.optimizer:
                if not base.is_built(optimizer):
                    base.build(optimizer, self.model.trainable_variables)
                self._send(self._slots(optimizer))
            elif len(set(built)) == 1:
                self._send(self._slots(optimizer))
        layers.refresh(self.model)
        self._send_global_weights(weights)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """After the first batch, send the variables that it has made."""
        if self._done:
            return
        self._done = True
        self._announce(False)
        late = [weight for weight in self._weights() if id(weight) not in self._sent]
        self._send(late)
        if late:
            layers.send(_NAME, self.model, self.root_rank, local_keys=self._local)
            layers.refresh(self.model)
        for optimizer in models.optimizers(self.model):
            slots = self._slots(optimizer)
            # slots that the first step has made from unequal weights may be unequal too
            if late or any(id(variable) not in self._sent for variable in slots):
                self._send(slots)

    def _announce(self, follows: bool) -> None:
        """Tell the optimizers whether a broadcast follows the coming batch: until then the weights may be unequal."""
        for optimizer in models.optimizers(self.model):
            reducer = reducer_of(optimizer)
            if reducer is not None:
                reducer.broadcast_follows = follows

    def _weights(self) -> list[Any]:
        try:
            weights = layers.weights(self.model)
        except ValueError:  # Keras 2, before the model is built
            return []
        return [weight for weight in weights if kinds.key(weight) not in self._local]

    def _slots(self, optimizer: Any) -> list[Any]:
        variables = variables_of(optimizer)
        ids = {id(variable) for variable in variables}
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        trained = list(getattr(inner, "_trainable_variables", ()))
        local = {index for index, variable in enumerate(trained) if kinds.key(variable) in self._local}
        # gradients that a rank has accumulated since the last update are its own: the next update averages them
        local_slots = {id(variable) for variable in getattr(inner, "_accumulated_gradients", ())}
        # an optimizer has its slots in lists, in the order of the variables that it trains
        for slots in vars(inner).values() if local else ():
            if isinstance(slots, list) and len(slots) == len(trained):
                local_slots |= {id(slots[index]) for index in local} & ids
        return [variable for variable in variables if id(variable) not in local_slots]

    def _send_global_weights(self, weights: list[Any]) -> None:
        """Where local steps have begun: the root may have loaded weights alone, and all hosts have its weights now."""
        for policy, pairs in local_steps.of_variables(weights):
            if policy.gradients.asked.process_set is None:
                policy.drop()
                broadcast_variables([one for _, one in pairs], root_rank=self.root_rank)

    def _send(self, variables: list[Any]) -> None:
        if variables:
            broadcast_variables(variables, root_rank=self.root_rank)
            self._sent.update(id(variable) for variable in variables)


def check_steps(ranks: list[int | None]) -> None:
    """Raise `InvalidError` if ranks that know their steps in an epoch (else None) have unequal numbers."""
    known = [(rank, steps) for rank, steps in enumerate(ranks) if steps is not None]
    for number, steps in known[1:]:
        if steps != known[0][1]:
            raise InvalidError(
                f"steps in an epoch: all ranks must have the same number, or some would wait for ever; rank {number} "
                f"has {steps}, rank {known[0][0]} has {known[0][1]}; hvd_ext.shard(data, batch_size) divides data "
                "evenly, and steps_per_epoch cuts uneven data"
            )
