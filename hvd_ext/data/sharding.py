"""`shard`: every rank gets its part of the data, and all ranks equally many training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvd_ext.data import rows
from hvd_ext.data.batches import is_batched, is_py_dataset, number_of_batches, part_of, part_of_items
from hvd_ext.data.functions import Functions
from hvd_ext.data.settings import Remainder, check_division, check_enough, check_whole
from hvd_ext.data.steps import Steps, untuned, used
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, process_sets

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet

# The number of elements that shuffle=True holds for a data set: a few batches, small enough for large pictures.
BUFFER = 1024

# kinds of data, as messages name them
_ARRAYS, _DATA_SET, _PY_DATASET, _GENERATOR = "arrays", "tf.data.Dataset", "PyDataset", "generator"
_OWN_BATCHES = ("batch_size", None, "its items are batches already, and the ranks get whole batches; leave it out")
_ITS_SIZES = ("drop_remainder", False, "its batches keep the sizes that it gives them")
# kind -> the settings that do not go with it: name, default, what to do
_REFUSED: dict[str, tuple[tuple[str, Any, str], ...]] = {
    _PY_DATASET: (
        _OWN_BATCHES,
        _ITS_SIZES,
        ("shuffle", False, "fit shuffles its batches in every epoch, unless shuffle=False is passed to fit"),
    ),
    _GENERATOR: (
        _OWN_BATCHES,
        _ITS_SIZES,
        ("shuffle", False, "the order of its items is its own; let it shuffle them, in the same way on all ranks"),
        ("own", False, "its length is not known; give it to fit as it is, with the same steps_per_epoch on all "
         "ranks, or make a data set of it: tf.data.Dataset.from_generator(...)"),
        ("steps", None, "it is read once, and cannot be restarted; give fit steps_per_epoch"),
    ),
}  # fmt: skip


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | int = False,
    seed: int = 0,
    remainder: Remainder = "drop",
    own: bool = False,
    steps: int | None = None,
    drop_remainder: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Give this rank its part of the data, such that all ranks have equally many steps; all ranks call it alike.

    Element i goes to rank i % size, so the joined batch of one step is `size * batch_size` elements that follow each
    other. With remainder="drop" or "repeat" the batches of all ranks in a step have the same number of elements, so the
    average of the ranks' gradients is the gradient of the joined batch.

    The data must be the same on all ranks, in the same order (a shuffle before this needs a seed), unless own=True. A
    data set of unknown length is not counted: all ranks read it, in groups of one element for each rank.

    Data that come in batches are divided by batches: batch i goes to rank i % size, and batch_size is left out. If one
    batch is smaller than the others, the batches of its step are of unequal size.

    Args:
        data: arrays (one, or tuples, lists or dictionaries of them, equal in their first dimension; also a
            `tf.RaggedTensor` or `tf.SparseTensor`, or a sparse matrix of SciPy, which is divided by rows), or a
            `tf.data.Dataset` of single elements; or, in batches, a `tf.data.Dataset`, a `keras.utils.PyDataset`
            (`Sequence`), or a generator. A `PyDataset` keeps its workers and its hooks for the ends of epochs: if it
            shuffles its batches there, it must do so alike on all ranks. All ranks read a generator, which must give
            the same items on all; with one that never ends `fit` needs steps_per_epoch.
        batch_size: elements in a batch of one rank; None: the data come in batches; 0: the elements of a data set are
            divided as they are, for batches of your own (`padded_batch`).
        shuffle: a new order in every epoch. Of arrays each rank has the rows rank, rank + size and so on each time,
            in an order that depends on seed and epoch alone; an epoch that another job has begun, on as many ranks or
            on another number, goes on with the rows that are left (docs/saving.md). For data sets, the number of this
            rank's elements in the shuffle's buffer; True: 1024.
        seed: of shuffle; the same on all ranks.
        remainder: what happens to the elements that are left when all ranks have equally many. "drop": no rank sees
            them. "repeat": elements from the beginning fill up. "uneven": the first ranks have one more, for
            validation only: every element is seen once, and `MetricAverageCallback(exact=True)` and
            `hvd_ext.callbacks.joined_metrics` count it once.
        own: the data are this rank's part already, such as its own files, and are not divided. Every rank uses as many
            elements as the rank with the fewest has, or with "repeat" as the rank with the most. A data set of unknown
            length is read once to be counted, and must have as many elements in every epoch.
        steps: the number of training steps in an epoch, all with full batches. Each rank begins at its first element in
            every epoch, and again after its last. Nothing is counted.
        drop_remainder: drop a last, smaller batch (it has equally many elements on all ranks, except with "uneven").
        process_set: the ranks that share the data; None: all.

    Returns:
        A `tf.data.Dataset`, with its cardinality wherever that is known, whose batches of ragged tensors are ragged,
        and of sparse tensors and matrices `tf.SparseTensor`; for a `PyDataset` a `PyDataset`, for a
        generator a generator.

    Raises:
        InvalidError: an argument breaks its rule or does not go with such data, or there are fewer elements than ranks.
        MismatchError: the ranks have different arguments or, without own=True, different data; on all ranks.
        NotInitializedError: before `init()`.
    """
    job = process_sets.member(process_set, "shard").engine
    settings = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "remainder": remainder,
        "own": own,
        "steps": steps,
        "drop_remainder": drop_remainder,
    }

    def mine() -> dict[str, Any]:
        nonlocal data
        _check(settings)
        kind, data = _kind(data)
        _check_kind(kind, data, settings)
        return {"settings": {"data": kind, **settings}, "elements": _length(data, count=own and steps is None)}

    # compared even where no lengths are needed: ranks that divide different data would train on different data
    ranks = consensus.exchange(job, "shard", mine)
    consensus.check_same("shard", [each["settings"] for each in ranks])
    lengths = [each["elements"] for each in ranks]
    kind, settings["batch_size"] = ranks[0]["settings"]["data"], batch_size or None
    if not settings["own"]:
        consensus.check_same("shard", [{"the number of elements": length} for length in lengths])
    if kind == _GENERATOR:
        return part_of_items(data, job.rank, job.size, remainder == "drop")
    if kind == _PY_DATASET:
        return _part(data, lengths, job.rank, settings)
    if kind == _ARRAYS and shuffle:
        return _shuffled_arrays(data, lengths, job.rank, settings)
    if not own:
        part, length = _divided(data, lengths[0], job.rank, job.size, settings)
    else:
        part, length = _evened(data, lengths, job.rank, settings)
    return _batches(part, length, job.rank, settings)


