"""What makes steps of ranks differ, and what modes gain by it."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.simulation.skew import KINDS, Skew, gains, rules_of


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_read_from_its_own_example(name: str) -> None:
    skew = Skew.read(KINDS[name].rsplit(": ", 1)[0])
    assert skew.kind == name
    found = skew.seconds(len(skew.times_s) if name == "ranks" else 8, 5000)
    assert found.shape[1] == 5000
    assert (found >= 0).all()


def test_times_are_those_that_were_asked_for() -> None:
    one = Skew.read("one:200ms").seconds(8, 1000)
    assert ((one > 0).sum(0) == 1).all()
    assert set(np.unique(one)) == {0, 0.2}
    uniform = Skew.read("uniform: 50ms, .4s").seconds(8, 1000)
    assert 0.05 <= uniform.min() < 0.052
    assert 0.398 < uniform.max() <= 0.4
    shifting = Skew.read("shifting:50ms,400ms").seconds(8, 20)
    np.testing.assert_allclose(np.sort(shifting, 0)[:, 3], np.linspace(0.05, 0.4, 8))
    np.testing.assert_array_equal(shifting[1, :-1], shifting[0, 1:])
    tailed = Skew.read("lognormal:55ms,116ms").seconds(8, 100_000)
    assert tailed.mean() == pytest.approx(0.055, rel=0.05)
    assert tailed.std() == pytest.approx(0.116, rel=0.2)
    np.testing.assert_array_equal(Skew.read("ranks:0ms,250us").seconds(2, 3), [[0] * 3, [0.00025] * 3])
    np.testing.assert_array_equal(
        Skew.read("uniform:0s,1s").seconds(4, 9, 1), Skew.read("uniform:0s,1s").seconds(4, 9, 1)
    )


@pytest.mark.parametrize(
    "text", ["", "some:1ms", "one", "one:1", "one:1ms,2ms", "uniform:1ms", "uniform:2ms,1ms", "lognormal:0ms,1ms"]
)
def test_wrong_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=rf"skew '{text}': "):
        Skew.read(text)


@pytest.mark.parametrize("mode", ["some", "quorum", "quorum:0", "quorum:9", "quorum:x", "solo:1"])
def test_wrong_modes_are_refused(mode: str) -> None:
    with pytest.raises(InvalidError, match=f"sync '{mode}': "):
        rules_of(mode, 4, 8)
    with pytest.raises(InvalidError, match="skew of 2 ranks: must have a time for each of 3"):
        Skew.read("ranks:0ms,1ms").seconds(3, 1)


def test_gains_are_those_of_the_rounds() -> None:
    modes = ["full", "delay", "majority", "quorum:7", "solo"]
    found = {gain.mode: gain for gain in gains(8, 0.05, 0.0, 0.01, Skew.read("one:200ms"), modes)}
    full = found["full"]
    assert (full.speedup, full.active, full.staleness) == (1, 8, (1.0,))
    assert (full.step_s, full.waited_s) == (pytest.approx(0.25), pytest.approx(0.175))
    assert (found["delay"].active, found["delay"].mean_staleness) == (0, 1)
    assert found["quorum:7"].active >= 7
    assert 1 < found["majority"].speedup < found["solo"].speedup
    assert all(sum(gain.staleness) == pytest.approx(1) for gain in found.values())


def test_without_skew_waiting_is_as_fast_and_hides_more() -> None:
    found = {gain.mode: gain for gain in gains(4, 0.05, 0.0, 0.03, Skew.read("one:0ms"), ["full", "solo", "delay"])}
    assert found["solo"].speedup == pytest.approx(0.05 / 0.08)
    assert found["delay"].speedup == pytest.approx(1)
