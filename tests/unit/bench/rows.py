"""Rows of benchmarks as tests make them, and the results that are kept in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvd_ext.bench.topk import beside_ours, summary
from hvd_ext.bench.training import against

KEPT = Path(__file__).parents[3] / "benchmarks" / "results"


def row(algorithm: str, how: str, median: float, **more: Any) -> dict[str, Any]:
    """Make a row of bench allreduce."""
    values = {
        "run": 0,
        "algorithm": algorithm,
        "how": how,
        "chosen": "",
        "ranks": 4,
        "hosts": 2,
        "ranks_per_host": [2, 2],
        "bytes": 4096,
        "seconds_median": median,
        "seconds_min": median / 2,
        "samples": [median / 2, median, 2 * median],
        "bound_seconds": None,
        "bottleneck_bytes": None,
        "predicted_seconds": None,
        "processor_seconds_per_call": 4 * median,
        "processor_seconds_per_gb": 4 * median / 4096 * 1e9,
        "correct": True,
    }
    return {**values, **more}


ROWS = [
    row("noop", "graph", 1e-6),
    row("ring", "graph", 6e-4),
    row("auto", "graph", 4e-4, chosen="torus2d", bound_seconds=2e-4, predicted_seconds=3e-4),
    row("auto", "engine", 3e-4, chosen="torus2d"),
    row("auto", "eager", 5e-4, chosen="torus2d"),
    row("mpi", "engine", 2e-4, bound_seconds=1e-4),
    row("horovod", "graph", 8e-4, bound_seconds=2e-4),
    row("horovod", "eager", 2.5e-4),
]
FACTS = {
    "machine": {"processor": "p", "cores": 2, "memory_gib": 4, "system": "s", "load_before": 0.1},
    "versions": {"x": "1"},
    "date": "d",
    "notes": ["a note"],
}


def training_row(algorithm: str, step_s: float = 1.0, hosts: tuple[int, ...] = (2, 2), **more: Any) -> dict[str, Any]:
    """Make a row of bench training."""
    alone = algorithm == "compute"
    return {
        "algorithm": algorithm,
        "chosen": "",
        "model": "mlp",
        "batch": 64,
        "ranks": sum(hosts),
        "hosts": len(hosts),
        "ranks_per_host": list(hosts),
        "bytes": 17_100_840,
        "samples_per_second": sum(hosts) * 64 / step_s,
        "step_seconds_median": step_s,
        "step_seconds_min": step_s,
        "compute_seconds": 0.25,
        "exposed_communication_seconds": None if alone else step_s - 0.25,
        "bound_seconds": None if alone else 0.5,
        "correct": None if alone else True,
        "samples": [step_s],
        **more,
    }


def training_rows(*hosts: int) -> list[dict[str, Any]]:
    """Make the rows of five contestants on a cluster."""
    times = {"compute": 0.25, "auto": 1.0, "ring": 1.5, "horovod": 2.0, "horovod-links2": 1.8}
    return against([training_row(name, step_s, hosts) for name, step_s in times.items()])


def topk_row(contestant: str, samples: list[float], yardsticks: list[float], **more: Any) -> dict[str, Any]:
    """Make a row of bench topk."""
    raw = {
        "contestant": contestant,
        "beside": "add" if contestant in ("feedback", "separate") else "pass",
        "input": "gauss",
        "elements": 25_000_000,
        "density": 0.001,
        "k": 25_000,
        "threads": 1,
        "returned": 25_000,
        "recall": 1.0,
        "correct": True,
        "wrong": "",
        "rounds": list(range(len(samples))),
        "samples": samples,
        "yardstick_samples": yardsticks,
        "cpu_samples": [2 * seconds for seconds in samples],
        "cpu_yardstick_samples": yardsticks,
        **more,
    }
    return {"run": 0, **raw, **summary(raw)}


def topk_rows(**more: Any) -> list[dict[str, Any]]:
    """Make rows: ours at 1.1 passes, error feedback at 1.2 additions; Algorithm 1 at 49.5 and NumPy at 22 passes."""
    passes = [0.25, 0.5, 0.25]
    times = {"exact": 1.1, "feedback": 1.2, "algorithm1": 49.5, "numpy": 22.0}
    return beside_ours([topk_row(name, [x * one for one in passes], passes, **more) for name, x in times.items()])