def _check(settings: dict[str, Any]) -> None:
    check_whole("shard: batch_size", settings["batch_size"], 0, optional=True)
    check_division("shard: ", settings)
    shuffle = settings["shuffle"]
    if not isinstance(shuffle, int) or shuffle < 0:
        raise InvalidError(f"shard: shuffle ({shuffle!r}): must be True, False or a number of elements")


def _kind(data: Any) -> tuple[str, Any]:
    """Give the kind of the data, and the data, with lists of arrays made tuples."""
    if isinstance(data, tf.data.Dataset):
        return _DATA_SET, data
    if is_py_dataset(data):
        return _PY_DATASET, data
    if isinstance(data, Iterator):
        return _GENERATOR, data
    return _ARRAYS, tf.nest.map_structure(_rows, _tuples(data))


def _rows(value: Any) -> Any:
    if not hasattr(value, "shape"):
        raise InvalidError(
            f"shard: data ({_short(value)}): must be arrays, a tf.data.Dataset, a keras.utils.PyDataset or a generator"
            + ("; call a function that makes one first: shard(function(), ...)" if callable(value) else "")
        )
    return rows.of(value, "shard: data")


def _check_kind(kind: str, data: Any, settings: dict[str, Any]) -> None:
    """Refuse settings that do not go with this kind of data."""
    batch_size = settings["batch_size"]
    if kind == _ARRAYS and not batch_size:
        raise InvalidError(
            f"shard: batch_size ({batch_size!r}): arrays need one: the number of rows that one rank takes in a step"
        )
    if kind == _DATA_SET:
        batched = is_batched(data)
        if batch_size is None and batched is False:
            raise InvalidError(
                "shard: batch_size (None): must be given for a data set of single elements: the number of them that "
                "one rank takes in a step; 0 divides the elements without batching them, if you make the batches "
                "yourself"
            )
        if batch_size and batched:
            raise InvalidError(
                f"shard: batch_size ({batch_size}): the data set is batched already; leave batch_size out, so that "
                "whole batches are divided; or take it apart: shard(data.unbatch(), batch_size); or, where each of "
                "them is one element: shard(data, 0).batch(batch_size)"
            )
        return
    if kind == _GENERATOR and settings["remainder"] == "repeat":
        raise InvalidError("shard: remainder ('repeat'): a generator cannot be restarted; use 'drop' or 'uneven'")
    for name, default, instead in _REFUSED.get(kind, ()):
        if settings[name] != default:
            raise InvalidError(f"shard: {name} ({settings[name]!r}): does not go with a {kind}; {instead}")


