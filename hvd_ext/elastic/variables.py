"""States of variables: of a model of Keras with its optimizers, or of a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.elastic.state import ObjectState
from hvd_ext.errors import InvalidError
from hvd_ext.job import membership
from hvd_ext.keras import base
from hvd_ext.keras.optimizers import models
from hvd_ext.keras.optimizers.comparable import variables_of
from hvd_ext.tensorflow import layers
from hvd_ext.tensorflow.collectives.objects import broadcast_object
from hvd_ext.tensorflow.collectives.variables import broadcast_variables
from hvd_ext.tensorflow.gradients.reducer import reducer_of


class TensorFlowState(ObjectState):
    """A state of variables, for training without a model of Keras.

    Args:
        variables: of TensorFlow or Keras, in the same order on all ranks.
        session: must be None: graphs of TensorFlow 1 are not supported.
        **kwargs: further values, as for `ObjectState`.

    Raises:
        InvalidError: there are no variables, or there is a session.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise InvalidError("elastic.TensorFlowState: session must be None; graphs of TensorFlow 1 are not elastic")
        self.variables = list(variables or ())
        if not self.variables:
            raise InvalidError("elastic.TensorFlowState: pass the variables; TensorFlow 2 keeps no list of them")
        self.session = session
        self._committed_variables = _values(self.variables)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and the other values to host memory."""
        self._committed_variables = _values(self.variables)
        super().save()

    def restore(self) -> None:
        """Set the variables and the other values of the last commit."""
        _assign(self.variables, self._committed_variables)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the variables and the other values of rank 0, and commit them; all ranks call it.

        Raises:
            MismatchError: the ranks have different variables; on all ranks.
            CommunicationError: a peer is gone.
        """
        broadcast_variables(self.variables, root_rank=0)
        super().sync()


class TensorFlowKerasState(ObjectState):
    """A state of a model of Keras 3 or Keras 2 (tf_keras): its weights, and the variables of its optimizers.

    An optimizer that has no slots yet gets them now, for all trainable variables of the model: a new worker receives
    the slots of the others. The functions that the model has traced are traced again in every new world.

    Args:
        model: a model that is built.
        optimizer: the optimizer of a loop with a tape; None for that of `compile`.
        backend: accepted for Horovod's sake.
        **kwargs: further values, as for `ObjectState`.

    Raises:
        InvalidError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise InvalidError(
                f"elastic state, model {getattr(model, 'name', model)!r}: it must be built first, so that it has "
                "weights to send; give it an input layer, or call model.build(input_shape)"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.backend = backend
        if self.optimizer is not None and not base.is_built(self.optimizer):
            base.build(self.optimizer, model.trainable_variables)
        self._copy()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the weights, the optimizers' variables and the other values to host memory."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """Set the weights, the optimizers' variables and the other values of the last commit."""
        _assign(layers.weights(self.model), self._committed_weights)
        for optimizer, committed in zip(self._optimizers(), self._committed_slots, strict=True):
            _assign(variables_of(optimizer), committed)
        layers.refresh(self.model)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the weights, optimizers' variables and values of rank 0, and commit them; all ranks call it.

        Gradients that a rank has accumulated since its last update are not sent.

        Raises:
            InvalidError: an optimizer has local variables.
            MismatchError: the ranks have different models or optimizers; on all ranks.
            CommunicationError: a peer is gone.
        """
        self._refuse_local()
        self._build_as_root()
        broadcast_variables(self.model, root_rank=0)
        optimizers = self._optimizers()
        counts = broadcast_object([len(_slots(optimizer)) for optimizer in optimizers], name="elastic: variables")
        for optimizer, count in zip(optimizers, counts, strict=True):
            broadcast_variables(_slots(optimizer)[:count], root_rank=0)
        super().sync()

    def reset(self) -> None:
        """Drop the functions that the model has traced, unless they may run in another world."""
        if membership.session() is not None and models.outlives_world(self.model):
            return
        for part in (self.model, *(value for _, value in layers.walk(self.model))):
            if hasattr(part, "make_train_function"):
                part.train_function = part.test_function = part.predict_function = None
                if getattr(part, "_eval_data_handler", None) is not None:  # of Keras 2, from a `fit` that has failed
                    part._eval_data_handler = None

    def _optimizers(self) -> list[Any]:
        of_model = models.optimizers(self.model)
        return of_model if self.optimizer in [None, *of_model] else [self.optimizer, *of_model]

    def _copy(self) -> None:
        self._committed_weights = _values(layers.weights(self.model))
        self._committed_slots = [_values(variables_of(optimizer)) for optimizer in self._optimizers()]

    def _refuse_local(self) -> None:
        for optimizer in self._optimizers():
            reducer = reducer_of(optimizer)
            if reducer is not None and reducer.local_keys:
                raise InvalidError(
                    f"elastic state, optimizer {optimizer.name!r}: it has local variables, which have a value of their "
                    "own on each rank; a new worker has none to receive, so elastic jobs do not support them"
                )

    def _build_as_root(self) -> None:
        """Give optimizers their slots that have them on rank 0, for the same variables."""
        weights = layers.weights(self.model)
        optimizers = self._optimizers()

        def trained(optimizer: Any) -> list[int] | None:
            if not base.is_built(optimizer):
                return None
            variables = {id(variable) for variable in _trained(optimizer, weights) or self.model.trainable_variables}
            return [place for place, weight in enumerate(weights) if id(weight) in variables]

        of_root = broadcast_object([trained(optimizer) for optimizer in optimizers], name="elastic: optimizers")
        for optimizer, chosen in zip(optimizers, of_root, strict=True):
            if chosen is not None and not base.is_built(optimizer):
                base.build(optimizer, [weights[place] for place in chosen])


class KerasState(TensorFlowKerasState):
    """A state of a model that `fit` trains; see `TensorFlowKerasState`.

    Args:
        model: a model that is built.
        optimizer: None for that of `compile`.
        **kwargs: further values, such as batch=0 and epoch=0 for the callbacks.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


def _trained(optimizer: Any, weights: list[Any]) -> list[Any]:
    """List the variables for which a built optimizer has slots, as far as it tells."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "_index_dict"):  # of Keras 2
        return [weight for weight in weights if inner._var_key(weight) in inner._index_dict]
    return list(getattr(inner, "_trainable_variables", ()))


def _slots(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = {id(variable) for variable in getattr(inner, "_accumulated_gradients", ())}
    return [variable for variable in variables_of(optimizer) if id(variable) not in accumulated]


def _values(variables: Iterable[Any]) -> list[np.ndarray]:
    return [np.array(tf.convert_to_tensor(variable)) for variable in variables]


def _assign(variables: list[Any], values: list[np.ndarray]) -> None:
    """Set variables; those of an optimizer that were made after the commit become zeros, as most slots begin."""
    for variable, value in zip(variables, values, strict=False):
        variable.assign(value)
    for variable in variables[len(values) :]:
        variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))
