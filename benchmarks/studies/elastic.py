"""What the loss of workers and of hosts costs an elastic job, on rehearsed clusters.

    python -m benchmarks.studies.elastic FILE.json [kills | long | steps | restart ...]

A model of 1.2 million weights is trained by `fit` with elastic=True. One weight counts how often each sample was
trained on, in whole numbers; at the end all ranks must have the same weights.

- kills: workers, or all workers of a host, are killed at random moments; others are started in their places and join.
  After each loss the study notes how long it took from the kill to the next update, and after each join the longest
  time between two updates.
- long: 10,000 updates, with a kill every 100 updates, and a join in between; the oldest worker notes its memory,
  threads and descriptors.
- steps: steps with elastic=True and without, in turns, in one job.
- restart: all workers and the supervisor are killed, and the job is started again from its newest checkpoint.

Rows are added to the file. The tables have the newest run of each part.
"""

from __future__ import annotations

import operator
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.elastic_job import Training
from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import HvdExtError

BENCHMARK = "elastic"
HEADINGS = ("hosts", "killed", "times", "from the kill to the next update: median", "longest", "join")
RESTARTS = ("hosts", "times", "from the kill of all to the next update: median", "updates lost", "start of a job")
GROWTH = (
    "hosts",
    "worlds of the oldest worker",
    "updates",
    "memory",
    "of it in the first half",
    "threads",
    "descriptors",
)
STEPS = ("hosts", "steps without elastic=True", "with", "ratio")
CLUSTERS = ((2, 2), (1, 1, 1), (2, 2, 1))
KILLS, RESTART_TIMES = 70, 3
LONG_UPDATES, LONG_EVERY, LONG_PAUSE_S = 10_000, 100, 0.15


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as tables."""
    kills, restarts, grown, steps = list[Any](), list[Any](), list[Any](), list[Any]()
    newest = {row["part"]: row["run"] for row in sorted(result["rows"], key=operator.itemgetter("run"))}
    shown = [row for row in result["rows"] if row["run"] == newest[row["part"]]]
    for hosts in dict.fromkeys(tuple(row["hosts"]) for row in shown):
        name = " + ".join(map(str, hosts))
        rows = [row for row in shown if tuple(row["hosts"]) == hosts]
        for what in ("a worker", "a host"):
            lost = [row["lost_s"] for row in rows if row.get("killed") == what]
            joins = [row["join_s"] for row in rows if row.get("killed") == what and row["join_s"] is not None]
            if lost:
                join = _s(statistics.median(joins)) if joins else "-"
                kills.append([name, what, str(len(lost)), _s(statistics.median(lost)), _s(max(lost)), join])
        again = [row for row in rows if row["part"] == "restart"]
        if again:
            middle = {key: statistics.median(row[key] for row in again) for key in ("lost_s", "lost", "start_s")}
            words = [_s(middle["lost_s"]), f"{middle['lost']:g}", _s(middle["start_s"])]
            restarts.append([name, str(len(again)), *words])
        for row in rows:
            if row["part"] == "long":
                grown.append(
                    [
                        name,
                        str(row["worlds"]),
                        str(row["late_updates"] - row["early_updates"]),
                        f"{(row['late_rss_kb'] - row['early_rss_kb']) / 1e3:+.1f} MB",
                        f"{(row['middle_rss_kb'] - row['early_rss_kb']) / 1e3:+.1f} MB",
                        f"{row['late_threads'] - row['early_threads']:+d}",
                        f"{row['late_descriptors'] - row['early_descriptors']:+d}",
                    ]
                )
        timed = [row for row in rows if row["part"] == "steps"]
        if timed:
            without, taken = (statistics.median(row[key] for row in timed) for key in ("without_s", "with_s"))
            ratio = statistics.median(row["with_s"] / row["without_s"] for row in timed)
            steps.append([name, f"{without * 1e3:.2f} ms", f"{taken * 1e3:.2f} ms", f"{ratio:.3f}"])
    parts = ((HEADINGS, kills), (RESTARTS, restarts), (GROWTH, grown), (STEPS, steps))
    return "\n".join(table(headings, lines) for headings, lines in parts if lines)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def kills(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Kill at random on one cluster."""
    rows: list[dict[str, Any]] = []
    draw = random.Random(sum(hosts))
    with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
        training = Training(cluster, hosts, Path(name))
        try:
            workers = training.whole()
            for number in range(KILLS):
                time.sleep(draw.random())
                whole = draw.random() < 0.3
                host = draw.choice(workers)["host"]
                victims = [one for one in workers if one["host"] == host] if whole else [draw.choice(workers)]
                killed_s, world = training.kill(victims), workers[0]["world"]
                after = training.until(
                    lambda lines, world=world: [one for one in lines[-200:] if one["world"] > world], "an update"
                )
                workers = training.whole()
                joined = [one for one in training.look() if one["world"] == workers[0]["world"]]
                earlier = [one for one in training.look() if one["world"] < workers[0]["world"]]
                join_s = joined[0]["s"] - earlier[-1]["s"] if earlier[-1]["world"] > world else None
                rows.append({"hosts": list(hosts), "part": "kills", "killed": "a host" if whole else "a worker"})
                rows[-1] |= {"lost_s": after[0]["s"] - killed_s, "join_s": join_s}
                print(f"{hosts} {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
            finish(training)
        finally:
            training.end()
    return rows


def long(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Train for long, with a kill every so many updates, of any worker but the oldest."""
    draw = random.Random(2)
    with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
        training = Training(cluster, hosts, Path(name), pause_s=LONG_PAUSE_S)
        try:
            for updates in range(LONG_EVERY, LONG_UPDATES + 1, LONG_EVERY):
                training.until(lambda lines, updates=updates: lines and lines[-1]["updates"] >= updates, "an update")
                workers = training.whole()
                own = next(one for one in workers if one["worker"] == 0)
                print(f"{hosts}: {own}", file=sys.stderr, flush=True)
                if updates < LONG_UPDATES:
                    training.kill([draw.choice([one for one in workers if one["worker"] != 0])])
            finish(training)
            return growth(hosts, training.look())
        finally:
            training.end()


def steps(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Time steps with elastic=True and without."""
    with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
        training = Training(cluster, hosts, Path(name), "steps", 0.0)
        try:
            training.process.wait(500)
            training.look()
            timed = [line for line in training.lines if "with_s" in line]
        finally:
            training.end()
    kept = ("without_s", "with_s")
    return [{"hosts": list(hosts), "part": "steps", **{key: line[key] for key in kept}} for line in timed]


def restart(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Kill a job that saves checkpoints, and start it again."""
    rows = []
    with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
        training = Training(cluster, hosts, Path(name), "save")
        for number in range(RESTART_TIMES):
            try:
                more = 75 + 20 * number
                first = training.whole()[0]["updates"]
                training.until(lambda lines, more=first + more: lines[-1]["updates"] >= more, "updates")
                training.kill_supervisor()  # first, or it would start others
                pids = {line["pid"] for line in training.look()}
                killed_s = training.kill([{"pid": pid} for pid in pids])
            finally:
                training.end()
            before = max(line["updates"] for line in training.look())
            (Path(name) / "log").unlink()  # the next job writes its own
            training = Training(cluster, hosts, Path(name), "save")
            after = training.until(lambda lines: lines, "an update")[0]
            rows.append({"hosts": list(hosts), "part": "restart", "lost_s": after["s"] - killed_s})
            rows[-1] |= {"lost": before - after["updates"] + 1, "start_s": after["s"] - training.begin_s}
            print(rows[-1], file=sys.stderr, flush=True)
        training.end()
    return rows


PARTS: dict[str, tuple[Callable[[Sequence[int]], list[dict[str, Any]]], tuple[tuple[int, ...], ...]]] = {
    "kills": (kills, CLUSTERS),
    "long": (long, ((1, 1, 1),)),
    "steps": (steps, ((2, 2),)),
    "restart": (restart, CLUSTERS),
}


def finish(training: Training) -> None:
    """Let a training end, and check what its ranks have."""
    (training.folder / "stop").touch()
    training.until(lambda _: [line for line in training.lines if "sums" in line][training.size - 1 :], "the end")
    check(training.lines)


def growth(hosts: Sequence[int], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give what the oldest worker had in its tenth world, in the middle, and in its last."""
    seen = list({line["world"]: line for line in lines if line["worker"] == 0}.values())
    places = {"early": seen[min(9, len(seen) - 1)], "middle": seen[len(seen) // 2], "late": seen[-1]}
    kept = ("rss_kb", "threads", "descriptors", "updates")
    row = {f"{when}_{name}": line[name] for when, line in places.items() for name in kept}
    return [{"hosts": list(hosts), "part": "long", "worlds": len(seen), **row}]


def check(lines: Sequence[dict[str, Any]]) -> None:
    """Check the weights of all ranks after each update, and the counts at the end."""
    sums: dict[tuple[int, int], int] = {}
    for line in lines:
        if "crc" in line and sums.setdefault((line["world"], line["updates"]), line["crc"]) != line["crc"]:
            raise HvdExtError(f"the ranks have different weights: {line}")
    ends = [line for line in lines if "sums" in line]
    if any(end["sums"] != ends[0]["sums"] for end in ends):
        raise HvdExtError("the ranks end with different weights")
    if not ends[0]["whole"]:
        raise HvdExtError("a sample was trained on in part")


def main(arguments: Sequence[str]) -> None:
    """Measure, write the file, and print the tables."""
    if not arguments or any(part not in PARTS for part in arguments[1:]):
        raise SystemExit(__doc__)
    path = Path(arguments[0])
    for part in arguments[1:] or list(PARTS):
        measured, clusters = PARTS[part]
        run = results.begin_run("python -m hvd_ext run", dict(os.environ))
        rows = [row for hosts in clusters for row in measured(hosts)]
        found = results.result_of(run, rows, BENCHMARK)
        if path.exists():
            found = results.joined(results.load(path, BENCHMARK), found)
        results.save(path, found)
    print(markdown(found))


if __name__ == "__main__":
    main(sys.argv[1:])
