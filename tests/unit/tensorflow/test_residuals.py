"""What waits on the ranks, by tensor and place: shares of buckets become pieces of tensors, and other shares again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_ext import state
from hvd_ext.errors import InvalidError
from hvd_ext.planning import buckets as bucketers
from hvd_ext.planning.layout import Selection
from hvd_ext.planning.tensors import Tensor
from hvd_ext.tensorflow.topk import residuals
from hvd_ext.topology.tree import Link, Node, Tree, leaf

SIZES = (10, 4, 7)


class Engine:
    """Keeps shares of buckets as the engine does: the first element, how many, and whether there is a velocity."""

    def __init__(self, *shares: tuple[int, int, bool]) -> None:
        self.shares = shares
        places = itertools.product(enumerate(shares), (0, 1))
        self.memory = {(bucket, which): np.zeros(share[1], np.float32) for (bucket, share), which in places}

    def state(self, channel: int, bucket: int) -> tuple[int, int, bool]:
        return self.shares[bucket]

    def read_state(self, channel: int, bucket: int, which: int, out: np.ndarray) -> None:
        out[:] = self.memory[bucket, which]

    def write_state(self, channel: int, bucket: int, which: int, values: np.ndarray) -> None:
        self.memory[bucket, which][:] = values


def channel(*buckets: tuple[int, ...], whole: tuple[int, ...] = ()) -> Any:
    tensors = [Tensor(f"layer/v{index}", (size,), "float32") for index, size in enumerate(SIZES)]
    selections = [None if index in whole else Selection() for index in range(len(buckets))]
    laid_out = [SimpleNamespace(tensors=places, selection=one) for places, one in zip(buckets, selections, strict=True)]
    return SimpleNamespace(layout=SimpleNamespace(tensors=tensors, buckets=laid_out), handle=0)


def test_a_share_is_cut_at_the_borders_of_its_tensors() -> None:
    found = residuals.pieces(channel((2, 0), (1,), whole=(1,)), Engine((3, 9, True)))
    assert [(piece.key, piece.count, piece.place) for piece in found] == [
        ("residual/2/3/layer/v2", 4, 0),
        ("velocity/2/3/layer/v2", 4, 0),
        ("residual/0/0/layer/v0", 5, 4),
        ("velocity/0/0/layer/v0", 5, 4),
    ]
    assert residuals.pieces(channel((0,)), Engine((5, 0, False))) == []


def test_what_is_read_is_what_was_written() -> None:
    one = channel((2, 0), (1,))
    engine = Engine((3, 9, True), (0, 4, False))
    for number, memory in enumerate(engine.memory.values()):
        memory[:] = np.arange(memory.size) + 100 * number
    before = {key: memory.copy() for key, memory in engine.memory.items() if key != (1, 1)}
    saved = residuals.read(one, engine)
    residuals.write(one, engine, {})
    assert not any(np.any(engine.memory[key]) for key in before)
    residuals.write(one, engine, saved)
    assert all(np.array_equal(engine.memory[key], memory) for key, memory in before.items())


@pytest.mark.parametrize("velocities", [(False, False), (True, True), (True, False), (False, True)])
def test_sums_over_hosts_of_any_shape_go_to_one_rank_each_and_none_is_lost(velocities: tuple[bool, bool]) -> None:
    # three ranks on hosts of two and one, then two ranks on one host, in other buckets
    had, has = velocities
    shares = (((0, 8), (0, 7)), ((8, 6), (0, 0)), ((0, 14), (0, 7)))
    old = [Engine(*((*share, had) for share in of_rank)) for of_rank in shares]
    before = channel((0, 1), (2,))
    for rank, engine in enumerate(old):
        for (_, which), memory in engine.memory.items():
            memory[:] = np.arange(memory.size) + 10 * rank + 1000 * which + 1
    states = [residuals.read(before, engine) for engine in old]
    total = summed(states)
    after = channel((2, 1, 0))
    # both new ranks keep the elements 5 to 11: the first gets them
    new = [Engine((0, 12, has)), Engine((5, 16, has))]
    wanted = [[piece.where for piece in residuals.pieces(after, engine)] for engine in new]
    for rank, engine in enumerate(new):
        arrays = residuals.regrouped(residuals.pieces(after, engine), residuals.claims(wanted, rank), iter(states), 0.5)
        residuals.write(after, engine, arrays)
    seen = summed([residuals.read(after, engine) for engine in new])
    # a velocity that the earlier job had not begins at 0, and one that the new job has not is left out
    kept = {residuals.RESIDUAL: True, residuals.VELOCITY: had and has}
    for (which, tensor), got in seen.items():
        np.testing.assert_array_equal(got, total[which, tensor] / 2 if kept[which] else 0)
    for which in (0, 1) if had and has else (0,):
        assert np.any(new[0].memory[0, which][5:12])
        assert not np.any(new[1].memory[0, which][:7])


def summed(states: list[residuals.Arrays]) -> dict[tuple[str, int], np.ndarray]:
    """Adds up what ranks keep, by which and tensor."""
    places = itertools.product((residuals.RESIDUAL, residuals.VELOCITY), enumerate(SIZES))
    total = {(which, tensor): np.zeros(size) for which, (tensor, size) in places}
    for state_of_one in states:
        for key, array in state_of_one.items():
            piece = residuals.parsed(key, array)
            total[piece.which, piece.tensor][piece.offset : piece.offset + piece.count] += array
    return total


def test_the_first_to_keep_a_residual_claims_no_velocity() -> None:
    wanted = [[("residual", 0, 0, 6)], [("residual", 0, 4, 4), ("velocity", 0, 4, 4)], [("velocity", 0, 2, 4)]]
    masks = [[mask.tolist() for mask in residuals.claims(wanted, rank)] for rank in range(3)]
    assert masks == [[[True] * 6], [[False, False, True, True], [True] * 4], [[True, True, False, False]]]


def test_an_owner_for_any_number_of_ranks_gets_its_own_and_everyones() -> None:
    got: list[Any] = []

    def load_all(own: Any, everyone: Any) -> None:
        got.append((own, list(everyone())))

    saved = {"a": np.ones(1)}
    state.register("topk here", lambda: saved, load_all=load_all)
    try:
        assert state.restore({"topk here": saved}, {"topk here": lambda: iter([saved, saved])}) == ()
        assert state.restore({}, {"topk here": lambda: iter([saved]), "plain": lambda: iter([saved])}) == ("plain",)
        assert [(own is None, len(everyone)) for own, everyone in got] == [(False, 2), (True, 1)]
        state.restore({}, {"topk late": lambda: iter([saved])})
        state.register("topk late", lambda: saved, load_all=load_all)
        assert got[-1] == (None, [saved])
        for loads in ({"load": print, "load_all": load_all}, {}):
            with pytest.raises(InvalidError, match="save, and either load or load_all, must be functions"):
                state.register("both or none", lambda: saved, **loads)
    finally:
        state.unregister("topk here")
        state.unregister("topk late")
        state.forget_unclaimed()


def test_tensors_of_two_kinds_never_share_a_bucket() -> None:
    tensors = [Tensor(f"t{index}", (10,), "float32") for index in range(6)]
    for groups in ([], 1, 2, [[0, 1, 2], [5]]):
        request = bucketers.Request(tensors, 80, groups, frozenset({0, 2, 5}))
        buckets = bucketers.plan(request, "by_groups")
        assert sorted(index for bucket in buckets for index in bucket.tensors) == list(range(6))
        assert all(len({index in {0, 2, 5} for index in bucket.tensors}) == 1 for bucket in buckets)
        assert all(bucket.nbytes == 40 * len(bucket.tensors) for bucket in buckets)
        firsts = [min(bucket.tensors) for bucket in buckets]
        assert firsts == sorted(firsts, reverse=True)
    request = bucketers.Request(tensors, 80, [[0, 1, 2], [5]], frozenset({0, 2, 5}))
    grouped = bucketers.plan(request, "by_groups")
    assert [bucket.tensors for bucket in grouped] == [(5,), (4, 3), (1,), (2, 0)]


def runs(random: np.random.Generator, owners: int) -> list[list[residuals.Where]]:
    """Cut the elements of all tensors, as residuals and velocities, into runs that some ranks keep, each once."""
    found: list[list[residuals.Where]] = [[] for _ in range(owners)]
    for which in (residuals.RESIDUAL, residuals.VELOCITY):
        for tensor, size in enumerate(SIZES):
            cuts = sorted({0, size, *random.integers(0, size + 1, 3).tolist()})
            for low, high in itertools.pairwise(cuts):
                found[random.integers(owners)].append((which, tensor, low, high - low))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_each_element_comes_from_one_rank_of_the_host_and_from_the_rank_itself_if_it_can(seed: int) -> None:
    random = np.random.default_rng(seed)
    host = (1, 2, 4)
    before, after = runs(random, len(host)), runs(random, len(host))
    kept: list[list[residuals.Where]] = [[("residual", 0, 0, SIZES[0])] for _ in range(6)]  # other hosts have it too
    for rank, own in zip(host, before, strict=True):
        kept[rank] = own
    elements = {
        (which, t, i) for which in ("residual", "velocity") for t, size in enumerate(SIZES) for i in range(size)
    }
    got = []
    for rank, wanted in zip(host, after, strict=True):
        found = residuals.sources(kept, wanted, [rank, *(other for other in host if other != rank)])
        assert [sender for sender, _ in found] == sorted(sender for sender, _ in found)
        mine = {(which, t, i) for which, t, low, count in wanted for i in range(low, low + count)}
        seen = [(which, t, i) for _, (which, t, low, count) in found for i in range(low, low + count)]
        assert sorted(seen) == sorted(mine)
        own = {(which, t, i) for which, t, low, count in kept[rank] for i in range(low, low + count)}
        assert sum(where[3] for sender, where in found if sender == rank) == len(mine & own)
        got += seen
    assert sorted(got) == sorted(elements)


def test_what_no_rank_of_the_host_has_comes_from_nobody() -> None:
    kept = [[("residual", 0, 0, 3)], [("residual", 0, 0, 9)]]
    wanted = [("residual", 0, 1, 5), ("velocity", 0, 0, 2)]
    assert residuals.sources(kept, wanted, (0,)) == [(0, ("residual", 0, 1, 2))]


def test_within_a_rack_elements_come_from_the_rack_and_nearer_ranks_go_first() -> None:
    link = Link(1e-6, 1e-9)
    hosts = [Node(f"host{h}", link, (leaf(2 * h), leaf(2 * h + 1))) for h in range(4)]
    racks = (Node("rack0", link, tuple(hosts[:2])), Node("rack1", link, tuple(hosts[2:])))
    tree = Tree(Node("cluster", link, racks))
    assert residuals.nearest(tree, 2) == [2, 3, 0, 1, 4, 5, 6, 7]
    random = np.random.default_rng(3)
    kept, wanted = [[*runs(random, 4), *runs(random, 4)] for _ in range(2)]  # each rack keeps all elements once
    for rank in range(8):
        found = residuals.sources(kept, wanted[rank], residuals.nearest(tree, rank))
        assert sum(where[3] for _, where in found) == sum(where[3] for where in wanted[rank])
        assert {sender // 4 for sender, _ in found} <= {rank // 4}
