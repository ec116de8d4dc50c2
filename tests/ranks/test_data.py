"""shard: every rank its part, all ranks equally many steps, and what cannot be even is refused or told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError

RANK_BATCH = 3


class Batches(keras.utils.PyDataset):
    """Batches whose targets are their places; endless without a number."""

    def __init__(self, number: int | None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.number = number
        self.epochs = 0

    @property
    def num_batches(self) -> int | None:
        return self.number

    def __getitem__(self, index: int) -> Any:
        return np.full((4, 2), index, np.float32), np.full((4, 1), index, np.float32)

    def on_epoch_end(self) -> None:
        self.epochs += 1


def old_batches(number: int) -> Any:
    """Make a `Sequence` of tf_keras like `Batches`."""
    keras2 = pytest.importorskip("tf_keras")
    names = {"__len__": lambda self: self.number, "__getitem__": Batches.__getitem__}
    made = type("Old", (keras2.utils.Sequence,), {**names, "on_epoch_end": Batches.on_epoch_end})()
    made.number, made.epochs = number, 0
    return made


def parts(dataset: tf.data.Dataset) -> list[list[list[Any]]]:
    """Give the batches of all ranks, by rank."""
    return hvd.allgather_object([np.asarray(batch).tolist() for batch in dataset])


def flat(batches: list[list[Any]]) -> list[Any]:
    """Join the batches of one rank."""
    return [element for batch in batches for element in batch]


def counted(number: int, known: bool = True) -> tf.data.Dataset:
    """Make a data set of 100, 101, ... whose length may be hidden."""
    dataset = tf.data.Dataset.range(100, 100 + number)
    return dataset if known else dataset.filter(lambda _: True)


@pytest.mark.parametrize("kind", ["arrays", "known", "unknown"])
@pytest.mark.parametrize("remainder", ["drop", "repeat", "uneven"])
def test_the_ranks_share_the_elements(kind: str, remainder: str) -> None:
    size = hvd.size()
    number = 7 * size + size - 1  # one element short of even, or even where there is one rank
    if (kind, remainder) == ("unknown", "repeat"):
        with pytest.raises(InvalidError, match="assert_cardinality"):
            hvd.shard(counted(number, known=False), RANK_BATCH, remainder=remainder)
        return
    data = np.arange(100, 100 + number) if kind == "arrays" else counted(number, kind == "known")
    dataset = hvd.shard(data, RANK_BATCH, remainder=remainder)
    ranks = parts(dataset)
    everyone = sorted(flat([flat(batches) for batches in ranks]))
    whole = number // size * size
    wanted = list(range(100, 100 + (whole if remainder == "drop" else number)))
    if remainder == "repeat":
        wanted = sorted(wanted + list(range(100, 100 + (-number % size))))
    assert everyone == wanted
    shapes = [[len(batch) for batch in batches] for batches in ranks]
    assert shapes == [shapes[0]] * size or remainder == "uneven"
    assert flat(ranks[0])[:3] == [100, 100 + size, 100 + 2 * size]
    if kind != "unknown":
        assert int(dataset.cardinality()) == len(ranks[hvd.rank()])


def test_mixed_arrays_are_mixed_anew_in_every_epoch_and_stay_in_their_parts() -> None:
    x = np.arange(12 * hvd.size())
    dataset = hvd.shard({"x": x, "y": x * 2}, 4, shuffle=True, seed=3)
    epochs = [[(batch["x"].numpy(), batch["y"].numpy()) for batch in dataset] for _ in range(2)]
    first, second = ([int(value) for batch, _ in epoch for value in batch] for epoch in epochs)
    assert first != second and sorted(first) == sorted(second)
    assert all((y == 2 * x).all() for epoch in epochs for x, y in epoch)
    assert sorted(flat(hvd.allgather_object(first))) == x.tolist()
    own = hvd.shard(counted(12, known=False), 4, shuffle=6, own=True)
    assert sorted(np.concatenate(list(own.as_numpy_iterator()))) == list(range(100, 112))


def test_elements_of_several_parts_and_of_unequal_shapes_are_divided() -> None:
    def elements() -> Iterator[Any]:
        for index in range(3 * hvd.size() - 1):  # one short of even; on one rank two
            yield {"x": np.full(index + 1, index), "n": index}, -index

    signature = (
        {"x": tf.TensorSpec([None], tf.int64), "n": tf.TensorSpec([], tf.int64)},
        tf.TensorSpec([], tf.int64),
    )
    dataset = hvd.shard(tf.data.Dataset.from_generator(elements, output_signature=signature), 0)
    seen = [(x["x"].numpy().tolist(), int(x["n"]), int(y)) for x, y in dataset]
    mine = [hvd.rank(), hvd.rank() + hvd.size()]
    assert seen == [([index] * (index + 1), index, -index) for index in mine]


@pytest.mark.parametrize(("remainder", "steps"), [("drop", None), ("repeat", None), ("uneven", None), ("drop", 5)])
def test_data_of_ones_own_are_evened_out(remainder: str, steps: int | None) -> None:
    rank, size = hvd.rank(), hvd.size()
    own = tf.data.Dataset.range(rank * 1000, rank * 1000 + 4 + rank).filter(lambda _: True)  # rank r has 4 + r
    ranks = parts(hvd.shard(own, 2, own=True, remainder=remainder, steps=steps))
    lengths = [len(flat(batches)) for batches in ranks]
    assert all(set(flat(ranks[each])) <= set(range(each * 1000, each * 1000 + 4 + each)) for each in range(size))
    if steps:
        assert [[len(batch) for batch in batches] for batches in ranks] == [[2] * steps] * size
    else:
        each = {"drop": [4] * size, "repeat": [3 + size] * size, "uneven": [4 + each for each in range(size)]}
        assert lengths == each[remainder]


def test_the_ranks_of_a_process_set_share_data_among_themselves() -> None:
    inside = range(max(1, hvd.size() - 1))
    group = hvd.add_process_set(inside) if hvd.size() > 1 else None
    x = np.arange(3 * len(inside))
    try:
        if hvd.rank() in inside:
            seen = flat([batch.numpy().tolist() for batch in hvd.shard(x, 2, process_set=group)])
            assert seen == x[hvd.rank() :: len(inside)].tolist()
        else:
            with pytest.raises(InvalidError, match=f"shard: rank {hvd.rank()} is not in process set"):
                hvd.shard(x, 2, process_set=group)
    finally:
        hvd.remove_process_set(group or hvd.global_process_set)


def test_an_endless_data_set_stays_endless() -> None:
    endless = hvd.shard(counted(hvd.size()).repeat(), 2)
    assert int(endless.cardinality()) in (tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY)
    assert [batch.numpy().tolist() for batch in endless.take(2)] == [[100 + hvd.rank()] * 2] * 2
    own = hvd.shard(counted(3).repeat(), 2, own=True)
    assert [batch.numpy().tolist() for batch in own.take(2)] == [[100, 101], [102, 100]]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (np.arange(64), {"batch_size": -1}, "batch_size (-1): must be"),
        (np.arange(64), {"steps": True}, "steps (True): must be"),
        (np.arange(64), {"remainder": "pad"}, "remainder ('pad'): must be one of drop"),
        (np.arange(64), {"remainder": "uneven", "steps": 3}, "cannot be given with"),
        (np.arange(64), {"shuffle": -1}, "shuffle (-1): must be"),
        ((np.arange(64), np.arange(65)), {"batch_size": 1}, "the same number of rows; they have 64, 65"),
        ((), {"batch_size": 1}, "they have no arrays"),
        (np.arange(0), {"batch_size": 1, "own": True}, "has no elements of its own"),
        (np.arange(0), {"batch_size": 1, "own": True, "steps": 3}, "has no elements of its own"),
        (np.arange(64), {"batch_size": 65, "drop_remainder": True, "own": True}, "must be at most 64"),
        (np.arange(64), {}, "batch_size (None): arrays need one"),
        (np.zeros(64, "M8[s]"), {"batch_size": 2}, "(datetime64[s]): must hold numbers or strings"),
        (np.array(["a", 1] * 32, object), {"batch_size": 2}, "(objects: int): must hold numbers or strings"),
        ([[1, 2], [3]], {"batch_size": 2}, "(list): cannot be made an array"),
        (object(), {"batch_size": 2}, "must be arrays, a tf.data.Dataset, a keras.utils.PyDataset or a generator"),
        (print, {"batch_size": 2}, "call a function that makes one first"),
        (counted(64), {}, "batch_size (None): must be given for a data set of single elements"),
        (counted(64).batch(4).prefetch(1), {"batch_size": 2}, "is batched already; leave batch_size out"),
        (iter([1]), {"batch_size": 2}, "does not go with a generator; its items are batches already"),
        (iter([1]), {"own": True}, "give it to fit as it is, with the same steps_per_epoch"),
        (iter([1]), {"steps": 3}, "give fit steps_per_epoch"),
        (iter([1]), {"remainder": "repeat"}, "a generator cannot be restarted"),
        (Batches(64), {"batch_size": 2}, "does not go with a PyDataset; its items are batches already"),
        (Batches(64), {"shuffle": True}, "fit shuffles its batches in every epoch"),
        (Batches(0), {"own": True}, "has no batches of its own"),
    ],
)
def test_what_breaks_a_rule_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError) as caught:
        hvd.shard(data, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("old", [False, True], ids=["Keras 3", "tf_keras"])
@pytest.mark.parametrize("remainder", ["drop", "repeat", "uneven"])
def test_the_ranks_share_the_batches_of_a_py_dataset(remainder: str, old: bool) -> None:
    size = hvd.size()
    number = 3 * size + size - 1  # one short of even, or even where there is one rank
    part = hvd.shard(old_batches(number) if old else Batches(number), remainder=remainder)
    ranks = hvd.allgather_object([int(part[index][1][0, 0]) for index in range(len(part))])
    total = {"drop": number // size * size, "repeat": -(-number // size) * size, "uneven": number}[remainder]
    assert ranks == [[place % number for place in range(rank, total, size)] for rank in range(size)]
    part.on_epoch_end()
    assert part._data.epochs == 1


class Shuffled(Batches):
    """Batches whose order changes where an epoch begins, late."""

    def __init__(self, number: int, **keywords: Any) -> None:
        super().__init__(number, **keywords)
        self.order = np.arange(number)

    def on_epoch_begin(self) -> None:
        time.sleep(0.05 * hvd.rank() + 0.05)
        self.epochs += 1
        self.order = np.random.default_rng(self.epochs).permutation(self.number)

    def on_epoch_end(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(int(self.order[index]))


class Seen(keras.Model):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.append(int(data[1][0, 0]))
        return {"loss": tf.constant(0.0)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_keeps_its_workers_and_the_order_of_an_epoch_on_all_ranks(workers: int) -> None:
    number = 4 * hvd.size()
    whole = Shuffled(number + hvd.size() - 1, workers=workers, max_queue_size=3)
    part = hvd.shard(whole)
    assert (part.workers, part.use_multiprocessing, part.max_queue_size) == (workers, False, 3)
    model = Seen()
    model.compile(run_eagerly=True)
    model.fit(part, epochs=2, verbose=0, shuffle=False)
    orders = [np.random.default_rng(epoch).permutation(whole.number)[:number] for epoch in (1, 2)]
    assert model.seen == np.concatenate([order[hvd.rank() :: hvd.size()] for order in orders]).tolist()
    assert whole.epochs == 2
    with pytest.raises(InvalidError, match="0 batches cannot be divided among"):
        hvd.shard(Batches(0))


def test_steps_and_batches_of_ones_own_are_evened_out_in_a_py_dataset() -> None:
    rank, size = hvd.rank(), hvd.size()

    def seen(part: Any, number: int) -> list[int]:
        return [int(part[index][1][0, 0]) for index in range(number)]

    steps = hvd.shard(Batches(2 * size), steps=5)
    assert len(steps) == 5
    assert seen(steps, 5) == [rank, rank + size, rank, rank + size, rank]
    for remainder, number in (("drop", 4), ("repeat", 3 + size), ("uneven", 4 + rank)):
        own = hvd.shard(Batches(4 + rank), own=True, remainder=remainder)
        assert seen(own, len(own)) == [index % (4 + rank) for index in range(number)]
    endless = hvd.shard(Batches(None))
    assert endless.num_batches is None
    assert seen(endless, 2) == [rank, rank + size]


def test_each_rank_takes_its_items_of_a_generator_in_equal_numbers() -> None:
    rank, size = hvd.rank(), hvd.size()
    number = 3 * size + size - 1
    even = list(hvd.shard(index for index in range(number)))
    assert even == list(range(rank, number // size * size, size))
    assert list(hvd.shard(iter(range(number)), remainder="uneven")) == list(range(rank, number, size))
    endless = hvd.shard(itertools.count())
    assert [next(endless) for _ in range(2)] == [rank, rank + size]


def test_a_data_set_of_batches_is_divided_by_batches() -> None:
    rank, size = hvd.rank(), hvd.size()
    batched = hvd.shard(counted(6 * size).batch(2).map(lambda batch: batch + 1))
    assert int(batched.cardinality()) == 3
    seen = [batch.numpy().tolist() for batch in batched]
    assert seen == [[101 + 2 * place, 102 + 2 * place] for place in range(rank, 3 * size, size)]


def test_several_inputs_and_weights_are_divided_together() -> None:
    x = np.arange(4 * hvd.size())
    (batch,) = hvd.shard(([x, x * 2], {"y": list(map(int, x * 3))}, x * 4), 4)
    (first, second), y, weights = batch
    assert first.numpy().tolist() == x[hvd.rank() :: hvd.size()].tolist()
    for part, factor in ((second, 2), (y["y"], 3), (weights, 4)):
        np.testing.assert_array_equal(part, first.numpy() * factor)
    assert len(next(iter(hvd.shard((x, x, None), 2)))) == 2  # as fit takes it: no weights


@pytest.mark.parametrize(("own", "shuffle"), [(False, False), (True, True)])
def test_rows_of_ragged_and_sparse_data_are_divided(own: bool, shuffle: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    numbers = np.arange(5 * size)
    dense = np.where(np.arange(3) == numbers[:, None] % 4, numbers[:, None] + 1.0, 0.0)  # some rows have no entries
    ragged = [list(range(number % 3)) for number in numbers]
    data = {
        "number": numbers,
        "ragged": tf.ragged.constant(ragged, tf.int64),
        "sparse": tf.sparse.from_dense(dense),
        "matrix": scipy.sparse.csc_matrix(dense),  # in the order of its columns
        "array": scipy.sparse.csr_array(dense),
    }
    seen: list[int] = []
    for batch in hvd.shard(data, 2, shuffle=shuffle, own=own):
        rows = batch["number"].numpy().tolist()
        assert batch["ragged"].to_list() == [ragged[row] for row in rows]
        for name in ("sparse", "matrix", "array"):
            np.testing.assert_array_equal(tf.sparse.to_dense(batch[name]), dense[rows])
        seen += rows
    assert sorted(seen) == numbers[slice(None) if own else slice(rank, None, size)].tolist()
    with pytest.raises(InvalidError, match=r"SparseTensor\): must have two dimensions or more; it has 1"):
        hvd.shard(tf.sparse.from_dense(numbers), 2)


def test_fewer_elements_than_ranks_are_refused_unless_they_may_be_uneven() -> None:
    few = np.arange(hvd.size() - 1)
    with pytest.raises(InvalidError, match="cannot be divided among"):
        hvd.shard(few, 1)
    uneven = hvd.shard(few, 1, remainder="uneven")
    assert [batch.numpy().tolist() for batch in uneven] == ([[hvd.rank()]] if hvd.rank() < len(few) else [])


def test_ranks_with_other_data_or_settings_are_told_so() -> None:
    if hvd.size() == 1:
        assert int(hvd.shard(np.arange(5), 5).cardinality()) == 1
        return
    odd = hvd.rank() == hvd.size() - 1
    with pytest.raises(MismatchError, match=f"the number of elements .*rank {hvd.size() - 1} has 65"):
        hvd.shard(np.arange(65 if odd else 64), 2)
    with pytest.raises(MismatchError, match=f"batch_size .*rank {hvd.size() - 1} has 3"):
        hvd.shard(np.arange(64), 3 if odd else 2)
