"""The parts of the study of data that are jobs, on any number of ranks; test_jobs.py starts them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.studies.data import many as data_many, ranks as data_ranks, slow as data_slow
from benchmarks.studies.data.goals import FIRST_WAIT, LATER_WAIT, MEMORY, PRIVATE, RESTORE, SAVE, SKIP, STATE, TRAINING
from benchmarks.studies.data.worker import Task, teller
from hvd_ext.bench.sampling import EVENTS, Follower


@pytest.fixture
def folder(hvd: ModuleType, tmp_path: Path) -> Path:
    """A folder of all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path)))


def told(hvd: ModuleType, task: Task) -> dict[tuple[str, str], list[Any]]:
    """What rank 0 has told, for all ranks; nothing was wrong."""
    hvd.barrier()
    found: dict[tuple[str, str], list[Any]] = {}
    for event in Follower(task.path(EVENTS)).new():
        assert not event["facts"].get("wrong"), event
        if event["samples"]:
            found.setdefault((event["contestant"], event["quantity"]), []).extend(event["samples"])
    return found


def test_ranks_read_every_sample_however_it_is_kept(
    hvd: ModuleType, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_ranks, "BATCH", 4)
    monkeypatch.setattr(data_ranks, "SIDE", 16)
    for way in (data_ranks.NOTHING, "datacache", "cache-part", "cache"):
        task = Task("ranks", str(folder), 1 / 4096, 2, (way,), {"ranks": size})
        data_ranks.run(task, teller(task))
    found = told(hvd, task)
    assert {key: len(samples) for key, samples in found.items()} == {
        (way, MEMORY): 2 for way in (data_ranks.NOTHING, "datacache", "cache-part", "cache")
    }
    assert min(min(samples) for samples in found.values()) > 20_000_000 * size


def test_a_slow_source_is_waited_for_in_the_first_epoch_alone(
    hvd: ModuleType, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_slow, "BATCH", 4)
    monkeypatch.setattr(data_slow, "HEIGHT", 60)
    monkeypatch.setattr(data_slow, "WIDTH", 80)
    task = Task("slow", str(folder), 1 / 8, 1, ("decode", "datacache"))
    data_slow.run(task, teller(task))
    found = told(hvd, task)
    assert set(found) == {
        (way, quantity) for way in ("decode", "datacache") for quantity in (FIRST_WAIT, LATER_WAIT, TRAINING)
    }
    # what 10 epochs read passes a source of 12.5 MB/s
    files = list(folder.glob("slow/*.jpg"))
    assert len(files) == 3 * 4 * size
    assert found["decode", TRAINING][0] > 0.9 * 10 * sum(path.stat().st_size for path in files) / 12.5e6


def test_training_goes_on_behind_the_steps_that_were_trained(
    hvd: ModuleType, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size > 1:
        pytest.skip("a process of the benchmark has one rank")
    monkeypatch.setattr(data_many, "BATCH", 4)
    monkeypatch.setattr(data_many, "SIDE", 8)
    task = Task("many", str(folder), 1 / 4096, 1, ("datacache",))
    data_many.measure(task, teller(task))
    hvd.init()
    found = told(hvd, task)
    assert {quantity for _, quantity in found} == {PRIVATE, STATE, SKIP, SAVE, RESTORE}
    assert 0 < found["datacache", STATE][0] < 10_000
