"""Data for several ranks: every rank its part, and all ranks equally many training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from hvd_ext import agreement, process_sets
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import tensorflow as tf

    from hvd_ext.process_sets import ProcessSet

Remainder = Literal["drop", "repeat", "uneven"]
REMAINDERS = get_args(Remainder)
# Elements that a data set of unknown size is mixed in, with shuffle=True: a few batches, also of large pictures.
BUFFER = 1024


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
) -> tf.data.Dataset:
    """Make this rank's part of the data, such that all ranks have equally many steps; all ranks call it alike.

    Element i goes to rank i % size: the ranks' batches of one step together are `size * batch_size` elements that
    follow each other. With remainder="drop" or "repeat" the ranks' batches of a step have the same number of elements,
    so that the average of their gradients is the gradient of the joined batch.

    The data must be the same on all ranks, in the same order (seed a shuffle in front), unless own=True. A data set of
    unknown length is read by all ranks and needs no counting: elements are taken in groups of one for each rank.

    Args:
        data: arrays (one, or a tuple, list or dictionary of them, equal in their first dimension), or a
            `tf.data.Dataset` of single elements. A data set of batches, with batch_size=None, is divided by batches.
        batch_size: elements in a batch of one rank; None: the data are not put into batches.
        shuffle: mix this rank's part anew in every epoch. Arrays are mixed over all ranks once, before they are
            divided. For data sets, a number says how many elements are held for it; True: 1024.
        seed: of shuffle; the same on all ranks.
        remainder: what happens to the elements that are left when all ranks have equally many. "drop": nobody sees
            them. "repeat": elements from the beginning fill up. "uneven": the first ranks have one more, for
            validation only: every element is seen once, and `MetricAverageCallback(exact=True)` and
            `hvd_ext.callbacks.joined_metrics` count it once.
        own: the data are this rank's part already, such as its own files. They are not divided; the ranks agree on the
            smallest number of elements, or with "repeat" on the largest. A data set of unknown length is read once to
            be counted, and must have as many elements in every epoch.
        steps: training steps in an epoch, all with full batches: each rank begins at its first element in every epoch,
            and again when it has seen its last. Needs no counting.
        drop_remainder: leave out a last, smaller batch (it has equally many elements on all ranks, except "uneven").
        process_set: the ranks that share the data; None: all.

    Returns:
        A `tf.data.Dataset` that says how long it is wherever that is known.

    Raises:
        InvalidError: an argument breaks its rule, or there are fewer elements than ranks.
        MismatchError: the ranks have other arguments or, without own=True, other data; on all ranks.
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
        _check(settings)
        return {"settings": settings, "elements": _length(data, count=own and steps is None)}

    # also where lengths are not needed: ranks that divide other data train on other data
    ranks = agreement.exchange(job, "shard", mine)
    agreement.check_same("shard", [each["settings"] for each in ranks])
    lengths = [each["elements"] for each in ranks]
    if not own:
        agreement.check_same("shard", [{"the number of elements": length} for length in lengths])
        part, length = _divided(data, lengths[0], job.rank, job.size, settings)
    else:
        part, length = _evened(data, lengths, job.rank, settings)
    return _batches(part, length, settings, _mixing(data, length, job.rank, settings))


