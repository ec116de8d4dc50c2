"""Batch normalization over the batches of all ranks, as one process would do it over the joined batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options import Sum
from hvd_ext.tensorflow.collectives.single import allreduce
from hvd_ext.tensorflow.gradients import kinds


@keras.saving.register_keras_serializable("hvd_ext")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes with the mean and the variance of the joined batch of all ranks, which train the layer in step.

    Each training step sums the count, the values and their squares over the ranks, in one small allreduce for each
    layer, and one more in back-propagation. The sums are in double precision, so that the result is that of the joined
    batch even where a mean is large beside its deviation; ranks may have batches of unequal size, or masks. Moving
    statistics are equal on all ranks. Inference does not communicate.

    A saved model loads with `import hvd_ext`; without it, as a plain layer of the same name (Keras finds a layer's
    weights in a file by the name of its class): `class SyncBatchNormalization(keras.layers.BatchNormalization): pass`
    and `keras.models.load_model(path, custom_objects={"hvd_ext>SyncBatchNormalization": SyncBatchNormalization})`.

    Args:
        axis: the axis of the features, as in `keras.layers.BatchNormalization`.
        fused: accepted for Horovod's sake; only False.
        process_set: the ranks that normalize together, from `hvd_ext.add_process_set`; None: all. Saved as the list of
            its ranks: after loading, the set must have been added.
        **options: the other arguments of `keras.layers.BatchNormalization`.

    Raises:
        InvalidError: fused=True, or synchronized=True, which is the switch of tf.distribute.
    """

    def __init__(self, axis: int = -1, *, fused: bool | None = False, process_set: Any = None, **options: Any) -> None:
        if fused or fused is None:
            raise InvalidError(
                f"SyncBatchNormalization: fused ({fused!r}): must be False; the moments come from all ranks"
            )
        if options.get("synchronized"):
            raise InvalidError(
                "SyncBatchNormalization: synchronized (True): must be False; it means the replicas of tf.distribute, "
                "and this layer always takes all ranks"
            )
        super().__init__(axis=axis, **options)
        self.process_set = process_set
        self.supports_jit = False  # XLA cannot communicate

    def build(self, input_shape: Any) -> None:
        """Make the variables."""
        super().build(input_shape)
        for variable in self.trainable_variables:
            kinds.mark_meeting(variable)

    def get_config(self) -> dict[str, Any]:
        """Give the configuration: that of the plain layer where all ranks take part, else also the set's ranks."""
        config = super().get_config()
        if self.process_set is not None and _ranks(self.process_set):
            config["process_set"] = _ranks(self.process_set)
        return config

    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        # every version of Keras 3 asks this method for the moments of a training batch, [features] each
        group = self._group()
        if process_sets.member(group, "SyncBatchNormalization").engine.size == 1:
            return super()._moments(inputs, mask)
        if inputs.dtype in (tf.float16, tf.bfloat16):
            inputs = tf.cast(inputs, tf.float32)
        local = _sums(inputs, mask, self._reduction_axes)
        # Not named after the layer, whose automatic name may differ between ranks. In a function a name gets the number
        # of its call, so that ranks may trace at different times.
        total = allreduce(local, op=Sum, name="SyncBatchNormalization", process_set=group)
        count = tf.maximum(total[2], 1.0)
        mean = total[0] / count
        variance = tf.maximum(total[1] / count - tf.square(mean), 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _group(self) -> ProcessSet | None:
        group = self.process_set
        if group is None or isinstance(group, ProcessSet):
            return group
        listed = ProcessSet(group)  # a list of ranks from a configuration: find the set of these ranks
        return next((subset for subset in process_sets.added() if subset.ranks == listed.ranks), listed)


def _ranks(process_set: Any) -> list[int] | None:
    """Give the ranks of a set, or None for all ranks."""
    if getattr(process_set, "process_set_id", None) == 0:
        return None
    return [int(rank) for rank in getattr(process_set, "ranks", process_set)]


def _sums(x: tf.Tensor, mask: Any, axes: list[int]) -> tf.Tensor:
    """Give this rank's sums of x, of x squared and of ones: rows of [3, features], float64."""
    shape = tf.shape(x)
    if mask is None:
        weights = tf.ones([], x.dtype)
        count = tf.cast(tf.reduce_prod(tf.gather(tf.cast(shape, tf.int64), axes)), tf.float64)
    else:
        present = tf.broadcast_to(tf.cast(mask, tf.bool), shape[:-1])
        count = tf.cast(tf.math.count_nonzero(present), tf.float64)
        present = tf.expand_dims(present, -1)
        x = tf.where(present, x, tf.zeros_like(x))  # a masked element may be anything, also NaN
        weights = tf.cast(present, x.dtype)
    number = tf.cast(count, x.dtype)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x, axes, keepdims=True), number)
    variance = tf.math.divide_no_nan(tf.reduce_sum(weights * tf.square(x - mean), axes), number)
    mean, variance = tf.cast(tf.reshape(mean, [-1]), tf.float64), tf.cast(variance, tf.float64)
    return tf.stack([count * mean, count * (variance + tf.square(mean)), count * tf.ones_like(mean)])
