"""The optimal bucketer equals brute force, and beats the paper's greedy rule on the smallest counterexample."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hvd_ext.errors import PlanError
from hvd_ext.planning import buckets
from hvd_ext.planning.buckets import Request
from hvd_ext.planning.buckets.mgwfbp import fitted, merged_gradient_layers
from hvd_ext.planning.buckets.optimal import Line, best, joined, latest_s
from hvd_ext.planning.cost.lane import Parts, Table, line, table
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import Link

INSTANCES = 500


def random_price(rng: np.random.Generator, most: int, tails: bool) -> Table:
    """Steps and slopes that never fall, in no other way alike."""
    steps = rng.random(most + 1) * (rng.random(most + 1) < 0.4)
    hold_s = np.cumsum(steps * rng.choice([0.1, 1.0, 3.0])) + rng.choice([0.0, 2.0]) * rng.random()
    tail_s = np.cumsum(rng.random(most + 1) * (rng.random(most + 1) < 0.2)) * (rng.random() if tails else 0.0)
    return Table(np.arange(most + 1, dtype=np.float64), hold_s, hold_s + tail_s)


def random_lines(rng: np.random.Generator, counts: tuple[int, ...], tails: bool) -> list[Line]:
    total = sum(counts)
    ready_s = np.sort(rng.random(total) * rng.choice([1.0, 10.0, 30.0]))
    places = rng.permutation(total)
    lines, done = [], 0
    for count in counts:
        own = np.sort(places[done : done + count])
        sizes = rng.integers(0, 6, count).astype(np.float64)
        lines.append(Line(own, ready_s[own], sizes, random_price(rng, max(int(sizes.sum()), 1), tails)))
        done += count
    return lines


def brute_force_s(lines: list[Line]) -> float:
    """Tries all ways at once: bit k of a way's number says whether a bucket ends after the k-th tensor of its class."""
    ways = 1 << sum(len(one.places) - 1 for one in lines)
    numbers, bit = np.arange(ways), 0
    steps: list[tuple[int, int, int, NDArray[np.bool_]]] = []
    for which, one in enumerate(lines):
        for index, place in enumerate(one.places.tolist()):
            last = index + 1 == len(one.places)
            ends = np.full(ways, True) if last else (numbers >> bit) & 1 == 1
            bit += not last
            steps.append((place, which, index, ends))
    free_s, latest = np.zeros(ways), np.zeros(ways)
    held = [np.zeros(ways) for _ in lines]
    for _, which, index, ends in sorted(steps, key=lambda step: step[0]):
        held[which] += lines[which].nbytes[index]
        hold_s, tail_s = lines[which].price.parts_s(held[which][ends])
        free_s[ends] = np.maximum(free_s[ends], lines[which].ready_s[index]) + hold_s
        latest[ends] = np.maximum(latest[ends], free_s[ends] + tail_s)
        held[which][ends] = 0.0
    return float(latest.min())


@pytest.mark.parametrize("counts", [(12,), (8, 4)])
@pytest.mark.parametrize("tails", [False, True])
def test_it_equals_brute_force(counts: tuple[int, ...], tails: bool) -> None:
    rng = np.random.default_rng(7)
    for _ in range(INSTANCES):
        lines = random_lines(rng, counts, tails)
        found = best(lines)
        expected = brute_force_s(lines)
        assert latest_s(found, lines) == pytest.approx(expected, rel=1e-12)
        fewer = joined(found, lines)
        assert latest_s(fewer, lines) <= latest_s(found, lines)
        assert len(fewer) <= len(found)
        for number, one in enumerate(lines):
            runs = [(begin, end) for which, begin, end in fewer if which == number]
            assert [index for run in runs for index in range(*run)] == list(range(len(one.places)))


@pytest.mark.parametrize(("name", "made", "end_s"), [("mgwfbp", [(2, 1), (0,)], 9.0), ("optimal", [(2,), (1, 0)], 8.0)])
def test_theorem_1_of_mgwfbp_is_not_optimal(name: str, made: list[tuple[int, ...]], end_s: float) -> None:
    """Backward times (1, 1, 2), sizes (1, 1, 1), a = 2, b = 1 for each tensor of four bytes."""
    tensors = [Tensor(name, (1,), "float32") for name in ("first", "middle", "last")]
    ready_s, price = [4.0, 2.0, 1.0], line(2.0, 0.25)
    plan = buckets.plan(Request(tensors, ready_s=ready_s, price=lambda kind: price), name)
    assert [bucket.tensors for bucket in plan] == made
    free_s = 0.0
    for bucket in plan:
        free_s = max(free_s, max(ready_s[index] for index in bucket.tensors)) + 2.0 + bucket.nbytes * 0.25
    assert free_s == end_s


def test_algorithm_1_merges_where_the_next_gradient_is_ready_within_a_start_up() -> None:
    slope = Link(2.0, 1.0)
    assert merged_gradient_layers([], [], slope) == []
    assert merged_gradient_layers([0.0, 1.0, 2.0], [1, 1, 1], slope) == [True, True, False]
    assert merged_gradient_layers([0.0, 2.0, 4.0], [1, 1, 1], slope) == [False, True, False]
    assert merged_gradient_layers([0.0, 1.0], [1, 1], Link(1.0, 1.0)) == [False, False]


def test_the_line_is_fitted_to_hold_and_tail() -> None:
    found = fitted(line(2.0, 3.0), 1000)
    assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(2.0), pytest.approx(3.0))
    both = fitted(table([(0.0, Parts(1.0, 1.0)), (100.0, Parts(201.0, 101.0))]), 100)
    assert (both.alpha_s, both.beta_s_per_byte) == (pytest.approx(2.0), pytest.approx(3.0))
    flat = fitted(table([(0.0, Parts(1.0, 0.0)), (10.0, Parts(100.0, 0.0)), (100.0, Parts(100.0, 0.0))]), 100)
    assert flat.alpha_s >= 0
    assert flat.beta_s_per_byte >= 0


def test_it_says_what_it_lacks() -> None:
    tensors = [Tensor(dtype, (1,), dtype) for dtype in ("float32", "float16", "float64")]
    price = line(1.0, 1.0)
    with pytest.raises(PlanError, match="it needs the times at which tensors are ready"):
        buckets.plan(Request(tensors[:2]), "optimal")
    with pytest.raises(PlanError, match="it takes tensors of 2 classes .* and here are 3"):
        buckets.plan(Request(tensors, ready_s=[0.0] * 3, price=lambda kind: price), "optimal")
    with pytest.raises(PlanError, match="it does not support groups"):
        buckets.plan(Request(tensors[:1], groups=1, ready_s=[0.0], price=lambda kind: price), "mgwfbp")
    assert buckets.plan(Request([], ready_s=[], price=lambda kind: price), "optimal") == ()
