"""The cores of a host: those of its ranks together, divided among hosts on one machine, at most its limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.job import cores


def sees(machine: str, processors: list[int], limit: float = 0.0) -> dict[str, Any]:
    return {"machine": machine, "processors": processors, "limit": limit}


@pytest.mark.parametrize(
    ("hosts", "answers", "expected"),
    [
        (("a", "a", "b"), [sees("1", [0, 1]), sees("1", [0, 1]), sees("2", [0, 1, 2])], {"a": 2, "b": 3}),
        (("a", "a"), [sees("1", [0]), sees("1", [3])], {"a": 2}),  # a launcher binds each rank to a core
        (("a", "b", "c"), [sees("1", [0, 1])] * 3, {"a": 2 / 3, "b": 2 / 3, "c": 2 / 3}),  # rehearsed on one machine
        (("a", "b"), [sees("1", [0, 1]), sees("1", [1, 2, 3])], {"a": 1.5, "b": 2.5}),
        (("a", "b"), [sees("1", [0, 1, 2, 3], 1.5), sees("2", [0, 1, 2, 3], 8)], {"a": 1.5, "b": 4}),
        (("a", "a"), [sees("1", [0, 1, 2, 3], 1.5), sees("1", [0, 1, 2, 3])], {"a": 4}),
    ],
)
def test_cores_of_hosts(hosts: tuple[str, ...], answers: list[dict[str, Any]], expected: dict[str, float]) -> None:
    assert cores.of_hosts(hosts, answers) == pytest.approx(expected)


def wrote(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0.0),
        ("0::/\n", {}, 0.0),
        ("0::/slice/job\n", {"slice/cpu.max": "200000 100000\n", "slice/job/cpu.max": "max 100000\n"}, 2.0),
        ("0::/slice/job\n", {"slice/cpu.max": "400000 100000\n", "slice/job/cpu.max": "50000 100000\n"}, 0.5),
        (
            "5:cpu,cpuacct:/job\n4:memory:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("5:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.0),
    ],
)
def test_the_limit_of_the_control_group_and_of_those_above_it(
    own: str, files: dict[str, str], limit: float, tmp_path: Path
) -> None:
    wrote(tmp_path / "proc" / "self" / "cgroup", own)
    wrote(tmp_path / "proc" / "sys" / "kernel" / "random" / "boot_id", "b00t\n")
    for name, text in files.items():
        wrote(tmp_path / "groups" / name, text)
    found = cores.seen(tmp_path / "proc", tmp_path / "groups")
    assert found == {"machine": "b00t", "processors": sorted(os.sched_getaffinity(0)), "limit": limit}


def test_without_the_kernels_files_the_name_of_the_host_counts(tmp_path: Path) -> None:
    found = cores.seen(tmp_path, tmp_path)
    assert found["machine"] and found["limit"] == 0.0
