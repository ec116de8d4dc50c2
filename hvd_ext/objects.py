"""Python objects from rank to rank; needs no TensorFlow."""

from __future__ import annotations

import pickle
from typing import Any

from hvd_ext import agreement, runtime
from hvd_ext.errors import HvdExtError, InvalidError

_OBJECT, _ERROR, _NOTHING = b"o", b"e", b"n"


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Give all ranks the object that one rank has; all ranks call it.

    Args:
        obj: anything that pickles (with cloudpickle where it is installed); only the root's counts.
        root_rank: whose object all get.
        name: for messages; the same on all ranks. None: "broadcast_object".

    Returns:
        The root's object: a copy on every rank, and the object itself on the root.

    Raises:
        InvalidError: the root is not a rank.
        MismatchError: the ranks name different roots.
        HvdExtError: the root's object does not pickle; on all ranks.
        CommunicationError: a peer is gone or stayed away.
    """
    job = runtime.current()
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < job.engine.size:
        raise InvalidError(f"root_rank ({root_rank!r}): must be a rank, 0 to {job.engine.size - 1}")
    name = name or "broadcast_object"
    own = _dumped(obj) if job.engine.rank == root_rank else _NOTHING
    # One byte of kind, then the root in decimal digits and a space, then the object.
    answers = job.engine.exchange(name, own[:1] + b"%d " % root_rank + own[1:])
    kinds, roots, payloads = zip(*(_parsed(answer) for answer in answers), strict=True)
    agreement.check_same(name, [{"root_rank": root} for root in roots])
    _raise_failed(name, kinds, payloads)
    return obj if job.engine.rank == root_rank else pickle.loads(payloads[root_rank])


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Give all ranks the objects of all; all ranks call it.

    Args:
        obj: anything that pickles (with cloudpickle where it is installed).
        name: for messages; the same on all ranks. None: "allgather_object".

    Returns:
        The objects, by rank.

    Raises:
        HvdExtError: an object does not pickle; on all ranks.
        CommunicationError: a peer is gone or stayed away.
    """
    job = runtime.current()
    name = name or "allgather_object"
    own = _dumped(obj)
    answers = job.engine.exchange(name, own[:1] + b"0 " + own[1:])
    kinds, _, payloads = zip(*(_parsed(answer) for answer in answers), strict=True)
    _raise_failed(name, kinds, payloads)
    return [pickle.loads(payload) for payload in payloads]


def _dumped(obj: Any) -> bytes:
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        return _OBJECT + bytes(pickler.dumps(obj))
    except Exception as error:
        # The other ranks must hear of it, whatever it is, or they would wait for ever.
        return _ERROR + f"{type(error).__name__}: {error}".encode()


def _parsed(answer: bytes) -> tuple[bytes, int, bytes]:
    header, _, payload = answer.partition(b" ")
    return header[:1], int(header[1:]), payload


def _raise_failed(name: str, kinds: tuple[bytes, ...], payloads: tuple[bytes, ...]) -> None:
    for rank, (kind, payload) in enumerate(zip(kinds, payloads, strict=True)):
        if kind == _ERROR:
            raise HvdExtError(f"{name}: the object of rank {rank} does not pickle: {payload.decode()}")