def _part(data: Any, lengths: list[int], rank: int, settings: dict[str, Any]) -> Any:
    """Give this rank's batches of a `PyDataset`."""
    size, remainder, steps, length = len(lengths), settings["remainder"], settings["steps"], lengths[rank]
    if settings["own"]:
        number = _own_length(lengths, rank, "batches", settings)
        return part_of(data, 0, 1, number if steps is None else steps)
    if length < 0:
        return part_of(data, rank, size, length if steps is None else steps)
    check_enough(f"shard: {length} batches", length, size, remainder)
    if steps is not None:  # start at this rank's first batch
        return part_of(part_of(data, rank, size, length // size), 0, 1, steps)
    return part_of(data, rank, size, len(range(rank, used(length, 1, size, remainder), size)))


def _own_length(lengths: list[Any], rank: int, what: str, settings: dict[str, Any]) -> Any:
    """Give how many elements or batches of its own this rank uses: None where unknown, -1 for infinitely many."""
    if settings["remainder"] == "uneven":
        return lengths[rank]
    if 0 in lengths:
        raise InvalidError(f"shard: rank {lengths.index(0)} has no {what} of its own; each rank needs at least one")
    if settings["steps"] is not None:
        return lengths[rank]
    finite = [length for length in lengths if length is not None and length >= 0]
    return (min if settings["remainder"] == "drop" else max)(finite, default=-1)


def _length(data: Any, count: bool) -> int | None:
    """Give the number of elements: None where it is unknown, -1 for infinitely many."""
    if is_py_dataset(data):
        return number_of_batches(data)
    if isinstance(data, Iterator):
        return None
    if not isinstance(data, tf.data.Dataset):
        return rows.number(tf.nest.flatten(data), "shard: the arrays")
    known = int(data.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        return -1
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known
    return int(data.reduce(tf.constant(0, tf.int64), lambda number, *_: number + 1)) if count else None


def _divided(
    data: Any, length: int | None, rank: int, size: int, settings: dict[str, Any]
) -> tuple[tf.data.Dataset, int | None]:
    """Give this rank's elements and their number: None where it is unknown, -1 for infinitely many."""
    remainder = settings["remainder"]
    if length is not None and length >= 0:
        check_enough(f"shard: {length} elements", length, size, remainder)
    if not isinstance(data, tf.data.Dataset):
        assert length is not None
        numbers = np.arange(rank, used(length, 1, size, remainder), size) % max(length, 1)
        part = tf.nest.map_structure(lambda array: rows.taker(array)(numbers), data)
        return tf.data.Dataset.from_tensor_slices(part), len(numbers)
    if length is None:
        return _groups(data, rank, size, remainder), None
    if length < 0:
        return data.shard(size, rank), -1
    total = used(length, 1, size, remainder)
    data = data.repeat(2) if total > length else data
    part = data.take(total).shard(size, rank)
    return part, len(range(rank, total, size))


def _groups(data: tf.data.Dataset, rank: int, size: int, remainder: str) -> tf.data.Dataset:
    """Divide a data set of unknown length by groups of one for each rank; "drop" drops a smaller last group."""
    if remainder == "uneven":
        return data.shard(size, rank)
    if remainder == "repeat":
        raise InvalidError(
            "shard: remainder='repeat' needs a length, and the data set does not know its own; give it one with "
            "data.apply(tf.data.experimental.assert_cardinality(n)), or use remainder='drop' or steps="
        )

    def of_this_rank(*windows: Any) -> tf.data.Dataset:
        group = windows if len(windows) > 1 else windows[0]
        elements = group if isinstance(group, tf.data.Dataset) else tf.data.Dataset.zip(group)
        return elements.skip(rank).take(1)

    return data.window(size, drop_remainder=True).flat_map(of_this_rank)


def _evened(
    data: Any, lengths: list[int | None], rank: int, settings: dict[str, Any]
) -> tuple[tf.data.Dataset, int | None]:
    """Give this rank's own elements, as many as the others use, and their number."""
    part = data if isinstance(data, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(data)
    total = _own_length(lengths, rank, "elements", settings)
    if total is None or total < 0 or settings["steps"] is not None or settings["remainder"] == "uneven":
        return part, total
    return part.repeat().take(total), total


def _shuffled_arrays(data: Any, lengths: list[Any], rank: int, settings: dict[str, Any]) -> tf.data.Dataset:
    """Give the batches of arrays, each epoch in an order of its own; their rows are copied batch by batch."""
    own, size, remainder = settings["own"], len(lengths), settings["remainder"]
    elements = _own_length(lengths, rank, "elements", settings) if own else None
    if not own:
        check_enough(f"shard: {lengths[0]} elements", lengths[0], size, remainder)
    steps = Steps(
        "shard",
        lengths[rank],
        settings["batch_size"],
        rank=0 if own else rank,
        size=1 if own else size,
        shuffle=True,
        seed=settings["seed"] + (rank if own else 0),
        remainder=remainder,
        steps=settings["steps"],
        drop_remainder=settings["drop_remainder"],
        elements=elements,
    )
    if remainder != "uneven":
        _check_steps(steps.number, settings["batch_size"], lengths[rank] if own else lengths[rank] // size)
    spec = tf.nest.map_structure(lambda array: rows.spec(array, steps.rows), data)
    arrays = tf.nest.flatten(data)
    # text as bytes, as TensorFlow has it; `tf.numpy_function` would take ASCII only
    dense = {
        place: np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
        for place, array in enumerate(arrays)
        if isinstance(array, np.ndarray)
    }
    takers = {place: rows.taker(array) for place, array in enumerate(arrays) if place not in dense}

    def take(numbers: np.ndarray) -> list[np.ndarray]:
        return [array[numbers] for array in dense.values()]

    functions, places = Functions(), list(dense)
    taken_by = functions.weak(take)

    def read(numbers: tf.Tensor, *_: tf.Tensor) -> Any:
        specs = tf.nest.flatten(spec)
        dtypes = [specs[place].dtype for place in places]
        parts: dict[int, Any] = {place: taker(numbers) for place, taker in takers.items()}
        if places:
            taken = tf.numpy_function(taken_by, [numbers], dtypes, stateful=False)
            for place, part in zip(places, taken, strict=True):
                parts[place] = tf.ensure_shape(part, specs[place].shape)
        return tf.nest.pack_sequence_as(data, [parts[place] for place in range(len(arrays))])

    batches = steps.batches(read, spec, functions=functions)
    prefetched = batches.with_options(untuned()).prefetch(tf.data.AUTOTUNE)
    functions.keep_with(prefetched)
    return prefetched


def _batches(part: tf.data.Dataset, length: int | None, rank: int, settings: dict[str, Any]) -> Any:
    batch_size, steps, shuffle = settings["batch_size"], settings["steps"], settings["shuffle"]
    if shuffle:
        held = BUFFER if shuffle is True else int(shuffle)
        held = min(held, length) if length is not None and length >= 0 else held
        part = part.shuffle(max(1, held), seed=settings["seed"] + rank)
    if steps is not None:
        part = part.repeat()  # before `batch`, so that all batches are full
    if batch_size is not None:
        part = part.batch(batch_size, drop_remainder=settings["drop_remainder"])
    if steps is not None:
        part = part.take(steps)
    elif length is not None and length >= 0:
        number = length if batch_size is None else -(-length // batch_size)
        if batch_size is not None and settings["drop_remainder"]:
            number = length // batch_size
        if settings["remainder"] != "uneven":
            _check_steps(number, batch_size, length)
        part = part.apply(tf.data.experimental.assert_cardinality(number))
    return part.prefetch(tf.data.AUTOTUNE)


def _check_steps(number: int, batch_size: int | None, length: int) -> None:
    if number == 0:
        raise InvalidError(f"shard: batch_size ({batch_size}): must be at most {length}, the elements of each rank")


def _tuples(data: Any) -> Any:
    """Make lists of arrays tuples, and lists of numbers arrays: TensorFlow takes each list for one array."""
    if isinstance(data, Mapping):
        return {name: _tuples(value) for name, value in data.items()}
    if not isinstance(data, list | tuple):
        return data
    if data and all(isinstance(value, Real) for value in tf.nest.flatten(data)):
        return rows.dense(data, "shard: data")
    while data and data[-1] is None:  # fit takes (x, y, None) for data without weights
        data = data[:-1]
    return tuple(map(_tuples, data))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
