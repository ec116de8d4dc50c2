"""The tables of the suite's time."""

from __future__ import annotations

import json

from tests import timing


def row(kind="test", name="tests/a.py", ranks=2, rank=0, count=1, wall_s=1.0, cpu_s=1.0):
    return {"kind": kind, "name": name, "ranks": ranks, "rank": rank, "count": count, "wall_s": wall_s, "cpu_s": cpu_s}


def test_the_wall_clock_is_that_of_rank_0_and_the_processor_that_of_all_ranks():
    rows = [row(wall_s=3.0, cpu_s=2.0), row(rank=1, wall_s=2.5, cpu_s=1.5), row(ranks=3, wall_s=4.0)]
    assert [(line["ranks"], line["wall_s"], line["cpu_s"], line["count"]) for line in timing.summed(rows)] == [
        (3, 4.0, 1.0, 1),
        (2, 3.0, 3.5, 2),
    ]


def test_the_report_says_by_how_much_a_file_has_grown_since_the_recorded_run():
    now = timing.summed([row(wall_s=3.0), row(name="tests/b.py", wall_s=2.0)])
    lines = timing.tables(now, timing.summed([row(wall_s=2.0)]))
    assert [line.split()[-1] for line in lines if line.startswith("tests/")] == ["+50%", "new"]


def test_the_rows_of_a_process_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_rows", type(timing._rows)(lambda: [0, 0.0, 0.0]))
    monkeypatch.setenv(timing.FOLDER, str(tmp_path))
    with timing.measured("trace", "outer"), timing.measured("trace", "inner"):
        pass
    timing.write()
    timing.write()
    (line,) = timing.read(tmp_path)
    assert line["name"] == "outer" and line["count"] == 1
    assert json.loads(next(tmp_path.iterdir()).read_text()) == line
