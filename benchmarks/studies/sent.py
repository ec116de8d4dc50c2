"""The bytes that a host sends in a step, counted on its link, beside those that each form should send.

    python -m benchmarks.studies.sent FILE.json

The ranks of a rehearsed cluster train two weights with gradients of random numbers, one job for each form. A rank of
each host reads the counter of its network interface before and after some steps. The expected bytes are those of one
sum over two hosts: each host sends every element once, in its form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.markdown import table
from hvd_ext.bench import results
from hvd_ext.bench.table import ratio
from hvd_ext.cluster.rehearsal import Cluster
from hvd_ext.cluster.spec import Spec
from hvd_ext.errors import HvdExtError

BENCHMARK = "bytes between hosts"
HEADINGS = ("hosts", "form", "expected", "counted", "x expected")
SHAPES = ((1024, 1024), (512, 3, 3, 256))
ELEMENTS = 1024 * 1024 + 512 * 9 * 256
RANK, EVERY, BLOCK = 4, 16, 256
# bytes of a step, of those of the elements
FORMS: dict[str, tuple[dict[str, str], float]] = {
    "dense": ({}, 4.0 * ELEMENTS),
    "half": ({"compression": "fp16"}, 2.0 * ELEMENTS),
    **{
        f"{bits} bits": (
            {"compression": f"quantized:{bits}", "algorithm": "hitopk"},
            (bits / 8 + 2 / BLOCK) * ELEMENTS,
        )
        for bits in (8, 4, 1)
    },
    "signs": ({"compression": "sign", "algorithm": "hitopk"}, ELEMENTS / 8),
    "rank 4": ({"compression": f"lowrank:{RANK}"}, 4.0 * RANK * (1024 + 1024 + 512 * 9 + 256)),
    "local steps": ({"local_steps": str(EVERY)}, 4.0 * ELEMENTS / EVERY),
    "local steps, 4 bits": (
        {"local_steps": str(EVERY), "compression": "quantized:4", "algorithm": "hitopk"},
        (1 / 2 + 2 / BLOCK) * ELEMENTS / EVERY,
    ),
}
CLUSTERS = ((2, 2), (3, 2))
UNCOUNTED, COUNTED = EVERY, 2 * EVERY


def markdown(result: dict[str, Any]) -> str:
    """Write the rows of a file as a table."""
    lines = [
        [
            " + ".join(map(str, row["hosts"])),
            row["form"],
            f"{row['expected_bytes'] / 1e6:.3f} MB",
            f"{row['counted_bytes'] / 1e6:.3f} MB",
            ratio(row["counted_bytes"] / row["expected_bytes"]),
        ]
        for row in result["rows"]
    ]
    return table(HEADINGS, lines)


def sent_bytes() -> int:
    """Give the bytes that this host has sent so far."""
    line = next(line for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


def work(file: Path, form: str) -> None:
    """Train on one rank; rank 0 writes the bytes of a step of each host."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvd_ext as hvd
    from hvd_ext.options.gradients import GradientOptions

    hvd.init()
    options = GradientOptions.from_texts("sent", FORMS[form][0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **options.keywords())
    weights = [keras.Variable(np.zeros(shape), dtype="float32", name=f"w{n}") for n, shape in enumerate(SHAPES)]
    random = np.random.default_rng(hvd.rank())
    gradients = [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]
    optimizer.build(weights)
    step = tf.function(lambda: optimizer.apply(gradients, weights), autograph=False)
    for _ in range(UNCOUNTED):
        step()
    hvd.barrier()
    before = sent_bytes()
    for _ in range(COUNTED):
        step()
    hvd.barrier()
    counted = hvd.allgather_object((sent_bytes() - before) / COUNTED)
    if hvd.rank() == 0:
        file.write_text(json.dumps(counted), encoding="utf-8")
    hvd.shutdown()


def count(hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Count the bytes of all forms on one cluster; of the host that sends most."""
    rows = []
    for form, (_, expected) in FORMS.items():
        with tempfile.TemporaryDirectory() as name, Cluster(Spec(tuple(hosts), rate="1gbit")) as cluster:
            file = Path(name) / "counted"
            command = cluster.command([sys.executable, "-m", "benchmarks.studies.sent", "work", str(file), form])
            job = subprocess.run(command, env=cluster.environment(), capture_output=True, text=True)
            if job.returncode:
                raise HvdExtError(f"{form} on hosts of {hosts} ranks failed:\n{job.stdout[-2000:]}{job.stderr[-2000:]}")
            counted = max(json.loads(file.read_text(encoding="utf-8")))
        rows.append({"hosts": list(hosts), "form": form, "expected_bytes": expected, "counted_bytes": counted})
        print(f"{hosts} {form}: {counted / expected:.3f}", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    """Count, write the file, and print the table; or be one of its ranks."""
    if arguments[:1] == ["work"]:
        work(Path(arguments[1]), arguments[2])
        return
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    run = results.begin_run("python -m hvd_ext.cluster.launch", dict(os.environ))
    found = results.result_of(run, [row for hosts in CLUSTERS for row in count(hosts)], BENCHMARK)
    results.save(Path(arguments[0]), found)
    print(markdown(found))


if __name__ == "__main__":
    main(sys.argv[1:])
