"""What the loss of workers and of hosts costs an elastic job, on rehearsed clusters.

    python -m benchmarks.studies.elastic FILE.json [KILLS]

A model of 1.2 million weights is trained by `fit` with elastic=True. Workers, or all workers of a host, are killed at
random moments; others are started in their places and join. After each loss the study notes how long it took from the
kill to the next update, and after each join the longest time between two updates. One weight of the model counts how
often each sample was trained on, in whole numbers; at the end all ranks must have the same weights, and no sample may
have been seen twice in an epoch. The time from the start of the job to its first update is what a restart costs at
least.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import HvdExtError

BENCHMARK = "elastic"
HEADINGS = ("hosts", "killed", "times", "from the kill to the next update: median", "longest", "join", "restart")
GROWTH = ("hosts", "worlds of the oldest worker", "updates", "memory", "threads", "descriptors")
CLUSTERS = ((2, 2), (1, 1, 1), (2, 2, 1))
SAMPLES, BATCH, WIDTH, PAUSE_S = 2000, 4, 1024, 0.02
LIMIT_S = 180.0


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = []
    for hosts in dict.fromkeys(tuple(row["hosts"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if tuple(row["hosts"]) == hosts]
        for what in ("a worker", "a host"):
            lost = [row["lost_s"] for row in rows if row["killed"] == what]
            joins = [row["join_s"] for row in rows if row["killed"] == what and row["join_s"] is not None]
            if lost:
                lines.append(
                    [
                        " + ".join(map(str, hosts)),
                        what,
                        str(len(lost)),
                        f"{statistics.median(lost):.2f} s",
                        f"{max(lost):.2f} s",
                        f"{statistics.median(joins):.2f} s" if joins else "-",
                        f"{rows[0]['start_s']:.1f} s",
                    ]
                )
    grown = [
        [
            " + ".join(map(str, row["hosts"])),
            str(row["worlds"]),
            str(row["late_updates"] - row["early_updates"]),
            f"{(row['late_rss_kb'] - row['early_rss_kb']) / 1e3:+.1f} MB",
            f"{row['late_threads'] - row['early_threads']:+d}",
            f"{row['late_descriptors'] - row['early_descriptors']:+d}",
        ]
        for row in result["rows"]
        if row["killed"] == "none"
    ]
    return table(HEADINGS, lines) + "\n" + table(GROWTH, grown)


def uses() -> dict[str, int]:
    """Give what this process has: memory in kB, threads, and open descriptors."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"rss_kb": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "descriptors": descriptors}


