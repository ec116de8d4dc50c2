"""The jobs that measure sparse sums: hierarchical top-k beside the flat one, dense sums and Horovod, in turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.studies.hitopk.expected import expected, floor_seconds, inside_seconds
from benchmarks.studies.hitopk.names import Name, names_of
from hvd_ext.bench.expected import Cluster
from hvd_ext.bench.jobs import NO_HOROVOD, Launcher, Tell, Turns, caveats, compare, has_horovod, samples_of
from hvd_ext.bench.sampling import Task
from hvd_ext.errors import InvalidError

MOST_OF_MEMORY = 0.8
# The buffers of the gradient's size that a rank holds: for each job the gradient and the result; for each contestant
# the engine's, two residuals (for hitopk those of the shard alone), and room for what arrives; Horovod's tensor, fused
# buffer and result.
COMMON_BUFFERS, DENSE_BUFFERS = 4.0, 1.5
BUFFERS = {"hitopk": 2.0, "naive_allgather": 3.5, "gtopk": 3.5, "horovod": 3.0}
MODULES = {"hvd_ext": "benchmarks.studies.hitopk.worker", "Horovod": "benchmarks.studies.hitopk.horovod"}


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        elements: lengths of the float32 gradient.
        names: of contestants, as benchmarks.studies.hitopk.names reads them; nothing else is measured.
        ranks: numbers of ranks on this host, one job of each after the other; empty where a launcher says it.
        repetitions: the most samples of a row.
        seconds_per_row: long calls have fewer samples, at least 3, so that a row takes about so long.
        rate: bytes per second on the wire of each host, for the bound; None to take the topology's.
        timeout_s: longest time without an answer of a job.

    Raises:
        InvalidError: a value breaks its rule.
    """

    elements: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    repetitions: int = 10
    seconds_per_row: float = 20.0
    rate: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        names_of(self.names)
        if not self.elements or min(self.elements) < 1 or any(ranks < 1 for ranks in self.ranks):
            raise InvalidError("elements, ranks: each must be at least 1, and there must be one number of elements")
        if self.repetitions < 1 or self.seconds_per_row <= 0 or self.timeout_s <= 0:
            raise InvalidError("repetitions, seconds per row, timeout: must be more than 0")

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The jobs that live at the same time, and the contestants of each."""
        names = names_of(self.names)
        ours = [name.text for name in names if name.algorithm != "horovod"]
        theirs = [name.text for name in names if name.algorithm == "horovod"] if has_horovod() else []
        return {job: texts for job, texts in (("hvd_ext", ours), ("Horovod", theirs)) if texts}


def measure(request: Request, launcher: Launcher, tell: Tell) -> tuple[list[dict[str, Any]], list[str], str]:
    """Measure what was asked for.

    Args:
        request: what to measure.
        launcher: how to start the jobs.
        tell: takes what runs now, and the number of sizes that have just become ready.

    Returns:
        The rows, what else the user must know, and the YAML text of the topology (empty without one).

    Raises:
        InvalidError: there is nothing to measure.
        JobError: a job failed.
    """
    if not request.jobs:
        raise InvalidError(f"algorithms ({', '.join(request.names)}): {NO_HOROVOD}")

    jobs = {name: (MODULES[name], Task(("engine",))) for name in request.jobs}
    rows, notes, topology = compare(
        request, launcher, jobs, lambda cluster, turns: _measured(request, cluster, turns, tell), tell
    )
    asked = any(name.algorithm == "horovod" for name in names_of(request.names))
    return rows, [NO_HOROVOD] * (asked and not has_horovod()) + notes, topology


def _measured(request: Request, cluster: Cluster, turns: Turns, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    refused = {text: why for text in request.names if (why := _refusal(cluster, Name.read(text)))}
    notes = caveats(cluster, turns, refused, "its prices say nothing")
    rows = []
    for elements in request.elements:
        tell(f"{cluster.tree.describe()}, {elements:,} elements", 0)
        asked = [text for text in request.names if any(text in of_job for of_job in request.jobs.values())]
        room = psutil.virtual_memory().available * MOST_OF_MEMORY / cluster.ranks
        groups = groups_of([text for text in asked if text not in refused], elements, room)
        if len(groups) > 1:
            told = "; ".join(", ".join(group) for group in groups)
            notes.append(
                f"{elements:,} elements: all contestants together need more memory than is free; they were measured in "
                f"{len(groups)} groups, one after the other: {told}"
            )
        for group in groups:
            opened = [
                turns.give(
                    worker,
                    "open",
                    bytes=4 * elements,
                    algorithms=[text for text in request.jobs[worker.name] if text in group],
                )["contestants"]
                for worker in turns.workers
            ]
            samples = samples_of(request, turns, opened)
            rows += [row_of(cluster, elements, opened[job][index], taken) for (job, index), taken in samples.items()]
        tell(f"{cluster.tree.describe()}, {elements:,} elements", 1)
    return rows, notes


def _refusal(cluster: Cluster, name: Name) -> str | None:
    from hvd_ext.planning import registry

    if name.density is None:
        return cluster.refusal(name.algorithm)
    return registry.supports(registry.sparse(name.algorithm), cluster.tree)


def groups_of(names: Sequence[str], elements: int, room: float) -> list[list[str]]:
    """Divide contestants, in their order, into groups whose buffers fit into memory.

    Args:
        names: of contestants.
        elements: of the gradient.
        room: bytes that a rank may take.

    Returns:
        Groups; one that does not fit by itself is alone.
    """
    groups: list[list[str]] = []
    left = 0.0
    for text in names:
        name = Name.read(text)
        needed = 4.0 * elements * (BUFFERS.get(name.algorithm, DENSE_BUFFERS) if name.algorithm != "mpi" else 0)
        if not groups or left < needed:
            groups.append([])
            left = room - 4.0 * elements * COMMON_BUFFERS
        groups[-1].append(text)
        left -= needed
    return groups


def row_of(cluster: Cluster, elements: int, facts: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make a row of the samples of one contestant.

    Args:
        cluster: where it ran.
        elements: of the gradient.
        facts: of the contestant, from the sampler.
        taken: its samples.

    Returns:
        Times, bytes, the levels' times, and what was expected.
    """
    name = Name.read(facts["algorithm"])
    times = [sample["seconds"] for sample in taken]
    wrong = [words for sample in [facts, *taken] for words in sample["wrong"]]
    wires = [max(sample["wire_bytes"]) for sample in taken]
    entries, nbytes = (sum(sample[field] for sample in taken) for field in ("entries", "entry_bytes"))
    # where sums travel as entries too, the contestant has counted the selected ones by themselves
    entry_nbytes = facts["facts"].get("entry_bytes") or (nbytes / entries if entries else None)
    first = taken[0]["levels"]
    levels = {level: statistics.median(sample["levels"][level] for sample in taken) for level in first}
    inside = inside_seconds(levels)
    plan = facts["chosen"] or name.algorithm
    row = {
        "name": name.text,
        "algorithm": name.algorithm,
        "plan": plan,
        "density": name.density,
        "wire": name.wire or "fp32",
        "how": facts["how"],
        "simulated": False,
        "ranks": cluster.ranks,
        "hosts": len(cluster.ranks_per_host),
        "ranks_per_host": cluster.ranks_per_host,
        "elements": elements,
        "bytes": 4 * elements,
        "seconds_median": statistics.median(times),
        "seconds_min": min(times),
        "wire_bytes": statistics.median(wires) or None,
        "entry_bytes": entry_nbytes,
        "levels_seconds": levels,
        "inside_seconds": inside,
        "floor_seconds": floor_seconds(cluster, name, elements, entry_nbytes, inside),
        **expected(cluster, name, elements, entry_nbytes),
        "dense_above": facts["facts"].get("dense_above"),
        "segment_bytes": facts["segment_bytes"] or None,
        "correct": not wrong,
        "samples": times,
    }
    return {**row, "wrong": wrong[:1]} if wrong else row
