"""The collectives in the argument order of `horovod.keras`, for scripts that call `hvd.allreduce(value, name)`."""

from __future__ import annotations

from typing import Any

from hvd_ext.options import Average, Compression, ReduceOp
from hvd_ext.tensorflow.collectives import single

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compression | None = None,
) -> Any:
    """Reduce a value over all ranks; see `hvd_ext.allreduce`, which has another order of arguments.

    Args:
        value: a tensor, or a value that converts to one, of equal shape on all ranks.
        name: as for `hvd_ext.allreduce`, and so are all that follow.

    Returns:
        The reduced tensor.

    Raises:
        InvalidError: an argument breaks its rule.
        MismatchError: the ranks' arguments differ; on all ranks.
    """
    return single.allreduce(
        value,
        average=average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Join the values of all ranks along their first axis; see `hvd_ext.allgather`.

    Args:
        value: a tensor, or a value that converts to one; only the first axis may differ between ranks.
        name: its name in messages.

    Returns:
        The joined tensor.
    """
    return single.allgather(value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Give all ranks the value of one; see `hvd_ext.broadcast`.

    Args:
        value: a tensor, or a value that converts to one, of equal shape on all ranks.
        root_rank: the rank whose value all get.
        name: its name in messages.

    Returns:
        The root's tensor.
    """
    return single.broadcast(value, root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce a value over all ranks and give each its rows of the result; see `hvd_ext.reducescatter`.

    Args:
        value: a tensor, or a value that converts to one, of equal shape on all ranks.
        name: its name in messages.
        op: `hvd_ext.Average` or `hvd_ext.Sum`.

    Returns:
        This rank's rows.
    """
    return single.reducescatter(value, op=op, name=name)
