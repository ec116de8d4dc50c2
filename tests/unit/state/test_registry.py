"""State that ranks keep for themselves: who has some, what becomes of it, and what belongs to nobody."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from hvd_ext import state
from hvd_ext.errors import InvalidError


class Residuals:
    """Something that has state."""

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values)

    def save(self) -> dict[str, np.ndarray]:
        """Give a copy."""
        return {"values": self.values.copy()}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Take what was saved."""
        self.values = arrays["values"]


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """No owner of another test is there, and none stays."""
    before = dict(state._owners)
    state._owners.clear()
    state.forget_unclaimed()
    yield
    state._owners.clear()
    state._owners.update(before)
    state.forget_unclaimed()


def test_what_is_collected_comes_back_to_its_owner() -> None:
    first, second = Residuals([1, 2]), Residuals([3])
    state.register("first", first.save, first.load)
    state.register("second", second.save, second.load)
    collected = state.collect()
    first.values[:], second.values[:] = 0, 0
    assert state.restore(collected) == ()
    assert first.values.tolist() == [1, 2]
    assert second.values.tolist() == [3]
    assert state.unclaimed() == {}


def test_an_owner_that_comes_after_the_last_restore_gets_its_state_when_it_registers() -> None:
    state.restore({"old": {"values": np.zeros(1)}})
    saved = {"late": {"values": np.array([5.0])}, "gone": {"a": np.zeros(1), "b": np.zeros(2)}}
    assert state.restore(saved) == ("late", "gone")
    late = Residuals([0])
    state.register("late", late.save, late.load)
    assert late.values.tolist() == [5]
    assert state.unclaimed() == {"gone": ("a", "b")}
    state.forget_unclaimed()
    assert state.unclaimed() == {}


def test_an_object_that_is_gone_has_no_state_and_leaves_its_key_free() -> None:
    gone, stays = Residuals([1]), Residuals([2])
    state.register("residuals", gone.save, gone.load)
    state.register("others", stays.save, stays.load)
    del gone
    gc.collect()
    assert set(state.collect()) == {"others"}
    state.register("residuals", stays.save, stays.load)
    assert set(state.collect()) == {"others", "residuals"}


def test_an_owner_can_be_taken_out_and_functions_stay_without_anybody_holding_them() -> None:
    state.register("reader", lambda: {"place": np.array(7)}, lambda arrays: None)
    gc.collect()
    assert state.collect()["reader"]["place"] == 7
    for _ in range(2):
        state.unregister("reader")
    assert state.collect() == {}
    assert state.restore({"reader": {"place": np.array(7)}}) == ("reader",)


@pytest.mark.parametrize(
    ("key", "save", "words"),
    [
        ("", dict, "must be a text that is not empty"),
        (3, dict, "must be a text that is not empty"),
        ("x", None, "save, and either load or load_all, must be functions"),
        ("taken", dict, "is registered already; use another, or `unregister` the first"),
    ],
)
def test_what_cannot_be_registered_is_refused(key: object, save: object, words: str) -> None:
    state.register("taken", dict, print)
    with pytest.raises(InvalidError, match=words):
        state.register(key, save, print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ([1], "must give a dictionary of arrays; it gave list"),
        ({"x": object()}, "'x': must be an array of numbers"),
        ({1: np.zeros(1)}, "1: must be an array of numbers"),
    ],
)
def test_an_owner_that_gives_something_else_is_named(saved: object, words: str) -> None:
    state.register("odd", lambda: saved, print)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidError, match=f"state of 'odd'.*{words}"):
        state.collect()