def _check(settings: dict[str, Any]) -> None:
    for name in ("batch_size", "steps"):
        value = settings[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidError(f"shard: {name} ({value!r}): must be a whole number from 1, or None")
    shuffle = settings["shuffle"]
    if not isinstance(shuffle, int) or shuffle < 0:
        raise InvalidError(f"shard: shuffle ({shuffle!r}): must be True, False or a number of elements")
    if settings["remainder"] not in REMAINDERS:
        raise InvalidError(f"shard: remainder ({settings['remainder']!r}): must be one of {', '.join(REMAINDERS)}")
    if settings["remainder"] == "uneven" and settings["steps"] is not None:
        raise InvalidError("shard: steps: cannot be given with remainder='uneven', where every element is seen once")


def _length(data: Any, count: bool) -> int | None:
    """Give the number of elements: None where it is not known, -1 for infinitely many."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        lengths = {len(array) for array in tf.nest.flatten(_tuples(data))}
        if len(lengths) != 1:
            raise InvalidError(
                "shard: the arrays must have the same number of rows; they have "
                f"{', '.join(map(str, sorted(lengths))) or 'no arrays'}"
            )
        return lengths.pop()
    known = int(data.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        return -1
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known
    return int(data.reduce(tf.constant(0, tf.int64), lambda number, *_: number + 1)) if count else None


def _divided(
    data: Any, length: int | None, rank: int, size: int, settings: dict[str, Any]
) -> tuple[tf.data.Dataset, int | None]:
    """Give this rank's elements and their number, None where nobody knows, -1 for infinitely many."""
    import numpy as np
    import tensorflow as tf

    remainder = settings["remainder"]
    if length is not None and 0 <= length < size and remainder != "uneven":
        raise InvalidError(f"shard: {length} elements cannot be divided among {size} ranks; each needs at least one")
    if not isinstance(data, tf.data.Dataset):
        assert length is not None
        order = np.random.default_rng(settings["seed"]).permutation(length) if settings["shuffle"] else None
        total = _total(length, size, remainder)
        places = np.arange(rank, total, size) % max(length, 1)
        places = places if order is None else order[places]
        part = tf.nest.map_structure(lambda array: np.asarray(array)[places], _tuples(data))
        return tf.data.Dataset.from_tensor_slices(part), len(places)
    if length is None:
        return _groups(data, rank, size, remainder), None
    if length < 0:
        return data.shard(size, rank), -1
    total = _total(length, size, remainder)
    data = data.repeat(2) if total > length else data
    part = data.take(total).shard(size, rank)
    return part, len(range(rank, total, size))


def _total(length: int, size: int, remainder: str) -> int:
    return {"drop": length // size, "repeat": -(-length // size)}[remainder] * size if remainder != "uneven" else length


def _groups(data: tf.data.Dataset, rank: int, size: int, remainder: str) -> tf.data.Dataset:
    """Divide a data set of unknown length: whole groups of one element for each rank."""
    import tensorflow as tf

    if remainder == "uneven":
        return data.shard(size, rank)
    if remainder == "repeat":
        raise InvalidError(
            "shard: remainder='repeat' needs a length, and the data set does not know its own; give it one with "
            "data.apply(tf.data.experimental.assert_cardinality(n)), or use remainder='drop' or steps="
        )

    def of_this_rank(*windows: Any) -> tf.data.Dataset:
        group = windows if len(windows) > 1 else windows[0]
        whole = group if isinstance(group, tf.data.Dataset) else tf.data.Dataset.zip(group)
        return whole.skip(rank).take(1)

    return data.window(size, drop_remainder=True).flat_map(of_this_rank)


def _evened(
    data: Any, lengths: list[int | None], rank: int, settings: dict[str, Any]
) -> tuple[tf.data.Dataset, int | None]:
    """Give as many of this rank's own elements as the others have."""
    import tensorflow as tf

    part = data if isinstance(data, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(_tuples(data))
    finite = [length for length in lengths if length is not None and length >= 0]
    if settings["steps"] is not None or settings["remainder"] == "uneven":
        return part, lengths[rank]
    if 0 in finite:
        raise InvalidError(f"shard: rank {lengths.index(0)} has no elements of its own; each rank needs at least one")
    if not finite:
        return part, -1
    total = min(finite) if settings["remainder"] == "drop" else max(finite)
    return part.repeat().take(total), total


def _batches(part: tf.data.Dataset, length: int | None, settings: dict[str, Any], mixing: dict[str, int]) -> Any:
    import tensorflow as tf

    batch_size, steps = settings["batch_size"], settings["steps"]
    if mixing:
        part = part.shuffle(**mixing)
    if steps is not None:
        part = part.repeat()  # before the batches, which are then full ones in every step of every rank
    if batch_size is not None:
        part = part.batch(batch_size, drop_remainder=settings["drop_remainder"])
    if steps is not None:
        part = part.take(steps)
    elif length is not None and length >= 0:
        number = length if batch_size is None else -(-length // batch_size)
        if batch_size is not None and settings["drop_remainder"]:
            number = length // batch_size
        if number == 0 and settings["remainder"] != "uneven":
            raise InvalidError(f"shard: batch_size ({batch_size}): must be at most {length}, the elements of each rank")
        part = part.apply(tf.data.experimental.assert_cardinality(number))
    return part.prefetch(tf.data.AUTOTUNE)


def _mixing(data: Any, length: int | None, rank: int, settings: dict[str, Any]) -> dict[str, int]:
    """Give the arguments of a data set's shuffle; arrays are mixed as a whole."""
    import tensorflow as tf

    shuffle = settings["shuffle"]
    if not shuffle:
        return {}
    held = BUFFER if shuffle is True else int(shuffle)
    if length is not None and length >= 0:
        held = length if shuffle is True and not isinstance(data, tf.data.Dataset) else min(held, length)
    return {"buffer_size": max(1, held), "seed": settings["seed"] + rank}


def _tuples(data: Any) -> Any:
    """Make lists tuples: to TensorFlow a list is one array."""
    return tuple(data) if isinstance(data, list) and data and hasattr(data[0], "shape") else data
