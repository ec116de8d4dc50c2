"""What Keras 2 asks of each callback in its list, for callbacks that are derived from those of Keras 3."""

from __future__ import annotations


class Hooks:
    """Lets the `fit` of Keras 2 (tf_keras) take a callback of Keras 3; stands in front of its class.

    Attributes:
        works_on_batches: whether it does something before or after a training step.
    """

    works_on_batches = False

    def _implements_train_batch_hooks(self) -> bool:
        return self.works_on_batches

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
