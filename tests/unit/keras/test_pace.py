"""How often ranks exchange something in `fit`."""

from __future__ import annotations

import pytest

from hvd_ext.keras import pace


def test_exchanges_are_a_time_apart_however_long_batches_and_epochs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now_s)
    counted = pace.Pace()
    apart: list[float] = []
    for batch_s in (0.001, 0.01, 0.4):
        before_s = None
        for _ in range(1000):
            now_s += batch_s
            counted.count()
            if counted.is_due:
                if before_s is not None:
                    apart.append(now_s - before_s)
                before_s = now_s
                counted.agree(counted.seconds())
        assert apart[-1] == pytest.approx(max(batch_s, pace.ASK_S), rel=0.1)


def test_the_first_exchange_follows_the_first_batch() -> None:
    counted = pace.Pace()
    assert not counted.is_due
    counted.count()
    assert counted.is_due
    counted.agree(pace.ASK_S / 7.5)
    for _ in range(6):
        counted.count()
    assert not counted.is_due
    counted.count()
    assert counted.is_due
    counted.restart()
    assert not counted.is_due
