"""Norms of many tensors as ops, on the host or a GPU; and norms that the ranks divide among themselves.

There is one definition of a norm (tf_ops/kernels/norms.h): sums of squares in float64 within blocks of 65,536 elements,
and blocks in their order. So a norm has the same bits on any number of threads and ranks, divided or not, and on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_ext.engine import gpus
from hvd_ext.errors import NativeLibraryError
from hvd_ext.job.runtime import Runtime
from hvd_ext.tensorflow import devices, ops, sharing
from hvd_ext.tensorflow.collectives import calls, single

BLOCK = 65536
# The length of a sketch. It gives the norm of a longer tensor with a standard deviation of 1 / sqrt(2 SKETCH), 4 %,
# where signs are independent; blocks share theirs but for a factor, and on some tensors it is up to 9 %.
SKETCH = 256
DTYPES = ("float32", "float64", "float16", "bfloat16")


def device_of(variables: Sequence[Any]) -> str | None:
    """Find where the ops can work on variables.

    Returns:
        TensorFlow's name of the host, or of the GPU that has all of the variables. None where there is no library, or
        none of the kernels for GPUs, where the variables are apart, and under XLA.
    """
    if not _is_there() or ops.under_xla() or any(tf.as_dtype(one.dtype).name not in DTYPES for one in variables):
        return None
    of_variables = {devices.device_of(variable) for variable in variables}
    if not any(":GPU:" in device for device in of_variables):
        return ops.HOST
    return of_variables.pop() if len(of_variables) == 1 and gpus.LIBRARY.is_file() else None


def squares(tensors: Sequence[tf.Tensor], device: str = ops.HOST) -> tf.Tensor:
    """Give the sum of the squares of each tensor, float64."""
    groups = _by_dtype(tensors)
    library = ops.library()
    with tf.device(device):
        squares_of_groups = [library.hvd_ext_squared_norms([tensors[i] for i in group]) for group in groups]
    return _in_order(tf.concat(squares_of_groups, 0), groups)


def divided_squares(
    tensors: Sequence[tf.Tensor],
    job: Runtime,
    name: str,
    device: str = ops.HOST,
    divided: bool | tf.Tensor = True,
) -> tf.Tensor:
    """Give `squares`, with the same bits, by blocks divided among the ranks.

    Args:
        tensors: equal on all ranks, of known shapes.
        divided: the same on all ranks; where it is false, each rank computes all. One op has the tensors in both cases:
            a branch of a graph with hundreds of inputs costs milliseconds.
    """
    if divided is False:
        return squares(tensors, device)
    groups = _by_dtype(tensors)
    sizes = tuple(tuple(_elements(tensors[i]) for i in group) for group in groups)
    parts, counts = _kept_division(sizes, job.engine.size)
    own, library, begin = parts[job.engine.rank], ops.library(), 0
    remaining = iter(counts)
    sums = [tf.zeros(0, tf.float64)]
    for group in groups:
        of_group = [next(remaining) for _ in group]
        share = [block - begin for block in own if begin <= block < begin + sum(of_group)]
        begin += sum(of_group)
        if divided is True:
            sums += _squares_of_share([tensors[i] for i in group], of_group, share, device)
        else:
            with tf.device(ops.HOST):  # where the op reads them
                both = [tf.constant(blocks, tf.int64) for blocks in (share, list(range(sum(of_group))))]
                blocks = tf.cond(divided, lambda both=both: both[0], lambda both=both: both[1])
            with tf.device(device):
                sums.append(library.hvd_ext_block_squares([tensors[i] for i in group], blocks))
    of_rank = tf.concat(sums, 0)

    def gathered() -> tf.Tensor:
        call = calls.Call("pto", job, ops.call_name("pto", name, job), False)
        joined = single.gathered(call, of_rank, calls.signature("pto", f"blocks {begin}"))
        return tf.gather(joined, np.argsort(np.array([block for part in parts for block in part], np.int64)))

    of_all = gathered() if divided is True else tf.cond(divided, gathered, lambda: of_rank)
    return _in_order(library.hvd_ext_add_blocks(of_all, counts=counts), groups)


def _squares_of_share(
    tensors: Sequence[tf.Tensor], counts: Sequence[int], share: Sequence[int], device: str
) -> list[tf.Tensor]:
    """Give the squares of some blocks of tensors, as a list of at most one tensor.

    Args:
        counts: the number of blocks of each tensor.
        share: the blocks, ascending. A tensor that has none of them is no input of the op.
    """
    used: list[tf.Tensor] = []
    blocks: list[int] = []
    begin = before = 0  # blocks of all tensors so far, and of the used ones
    for tensor, count in zip(tensors, counts, strict=True):
        local = [block - begin for block in share if begin <= block < begin + count]
        if local:
            used.append(tensor)
            blocks += [before + block for block in local]
            before += count
        begin += count
    if not used:
        return []
    with tf.device(ops.HOST):
        wanted = tf.constant(blocks, tf.int64)
    with tf.device(device):
        return [ops.library().hvd_ext_block_squares(used, wanted)]


def division(sizes: Sequence[Sequence[int]], ranks: int) -> tuple[list[list[int]], list[int]]:
    """Divide blocks of tensors: the blocks of each rank, counted over all tensors, and their number in each tensor."""
    flat = [size for group in sizes for size in group]
    counts = [-(-size // BLOCK) for size in flat]
    costs = [min(BLOCK, size - begin) for size in flat for begin in range(0, size, BLOCK)]
    return sharing.shares(costs, ranks), counts


_kept_division = functools.lru_cache(16)(division)  # eager steps ask in each step


def sketches(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Give a short vector for each tensor that is linear in it, and whose expected square norm is the tensor's.

    Each of its elements is a sum of some of the tensor's with signs drawn once for all jobs (a count sketch: Charikar
    et al., 2002). So the norm of a sum over the ranks follows from the sum of the sketches.

    Args:
        tensors: float32, of known shapes.

    Returns:
        float32 [tensors, SKETCH]. A tensor of at most SKETCH elements has its own norm.
    """
    longest = max((_elements(tensor) for tensor in tensors), default=0)
    # whole blocks have signs of their own, or blocks that are alike would be added up or cancel each other
    signs, block_signs = _sign_words(BLOCK // SKETCH, 0), _sign_words(longest // BLOCK, 1)
    return ops.library().hvd_ext_sketches(list(tensors), signs, block_signs)


@functools.lru_cache(16)
def _sign_words(rows: int, seed: int) -> np.ndarray:
    """Give signs for rows of SKETCH elements, as tf_ops/kernels/sketch.h reads them: 32 words for each 1,024."""
    negative = np.random.default_rng(seed).choice([True, False], (rows, SKETCH)).reshape(-1)
    bits = np.pad(negative, (0, -negative.size % 1024)).reshape(-1, 32, 32).astype(np.uint32)
    return np.bitwise_or.reduce(bits << np.arange(32, dtype=np.uint32)[:, np.newaxis], 1)


@functools.cache
def _is_there() -> bool:
    try:
        return hasattr(ops.library(), "hvd_ext_lamb_updates")  # a library of an earlier version does not have it
    except NativeLibraryError:
        return False


def _elements(tensor: tf.Tensor) -> int:
    return int(tensor.shape.num_elements())


def _by_dtype(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype.name, []).append(place)
    return list(groups.values())


def _in_order(values: tf.Tensor, groups: Sequence[Sequence[int]]) -> tf.Tensor:
    if len(groups) == 1:
        return values
    return tf.gather(values, np.argsort([place for group in groups for place in group]))
