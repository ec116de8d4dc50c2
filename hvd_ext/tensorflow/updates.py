"""The updates of LARS and LAMB as ops, all variables in one call (tf_ops/ops/layerwise.cc), on the host or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import kinds


def apply_lars(
    weights: Sequence[Any],
    velocities: Sequence[Any],
    gradients: Sequence[tf.Tensor],
    scales: tf.Tensor,
    momentum: tf.Tensor,
    rate: tf.Tensor,
    decays: Sequence[float],
    nesterov: bool,
    device: str,
) -> None:
    """Update float32 variables by one step of LARS; see the op's text.

    Args:
        device: from `norms.device_of`.
    """
    with tf.device(device):
        ops.library().hvd_ext_apply_lars(
            _handles(weights),
            _handles(velocities),
            list(gradients),
            scales,
            momentum,
            rate,
            decays=[float(decay) for decay in decays],
            nesterov=nesterov,
        )


def lamb_updates(
    weights: Sequence[Any],
    averages: tuple[Sequence[Any], Sequence[Any]],
    gradients: Sequence[tf.Tensor],
    unbias: tf.Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decays: Sequence[float],
    device: str,
) -> list[tf.Tensor]:
    """Update the averages of LAMB, and give what is subtracted from float32 weights; see the op's text.

    Args:
        device: from `norms.device_of`.
    """
    with tf.device(device):
        return list(
            ops.library().hvd_ext_lamb_updates(
                _handles(weights),
                *map(_handles, averages),
                list(gradients),
                unbias,
                decays=[float(decay) for decay in decays],
                first=1 - betas[0],
                second=1 - betas[1],
                epsilon=epsilon,
            )
        )


def subtract(weights: Sequence[Any], updates: Sequence[tf.Tensor], rates: tf.Tensor, device: str) -> None:
    """Subtract from float32 variables their updates, times a rate for each; see the text of the op `ApplyUpdates`."""
    with tf.device(device):
        ops.library().hvd_ext_apply_updates(_handles(weights), list(updates), rates)


def _handles(variables: Sequence[Any]) -> list[tf.Tensor]:
    return [kinds.inner(variable).handle for variable in variables]