def work(folder: Path) -> None:
    """Train on one rank, until there is a file "stop" in the folder."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvd_ext as hvd
    from hvd_ext.job import membership

    session = membership.session()
    assert session is not None

    def note(**values: Any) -> None:
        values |= {"worker": session.worker, "world": session.world, "pid": os.getpid(), "s": time.time()}
        with (folder / "log").open("ab", buffering=0) as log:
            log.write(json.dumps(values).encode() + b"\n")

    class Progress(keras.callbacks.Callback):
        before = -1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            updates = int(self.model.optimizer.iterations)
            if updates != self.before:
                place = {"rank": hvd.rank(), "size": hvd.size(), "host": os.uname().nodename}
                seen = self.model.get_layer("counts").weights[0].numpy()
                note(updates=updates, crc=zlib.crc32(seen.tobytes()), **place, **uses())
                time.sleep(PAUSE_S)
            self.before = updates
            if (folder / "stop").exists():
                self.model.stop_training = True

    hvd.init()
    inputs = keras.Input((1,), dtype="int64")
    seen = keras.layers.Flatten()(
        keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros", name="counts")(inputs)
    )
    hidden = keras.layers.Flatten()(keras.layers.Embedding(SAMPLES, 64)(inputs))
    for _ in range(2):
        hidden = keras.layers.Dense(WIDTH, activation="relu")(hidden)
    model = keras.Model(inputs, [seen, keras.layers.Dense(1)(hidden)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, sparse_as_dense=True)
    losses = [lambda y, out: tf.reduce_sum(out), lambda y, out: 1e-6 * tf.reduce_mean(out**2)]
    model.compile(optimizer, loss=losses, jit_compile=False)

    def data() -> tf.data.Dataset:
        zeros = np.zeros((SAMPLES, 1), np.float32)
        return hvd.shard((np.arange(SAMPLES)[:, None], (zeros, zeros)), BATCH, shuffle=True, seed=5)

    callbacks = hvd.callbacks.synchronized([Progress()], elastic=True)
    model.fit(data, epochs=1000, verbose=0, callbacks=callbacks)
    counts = -model.get_layer("counts").get_weights()[0][:, 0]
    sums = [zlib.crc32(np.ascontiguousarray(one).tobytes()) for one in model.get_weights()]
    note(least=float(counts.min()), most=float(counts.max()), whole=bool((counts == counts.round()).all()), sums=sums)


class Training:
    """An elastic job on a rehearsed cluster."""

    def __init__(self, cluster: Cluster, hosts: Sequence[int], folder: Path) -> None:
        self.cluster, self.folder, self.size = cluster, folder, sum(hosts)
        names = ",".join(f"h{number + 1}:{ranks}" for number, ranks in enumerate(hosts))
        environment = cluster.environment(HVD_EXT_PROBE="off")
        environment.pop("HVD_EXT_TOPOLOGY")
        words = ["-m", "hvd_ext", "run", "-np", str(self.size), "--min-np", "1", "-H", names]
        words += ["--blacklist-cooldown-range", "0.1", "0.2"]
        command = [sys.executable, "-m", "benchmarks.studies.elastic", "work", str(folder)]
        self.output = (folder / "output").open("wb")
        self.begin_s = time.time()
        self.process = subprocess.Popen(
            [*cluster.enter(), sys.executable, *words, "--", *command],
            env=environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self._read, self.lines = 0, list[dict[str, Any]]()

    def look(self) -> list[dict[str, Any]]:
        """Read what is new in the log; returns all updates."""
        path = self.folder / "log"
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._read)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self.lines.append(json.loads(line))
        return [line for line in self.lines if "updates" in line]

    def until(self, found: Callable[[list[dict[str, Any]]], Any], what: str) -> Any:
        """Wait for something in the log."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            result = found(self.look())
            if result:
                return result
            time.sleep(0.02)
        raise HvdExtError(f"{what} did not happen: {(self.folder / 'output').read_text(errors='replace')[-3000:]}")

    def whole(self) -> list[dict[str, Any]]:
        """Wait until a world of all workers trains; returns a line of each rank."""

        def found(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            newest = [line for line in lines[-20 * self.size :] if line["world"] == lines[-1]["world"]]
            by_rank = {line["rank"]: line for line in newest}
            return list(by_rank.values()) if len(by_rank) == self.size else []

        return list(self.until(found, "a world of all workers"))

    def kill(self, workers: Sequence[dict[str, Any]]) -> float:
        """Kill workers at once; returns when."""
        begin_s = time.time()
        pids = [str(worker["pid"]) for worker in workers]
        subprocess.run([*self.cluster.enter(), "kill", "-KILL", *pids], check=False)
        return begin_s


def measure(hosts: Sequence[int], kills: int, draw: random.Random) -> list[dict[str, Any]]:
    """Kill at random on one cluster."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
        training = Training(cluster, hosts, Path(name))
        try:
            workers = training.whole()
            start_s = training.look()[0]["s"] - training.begin_s
            for number in range(kills):
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
                row = {"hosts": list(hosts), "killed": "a host" if whole else "a worker", "start_s": start_s}
                rows.append(row | {"lost_s": after[0]["s"] - killed_s, "join_s": join_s})
                print(f"{hosts} {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
            (training.folder / "stop").touch()
            ends = training.until(
                lambda _: [line for line in training.lines if "sums" in line][training.size - 1 :] and training.lines,
                "the end",
            )
            check(ends)
            rows += growth(hosts, training.look())
        finally:
            training.process.terminate()
            training.process.wait(60)
            training.output.close()
    return rows


def growth(hosts: Sequence[int], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give what the worker that has seen the most worlds had in its third world, and in its last."""
    worlds: dict[int, dict[int, dict[str, Any]]] = {}
    for line in lines:
        worlds.setdefault(line["worker"], {})[line["world"]] = line
    oldest = max(worlds.values(), key=len)
    if len(oldest) < 4:
        return []
    seen = [oldest[world] for world in sorted(oldest)]
    kept = ("rss_kb", "threads", "descriptors", "updates")
    row = {f"{when}_{name}": line[name] for when, line in (("early", seen[2]), ("late", seen[-1])) for name in kept}
    return [{"hosts": list(hosts), "killed": "none", "worlds": len(seen), **row}]


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
    """Measure, write the file, and print the table; or be one of its workers."""
    if arguments[:1] == ["work"]:
        work(Path(arguments[1]))
        return
    if len(arguments) not in (1, 2):
        raise SystemExit(__doc__)
    run = results.begin_run("python -m hvd_ext run", dict(os.environ))
    kills, draw = int(arguments[1]) if len(arguments) == 2 else 70, random.Random(1)
    rows: list[dict[str, Any]] = []
    for hosts in CLUSTERS:
        rows += measure(hosts, kills, draw)
        found = results.result_of(run, rows, BENCHMARK)
        results.save(Path(arguments[0]), found)
    print(markdown(found))


if __name__ == "__main__":
    main(sys.argv[1:])
