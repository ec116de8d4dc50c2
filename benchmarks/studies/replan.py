"""Training whose buckets are planned anew: predicted beside measured steps, and a link that becomes slower meanwhile.

    python -m benchmarks.studies.replan FILE.json

Two hosts with two ranks each train the benchmark's model of 60 layers at 100 Mbit/s, where the ranks measure the
network. One job for each bucketer has its steps timed; each step is also predicted from the trace of the first job.
Then one host's rate is halved while a job trains, and the steps after the next plan are set beside those of a job that
begins with the slower link.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.bench.table import ratio, seconds
from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import HvdExtError

BENCHMARK = "replanned training, deep-60"
HEADINGS = ("what", "buckets", "predicted", "step", "x predicted", "x fresh")
BUCKETERS = ("wfbp", "single", "auto")
EVERY = 60  # the plans are made after 20 steps, and after every 60
HALVED_AT, STEPS, SHORT, TIMED = 70, 160, 60, 30


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = [
        [
            row["what"],
            row["buckets"],
            "" if row["predicted_seconds"] is None else seconds(row["predicted_seconds"]),
            seconds(row["seconds_median"]),
            ratio(row["seconds_median"] / row["predicted_seconds"] if row["predicted_seconds"] else None),
            ratio(row["x_fresh"]),
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def work(folder: Path, buckets: str, steps: int) -> None:
    """Train on one rank; rank 0 writes the time of each step, and what each bucketer is predicted to take."""
    import keras

    import hvd_ext as hvd
    from hvd_ext.bench import training_model
    from hvd_ext.job import runtime
    from hvd_ext.planning.layout import layout
    from hvd_ext.planning.prediction import predict

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(training_model.layers(training_model.DEEP, 40))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), buckets=buckets)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    data = training_model.batches(hvd.rank(), hvd.size(), 32)
    took_s = []
    for step in range(steps):
        begin = time.perf_counter()
        model.train_on_batch(*data[step % len(data)])
        took_s.append(time.perf_counter() - begin)
        if hvd.rank() == 0:
            (folder / "step").write_text(str(step + 1), encoding="utf-8")
    every = optimizer._hvd_ext.reducer.sets[0]
    (channel,) = every.channels
    (review, *_) = reversed(every.replannings[channel].reviews)
    if hvd.rank() == 0:
        job, now = runtime.current(), channel.layout
        predicted = {
            name: predict(
                job.tree,
                layout(
                    job.tree, now.tensors, now.buckets[0].op, buckets=name, times=review.times, places=now.sent_tensors
                ),
                review.times,
            ).step_s
            for name in BUCKETERS
        }
        found = {"took_s": took_s, "predicted_s": predicted, "chosen": now.bucketer}
        (folder / "found").write_text(json.dumps(found), encoding="utf-8")
    hvd.shutdown()


def train(cluster: Cluster, buckets: str, steps: int, halved_at: int | None = None) -> dict[str, Any]:
    """Train on a cluster; the second host's rate is halved after so many steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = [sys.executable, "-m", "benchmarks.studies.replan", "work", name, buckets, str(steps)]
        own = {
            "HVD_EXT_TOPOLOGY": "",
            "HVD_EXT_CACHE": name,
            "HVD_EXT_PROBE": "refresh",
            "HVD_EXT_REPLAN_EVERY": str(EVERY),
        }
        program = ["env", *(f"{key}={value}" for key, value in own.items()), *program]
        with (folder / "log").open("wb") as log:
            job = subprocess.Popen(
                cluster.command(program), env=cluster.environment(), stdout=log, stderr=subprocess.STDOUT
            )
            while job.poll() is None:
                time.sleep(0.05)
                at = folder / "step"
                if halved_at is not None and at.exists() and int(at.read_text(encoding="utf-8") or 0) >= halved_at:
                    cluster.set_rate("h2", "50mbit")
                    halved_at = None
        if job.returncode:
            raise HvdExtError(f"replan: the job has failed:\n{(folder / 'log').read_text(encoding='utf-8')[-3000:]}")
        return dict(json.loads((folder / "found").read_text(encoding="utf-8")))


def row_of(what: str, buckets: str, took_s: Sequence[float], predicted_s: float | None, fresh_s: float | None) -> Any:
    """Make a row of the file."""
    median = statistics.median(took_s)
    row = {"what": what, "buckets": buckets, "predicted_seconds": predicted_s, "seconds_median": median}
    row |= {"x_fresh": None if fresh_s is None else median / fresh_s, "samples": list(took_s)}
    print(f"{what:45} {buckets:10} {seconds(median)}, predicted {predicted_s}, x fresh {row['x_fresh']}", flush=True)
    return row


def main(path: Path) -> None:
    """Run all jobs and write the file."""
    run = results.begin_run("python -m hvd_ext.cluster.launch", dict(os.environ))
    rows = []
    predicted: dict[str, float] = {}
    with Cluster(Spec((2, 2), "100mbit")) as cluster:
        for buckets in BUCKETERS:
            found = train(cluster, buckets, SHORT)
            predicted = predicted or found["predicted_s"]
            what = f"predicted from the trace of {BUCKETERS[0]}"
            rows.append(row_of(what, buckets, found["took_s"][-TIMED:], predicted[buckets], None))
        halved = train(cluster, "auto", STEPS, HALVED_AT)["took_s"]
        fresh = train(cluster, "auto", SHORT)["took_s"][-TIMED:]
    fresh_s = statistics.median(fresh)
    rows.append(
        row_of(
            "a host's rate halved, before the next plan", "auto", halved[HALVED_AT + 10 : 2 * EVERY - 1], None, fresh_s
        )
    )
    rows.append(row_of("a host's rate halved, after the next plan", "auto", halved[-TIMED:], None, fresh_s))
    rows.append(row_of("a job that begins with the slower host", "auto", fresh, None, fresh_s))
    results.save(path, results.result_of(run, rows, BENCHMARK))


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main(Path(sys.argv[1]))
