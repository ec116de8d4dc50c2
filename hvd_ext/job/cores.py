"""The processor cores that a job may use on each of its hosts, from what each rank sees of them."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def seen(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """What this rank sees: the machine, the processors on which it may run, and its control group's limit in cores.

    Args:
        proc: where the kernel's files about processes are.
        groups: where its files about control groups are.

    Returns:
        "machine", "processors" and "limit" (0 for none), which JSON can hold.
    """
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    machine = platform.node()
    with contextlib.suppress(OSError):
        # Containers, and the hosts of a rehearsed cluster, have names of their own on one machine.
        machine = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"machine": machine, "processors": sorted(affinity(0)), "limit": _limit(proc, groups)}


def _limit(proc: Path, groups: Path) -> float:
    """The least limit of the control group and of those above it, in version 2 and in version 1; 0 without one."""
    limits = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = groups / "cpu" if controllers else groups
            group = base / path.lstrip("/")
            for folder in (group, *group.parents)[: len(group.parts) - len(base.parts) + 1]:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                with contextlib.suppress(OSError, ValueError):
                    words = [word for name in names for word in (folder / name).read_text(encoding="ascii").split()]
                    limits.append(float(words[0]) / float(words[1]))
    return min((limit for limit in limits if limit > 0), default=0.0)


def of_hosts(hosts: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The cores of each host.

    Args:
        hosts: the name of each rank's host.
        answers: what each rank has seen.

    Returns:
        The cores on which ranks of the host may run, at most the largest limit of its ranks. A core on which several
        hosts run counts for each of them as its share.
    """
    machines = {host: str(answer["machine"]) for host, answer in zip(hosts, answers, strict=True)}
    processors: dict[str, set[int]] = {}
    for host, answer in zip(hosts, answers, strict=True):
        processors.setdefault(host, set()).update(answer["processors"])
    users = Counter((machines[host], core) for host, usable in processors.items() for core in usable)
    cores = {host: sum(1 / users[machines[host], core] for core in usable) for host, usable in processors.items()}
    for host in cores:
        limits = [answer["limit"] for place, answer in zip(hosts, answers, strict=True) if place == host]
        if all(limits):
            cores[host] = min(cores[host], max(limits))
    return cores
