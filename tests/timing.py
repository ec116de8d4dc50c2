"""Where the suite's time goes: seconds by file, by number of ranks, by fixture and by kind of work.

Every process of the suite writes rows to its own file in the folder HVD_EXT_TEST_TIMES: the session of pytest, the
ranks that run pytest, and the ranks of other jobs (through tests/mpi/site). The session reads all files at its end and
prints tables. It compares them with the recorded run, tests/timing.json; `python -m tests.timing record` makes the last
run the recorded one.

A row has a kind:

- `test` and `fixture`: seconds of wall clock and of processor, with those of the processes that a test waits for.
- `import`: TensorFlow and Keras. `trace`: what tf.function traces. `start`: from a launcher's command to the
  interpreter. `build`: native programs of the tests. Their time is also in the rows of the tests that they belong to.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDED = Path(__file__).resolve().with_name("timing.json")
LAST = ROOT / "out" / "test-times"
FOLDER = "HVD_EXT_TEST_TIMES"
BEGUN = "HVD_EXT_TEST_BEGUN"
HEAVY = ("tensorflow", "keras")

_rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
_active = threading.local()
_clock_s = time.perf_counter  # tests put clocks of their own in its place
_begin_s = _clock_s()


def add(kind: str, name: str, wall_s: float, cpu_s: float, count: int = 1) -> None:
    """Add seconds to the row of this kind and name."""
    row = _rows[kind, name]
    row[0] += count
    row[1] += wall_s
    row[2] += cpu_s


def cpu_s() -> float:
    """Give the processor time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextlib.contextmanager
def measured(kind: str, name: str) -> Iterator[None]:
    """Add the time of a block, unless it lies inside a block of the same kind: imports and traces nest."""
    if getattr(_active, kind, False):
        yield
        return
    setattr(_active, kind, True)
    wall, cpu = _clock_s(), cpu_s()
    try:
        yield
    finally:
        setattr(_active, kind, False)
        add(kind, name, _clock_s() - wall, cpu_s() - cpu)


class _TimedImports:
    """A finder that times the first import of TensorFlow or Keras, and finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Give the module's spec with a loader that measures."""
        if name not in HEAVY or getattr(_active, "looking", False):
            return None
        import importlib.util

        _active.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _active.looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with measured("import", "TensorFlow and Keras"):
                execute(module)
            if name == "tensorflow":
                _time_traces()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _time_traces() -> None:
    try:
        from tensorflow.python.framework import func_graph
    except ImportError:
        return
    trace = func_graph.func_graph_from_py_func

    def func_graph_from_py_func(*args: Any, **keywords: Any) -> Any:
        with measured("trace", "tf.function"):
            return trace(*args, **keywords)

    func_graph.func_graph_from_py_func = func_graph_from_py_func


def begin() -> None:
    """Measure this process, if the session of tests that started it asks for it."""
    if FOLDER not in os.environ:
        return
    if not any(isinstance(finder, _TimedImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimedImports())  # type: ignore[arg-type]
        atexit.register(write)
    if begun := os.environ.pop(BEGUN, ""):
        add("start", "launcher", time.time() - float(begun), 0.0)
        write()  # a rank may be killed


def write() -> None:
    """Write the rows of this process, and begin with none."""
    folder = Path(os.environ.get(FOLDER, os.devnull))
    if not _rows or not folder.is_dir():
        return
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    rows = [
        {"kind": kind, "name": name, "ranks": ranks, "rank": rank, "count": row[0], "wall_s": row[1], "cpu_s": row[2]}
        for (kind, name), row in _rows.items()
    ]
    _rows.clear()
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def file_of(path: Path) -> str:
    """Give the name that a file of tests has in the rows."""
    return path.relative_to(ROOT).as_posix()


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of all processes of a run."""
    return [
        json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()
    ]


def summed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum rows over the processes of a run: the wall clock is that of rank 0, the processor that of all ranks.

    Returns:
        One row for each kind, name and number of ranks, the longest on the wall clock first.
    """
    sums: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row in rows:
        total = sums[row["kind"], row["name"], row["ranks"]]
        total[0] += row["count"]
        total[1] += row["wall_s"] if row["rank"] == 0 else 0.0
        total[2] += row["cpu_s"]
    keys = ("kind", "name", "ranks", "count", "wall_s", "cpu_s")
    table = [
        dict(zip(keys, (*key, int(count), round(wall, 2), round(cpu, 2)), strict=True))
        for key, (count, wall, cpu) in sums.items()
    ]
    return sorted(table, key=lambda row: -row["wall_s"])


def tables(rows: list[dict[str, Any]], recorded: list[dict[str, Any]], slowest: int = 10) -> list[str]:
    """Give the lines of the report.

    Args:
        rows: summed rows of this run.
        recorded: those of the recorded run.
        slowest: how many files and fixtures are shown.
    """
    before = {(row["kind"], row["name"], row["ranks"]): row["wall_s"] for row in recorded}
    lines = [f"total: {_clock_s() - _begin_s:.0f} s of wall clock, since pytest's configuration"]
    groups: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0.0]))
    for row in rows:
        group = groups[row["kind"]][row["ranks"]]
        for place, column in enumerate(("count", "wall_s", "cpu_s")):
            group[place] += row[column]
    lines += ["", f"{'kind':<10}{'ranks':>6}{'count':>8}{'wall s':>9}{'processor s':>13}"]
    for kind, by_ranks in groups.items():
        for ranks, (count, wall, cpu) in sorted(by_ranks.items()):
            lines.append(f"{kind:<10}{ranks:>6}{count:>8.0f}{wall:>9.1f}{cpu:>13.1f}")
    for kind, title in (("test", "the slowest files"), ("fixture", "the slowest fixtures")):
        lines += ["", f"{title:<64}{'ranks':>6}{'wall s':>9}{'processor s':>13}{'grown':>10}"]
        for row in [row for row in rows if row["kind"] == kind][:slowest]:
            old = before.get((kind, row["name"], row["ranks"]))
            grown = "new" if old is None else f"{100 * (row['wall_s'] / max(old, 0.01) - 1):+.0f}%"
            lines.append(f"{row['name']:<64}{row['ranks']:>6}{row['wall_s']:>9.1f}{row['cpu_s']:>13.1f}{grown:>10}")
    return lines


def recorded() -> list[dict[str, Any]]:
    """Read the rows of the recorded run; none if there is none."""
    if not RECORDED.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(RECORDED.read_text("utf-8"))["rows"]
    return rows


def by_file(column: str, ranks: int = 1) -> dict[str, float]:
    """Give a column, "wall_s" or "cpu_s", of the recorded run's tests on so many ranks, by file."""
    return {row["name"]: row[column] for row in recorded() if row["kind"] == "test" and row["ranks"] == ranks}


def record() -> None:
    """Make the last run the recorded one, one row a line."""
    rows = [row for row in summed(read(LAST)) if row["wall_s"] >= 1 or row["cpu_s"] >= 1]
    text = ",\n".join(json.dumps(row) for row in rows)
    RECORDED.write_text(f'{{"cores": {os.cpu_count()}, "rows": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit("usage: python -m tests.timing record")
    record()
