"""What a job tells its parent through a file."""

from __future__ import annotations

from pathlib import Path

from hvd_ext.bench.sampling import Follower, emit


def test_events_arrive_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower = Follower(path)
    assert follower.new() == []
    emit(path, "epoch", epoch=1, loss=0.5)
    emit(path, "epoch", epoch=2, loss=0.25)
    assert [event["epoch"] for event in follower.new()] == [1, 2]
    assert follower.new() == []
    emit(path, "end")
    assert follower.new() == [{"kind": "end"}]


def test_a_line_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower = Follower(path)
    path.write_text('{"kind": "start"}\n{"kind": "ep')
    assert follower.new() == [{"kind": "start"}]
    with path.open("a") as file:
        file.write('och"}\n')
    assert follower.new() == [{"kind": "epoch"}]


def test_nobody_is_told_where_there_is_no_file() -> None:
    emit(None, "end")
