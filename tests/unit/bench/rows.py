"""Rows of benchmarks as tests make them, and the results that are kept in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
