"""The elastic job of the study: what its workers train, and how the study follows and disturbs it.

    python -m benchmarks.studies.elastic_job FOLDER WHAT

WHAT is what a worker does: "train" until there is a file "stop" in the folder, "save" checkpoints too, or take "steps"
with elastic=True and without, in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.errors import HvdExtError

SAMPLES, BATCH, WIDTH = 2000, 4, 1024
PAUSE = "HVD_EXT_STUDY_PAUSE_S"  # after each update
LIMIT_S = 180.0
# how many epochs are timed in turns each way; the first steps of each do not count
ROUNDS, WARM = 16, 20


def uses() -> dict[str, int]:
    """Give what this process has: memory in kB, threads, and open descriptors."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"rss_kb": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "descriptors": descriptors}


def work(folder: Path, what: str) -> None:
    """Do what a worker does."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvd_ext as hvd
    from hvd_ext.job import membership

    session, pause_s = membership.session(), float(os.environ.get(PAUSE, "0.02"))
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
                time.sleep(pause_s)
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

    if what == "steps":
        steps(model, data, note)
        return
    own = [hvd.callbacks.Checkpoint(folder / "checkpoints", every=None, every_steps=50)] if what == "save" else []
    model.fit(data, epochs=1000, verbose=0, callbacks=hvd.callbacks.synchronized([Progress(), *own], elastic=True))
    counts = -model.get_layer("counts").get_weights()[0][:, 0]
    sums = [zlib.crc32(np.ascontiguousarray(one).tobytes()) for one in model.get_weights()]
    note(least=float(counts.min()), most=float(counts.max()), whole=bool((counts == counts.round()).all()), sums=sums)


def steps(model: Any, data: Callable[[], Any], note: Callable[..., None]) -> None:
    """Time steps of `fit` with elastic=True and without, in turns; rank 0 notes the medians in s."""
    import keras

    import hvd_ext as hvd

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.times = [time.perf_counter()]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter())

    timer = Timer()
    for number in range(ROUNDS):
        seconds = {}
        for elastic in (True, False) if number % 2 else (False, True):
            callbacks = hvd.callbacks.synchronized([timer], elastic=elastic)
            model.fit(data if elastic else data(), epochs=1, verbose=0, callbacks=callbacks)
            taken = [after - before for before, after in zip(timer.times[WARM:], timer.times[WARM + 1 :], strict=False)]
            seconds["with_s" if elastic else "without_s"] = statistics.median(taken)
        if hvd.rank() == 0:
            note(number=number, **seconds)


class Training:
    """An elastic job on a rehearsed cluster."""

    def __init__(
        self, cluster: Cluster, hosts: Sequence[int], folder: Path, what: str = "train", pause_s: float = 0.02
    ) -> None:
        self.cluster, self.folder, self.size = cluster, folder, sum(hosts)
        names = ",".join(f"h{number + 1}:{ranks}" for number, ranks in enumerate(hosts))
        environment = cluster.environment(HVD_EXT_PROBE="off", **{PAUSE: str(pause_s)})
        environment.pop("HVD_EXT_TOPOLOGY")
        words = ["-m", "hvd_ext", "run", "-np", str(self.size), "--min-np", "1", "-H", names]
        words += ["--blacklist-cooldown-range", "0.1", "0.2"]
        command = [sys.executable, "-m", "benchmarks.studies.elastic_job", str(folder), what]
        self.output = (folder / "output").open("ab")
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

    def kill_supervisor(self) -> None:
        """Kill what started the workers, which then end by themselves."""
        subprocess.run([*self.cluster.enter(), "pkill", "-KILL", "-f", "hvd_ext run"], check=False)

    def end(self) -> None:
        """End the job, if it is not over."""
        self.process.terminate()
        self.process.wait(60)
        self.output.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
