"""The arrays of a channel's tensors that go into checkpoints: what a policy carries over from one step to the next."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.errors import HvdExtError
from hvd_ext.state import Arrays, Everyone

if TYPE_CHECKING:
    from hvd_ext.planning.tensors import Tensor
    from hvd_ext.tensorflow.gradients.channel import Channel

# the name of the number of ranks, which is saved beside the tensors, whose names have a slash
RANKS = "ranks"


def any_saved(local: Arrays | None, of_ranks: Everyone) -> Arrays | None:
    """Return what this rank has saved, else what the first rank has; None if that cannot be read."""
    if local is None:
        with contextlib.suppress(HvdExtError, OSError):
            return next(iter(of_ranks()), None)
    return local


def empty(tensor: Tensor) -> np.ndarray:
    """Make an array for a tensor."""
    return np.empty(tensor.shape, numpy_dtype(tensor))


def numpy_dtype(tensor: Tensor) -> Any:
    """Return the dtype of a tensor's arrays; bfloat16 is not one of NumPy's own."""
    return tf.as_dtype(tensor.dtype).as_numpy_dtype


def storable(array: np.ndarray) -> np.ndarray:
    """Return an array as files hold it: bfloat16 as its bits."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def under(prefix: str, arrays: Arrays) -> Arrays:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def named(number: int, tensor: Tensor, array: np.ndarray) -> Arrays:
    """Return the entry of a tensor, by its number in the channel."""
    return {f"{number}/{tensor.name}": storable(array)}


def by_number(channel: Channel, arrays: Arrays) -> dict[int, np.ndarray]:
    """Return the saved arrays of a channel's tensors by their numbers; names may have changed since (`dense_20`)."""
    saved = {int(key.split("/", 1)[0]): array for key, array in arrays.items() if "/" in key}
    tensors = channel.layout.engine_tensors
    return {
        number: np.ascontiguousarray(saved[number]).view(numpy_dtype(tensors[number])).reshape(tensors[number].shape)
        for number in sorted(saved)
    }
