"""Collectives of Python objects. Small objects need no TensorFlow; large ones are sent as tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import HvdExtError, InvalidError
from hvd_ext.job import consensus, process_sets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.job.runtime import Runtime

_OBJECT, _ERROR, _NOTHING, _LARGE = b"o", b"e", b"n", b"l"

# Smaller objects are exchanged through rank 0; objects from this size on by broadcasts of their bytes, one for each
# piece: a call holds its tensor several times, and a graph holds no constant of 2 GiB.
LARGE_NBYTES = 4 << 20
PIECE_NBYTES = 128 << 20


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Give all ranks the object that one rank has; all ranks call it.

    Args:
        obj: anything that pickles (with cloudpickle if it is installed); ignored except on the root.
        root_rank: the rank whose object all ranks get, counted in the job, also with a process set.
        session: None, or a session of tf.compat.v1, which is not needed.
        name: a name for messages, the same on all ranks; None for "broadcast_object".
        process_set: the ranks that take part; None for all.

    Returns:
        The root's object: a copy on every rank, and the object itself on the root.

    Raises:
        InvalidError: the root is not one of the ranks.
        MismatchError: the ranks name different roots.
        HvdExtError: the root's object does not pickle; raised on all ranks.
        CommunicationError: a peer is gone or stayed away.
    """
    job = process_sets.member(process_set, "broadcast_object")
    _check_session("broadcast_object", session)
    name = name or "broadcast_object"
    try:
        root = consensus.place_of_root(job.engine, root_rank)
    except InvalidError as error:
        job.engine.refuse(name, str(error))  # the others wait for this rank
        raise
    message = _dumped(obj) if job.engine.rank == root else (_NOTHING, b"")
    kinds, roots, payloads = _exchanged(job, name, message, root_rank)
    consensus.check_same(name, [{"root_rank": named} for named in roots], job.engine.ranks)
    _raise_failed(name, kinds, payloads, job.engine.ranks)
    if kinds[root] == _LARGE:
        payloads[root] = _large(name, message[1], int(payloads[root]), root_rank, process_set)
    return obj if job.engine.rank == root else pickle.loads(payloads[root])


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Give all ranks the objects of all ranks; all ranks call it.

    Args:
        obj: anything that pickles (with cloudpickle if it is installed).
        session: None, or a session of tf.compat.v1, which is not needed.
        name: a name for messages, the same on all ranks; None for "allgather_object".
        process_set: the ranks that take part; None for all.

    Returns:
        The objects, in the order of the ranks.

    Raises:
        HvdExtError: an object does not pickle; raised on all ranks.
        CommunicationError: a peer is gone or stayed away.
    """
    job = process_sets.member(process_set, "allgather_object")
    _check_session("allgather_object", session)
    name = name or "allgather_object"
    message = _dumped(obj)
    kinds, _, payloads = _exchanged(job, name, message, 0)
    _raise_failed(name, kinds, payloads, job.engine.ranks)
    for place, rank in enumerate(job.engine.ranks):
        if kinds[place] == _LARGE:
            sent = message[1] if place == job.engine.rank else b""
            payloads[place] = _large(name, sent, int(payloads[place]), rank, process_set)
    return [pickle.loads(payload) for payload in payloads]


def _check_session(where: str, session: Any) -> None:
    if session is not None and not hasattr(session, "run"):
        raise InvalidError(
            f"{where}: session ({session!r}): must be None or a session of tf.compat.v1; a name is given as name=..."
        )


def _dumped(obj: Any) -> tuple[bytes, bytes]:
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        payload = bytes(pickler.dumps(obj))
    except Exception as error:
        # The other ranks must learn of every error, or they would wait for ever.
        return _ERROR, f"{type(error).__name__}: {error}".encode()
    return (_LARGE if len(payload) >= LARGE_NBYTES else _OBJECT), payload


def _exchanged(
    job: Runtime, name: str, sent: tuple[bytes, bytes], root: int
) -> tuple[list[bytes], list[int], list[bytes | bytearray]]:
    """Exchange messages: a byte of kind, the root in decimal digits, a space, and the object, or its size if large."""
    kind, payload = sent
    message = b"%d" % len(payload) if kind == _LARGE else payload
    kinds, roots = [], []
    payloads: list[bytes | bytearray] = []
    for answer in job.engine.exchange(name, kind + b"%d " % root + message):
        header, _, payload = answer.partition(b" ")
        kinds.append(header[:1])
        roots.append(int(header[1:]))
        payloads.append(payload)
    return kinds, roots, payloads


def _large(name: str, payload: bytes, nbytes: int, root_rank: int, process_set: ProcessSet | None) -> bytes | bytearray:
    """Broadcast `nbytes` bytes of the root, whose payload is returned as it is; it is empty on the other ranks."""
    import numpy as np
    import tensorflow as tf

    from hvd_ext.tensorflow.collectives import single

    def moved(piece: NDArray[np.uint8]) -> NDArray[np.uint8]:
        def result() -> Any:
            return single.broadcast(tf.constant(piece), root_rank, name=f"{name} (large)", process_set=process_set)

        with tf.init_scope():
            if tf.executing_eagerly():
                return np.asarray(result())
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # a graph of TensorFlow 1 is being built
            return np.asarray(session.run(result()))

    received = bytearray(0 if payload else nbytes)
    content = np.frombuffer(payload or received, np.uint8)
    for begin in range(0, nbytes, PIECE_NBYTES):
        piece = content[begin : begin + PIECE_NBYTES]
        arrived = moved(piece)
        if not payload:
            piece[:] = arrived
    return payload or received


def _raise_failed(name: str, kinds: list[bytes], payloads: list[bytes | bytearray], ranks: Sequence[int]) -> None:
    for rank, kind, payload in zip(ranks, kinds, payloads, strict=True):
        if kind == _ERROR:
            raise HvdExtError(f"{name}: the object of rank {rank} does not pickle: {payload.decode()}")
