"""shard: every rank its part, all ranks equally many steps, and what cannot be even is refused or told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, MismatchError

RANK_BATCH = 3


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
    dataset = hvd.shard(tf.data.Dataset.from_generator(elements, output_signature=signature))
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


def test_a_last_smaller_batch_may_be_left_out() -> None:
    x = np.arange(5 * hvd.size())
    assert [len(batch) for batch in hvd.shard(x, 3)] == [3, 2]
    assert [len(batch) for batch in hvd.shard(x, 3, drop_remainder=True)] == [3]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (np.arange(64), {"batch_size": 0}, "batch_size (0): must be"),
        (np.arange(64), {"steps": True}, "steps (True): must be"),
        (np.arange(64), {"remainder": "pad"}, "remainder ('pad'): must be one of drop"),
        (np.arange(64), {"remainder": "uneven", "steps": 3}, "cannot be given with"),
        (np.arange(64), {"shuffle": -1}, "shuffle (-1): must be"),
        ((np.arange(64), np.arange(65)), {}, "the same number of rows; they have 64, 65"),
        ((), {}, "they have no arrays"),
        (np.arange(0), {"own": True}, "has no elements of its own"),
        (np.arange(64), {"batch_size": 65, "drop_remainder": True, "own": True}, "must be at most 64"),
    ],
)
def test_what_breaks_a_rule_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError) as caught:
        hvd.shard(data, **options)
    assert message in str(caught.value)


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
