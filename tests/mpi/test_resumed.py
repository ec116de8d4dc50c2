"""What waits with TopK when a job ends and the next has as many ranks or another number."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hvd_ext.state import arrays, folder, manifest
from tests.mpi import jobs
from tests.ranks.topk_jobs import gradients
from tests.ranks.training import model, values

PROGRAM = Path(__file__).with_name("resumed.py")
OWNER = "state:top-k: optimizer 0, variables 0"
# whether TopK has taken a momentum over, and whether gradients are averaged; of tests/mpi/resumed.py
CASES = {"plain": (False, True), "momentum": (True, True), "sum": (False, False)}
UNTIL = ("until, later", "until, past")
# elements of the weights of the model in tests/ranks/training.py; biases are sent whole, and nothing of them waits
ELEMENTS = (30, 5, 10, 2)
KERNELS = (0, 2)


def run(of: Path, ranks: int, *names: str) -> None:
    """Has a job go on in these folders."""
    own = of / f"job of {ranks} for {' and '.join(names)}"
    own.mkdir()
    jobs.run(own, [str(PROGRAM), *(str(of / name) for name in names)], ranks=ranks).must_succeed()


def saved(directory: Path, serial: int) -> list[dict[str, np.ndarray]]:
    """Reads what waited on each rank when a checkpoint was saved."""
    path = folder.path_of(directory, serial)
    found = []
    for rank in range(manifest.read(path).ranks):
        with (path / manifest.rank_file(rank)).open("rb") as file:
            found.append(arrays.read(file)[OWNER])
    return found


def sums(states: list[dict[str, np.ndarray]]) -> dict[tuple[str, int], np.ndarray]:
    """Adds up over the ranks what waits, by kind and tensor."""
    totals: dict[tuple[str, int], np.ndarray] = {}
    for state in states:
        for key, array in state.items():
            if "/" in key:
                which, tensor, offset, _ = key.split("/", 3)
                total = totals.setdefault((which, int(tensor)), np.zeros(ELEMENTS[int(tensor)]))
                total[int(offset) : int(offset) + array.size] += array
    return totals


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of jobs: "first" of 2 ranks; "2" and "4" went on from it on so many, "2 to 1" and "4 to 1" on one."""
    path = tmp_path_factory.mktemp("resumed")
    run(path, 2, "first")
    for ranks in (2, 4):
        handed_on(path, "first", 1, str(ranks))
        run(path, ranks, str(ranks))
    handed_on(path, "first", 1, "2 to 1")
    handed_on(path, "4", 2, "4 to 1")
    run(path, 1, "2 to 1", "4 to 1")
    return path


def handed_on(of: Path, name: str, serial: int, to: str) -> None:
    """Gives a checkpoint of a job to another one, alone."""
    for case in (*CASES, *UNTIL):
        shutil.copytree(folder.path_of(of / name / case, serial), folder.path_of(of / to / case, serial))


@pytest.mark.parametrize("case", CASES)
def test_on_as_many_ranks_training_goes_on_as_if_it_had_not_been_interrupted(of: Path, case: str) -> None:
    for before, after in zip(saved(of / "first" / case, 1), saved(of / "2" / case, 2), strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)
    whole, resumed = (list(np.load(of / name / f"{case}.npz").values()) for name in ("first", "2"))
    for expected, got in zip(whole, resumed, strict=True):
        assert np.any(expected)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("before", "serial", "after", "factor"),
    [("first", 1, "4", 2.0), ("first", 1, "2 to 1", 0.5), ("4", 2, "4 to 1", 0.25)],
    ids=["2 to 4", "2 to 1", "4 to 1"],
)
def test_on_another_number_of_ranks_the_update_that_waits_is_the_same(
    of: Path, before: str, serial: int, after: str, factor: float, case: str
) -> None:
    momentum, averaged = CASES[case]
    old, new = saved(of / before / case, serial), saved(of / after / case, serial + 1)
    assert len(new) / len(old) == factor
    waited, waits = sums(old), sums(new)
    full = {("residual", tensor) for tensor in KERNELS}
    full |= {("velocity", tensor) for tensor in range(len(ELEMENTS)) if momentum}
    assert waited.keys() == waits.keys() >= full
    for key, total in waited.items():
        assert (np.count_nonzero(total) > total.size // 2) == (key in full)
        np.testing.assert_array_equal(waits[key], total * (factor if averaged else 1))
    assert {int(state["steps"]) for state in new} == {3}
    last, weights = (np.load(of / name / f"{case}.npz").values() for name in (before, after))
    assert all(np.all(np.isfinite(one)) and np.any(one) for one in weights)
    assert not all(np.array_equal(*pair) for pair in zip(last, weights, strict=True))


@pytest.mark.parametrize("case", UNTIL)
@pytest.mark.parametrize("name", ["first", "2", "4", "2 to 1", "4 to 1"])
def test_whatever_the_ranks_before_and_after_the_switch_to_whole_gradients_no_gradient_is_lost(
    of: Path, name: str, case: str
) -> None:
    weights = values(model().trainable_weights)
    slots = [np.zeros_like(weight) for weight in weights]
    for step in range(5):
        every = [gradients(rank, step, [weight.shape for weight in weights]) for rank in range(4)]
        for place, parts in enumerate(zip(*every, strict=True)):
            slots[place] = np.float32(0.5) * slots[place] - np.float32(0.125) * sum(parts) / np.float32(4)
            weights[place] += slots[place]
    for got, expected in zip(np.load(of / name / f"{case}.npz").values(), [*weights, *slots], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_four_ranks_of_two_hosts_keep_other_parts_than_two_ranks_do(of: Path) -> None:
    places = [
        [{(*key.split("/")[:3], array.size) for key, array in state.items() if "/" in key} for state in states]
        for states in (saved(of / "first" / "plain", 1), saved(of / "4" / "plain", 2))
    ]
    assert places[0] == [{("residual", "0", "0", 30), ("residual", "2", "0", 10)}] * 2
    assert len({frozenset(one) for one in places[1]}) == 4
