"""The data cache in whole jobs: killed, two at a time, one after the other, at its limits, on hosts, with Keras.

Each job writes down what it has decoded and seen, and checks every byte itself (`cached.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hvd_ext.cluster.spec import Spec
from hvd_ext.data import native
from hvd_ext.runner.launcher import marked
from tests import epoch_order as order
from tests.mpi import cached, jobs
from tests.mpi.faulty import left_of, running
from tests.mpi.fork_server import OUTPUT

Limited = tuple[dict[str, Any], list[str]]  # what a job at its limits has counted, and its lines
Trained = tuple[dict[int, dict[str, Any]], Path]  # the results of jobs by their ranks, and their folder

PROGRAM = str(Path(cached.__file__))
SHARED_MEMORY = Path("/dev/shm")


def started(folder: Path, task: str, ranks: int = 0, /, forked: bool = True, **settings: Any) -> jobs.Job:
    """Runs a job to its end; without a launcher where ranks are 0."""
    folder.mkdir()
    launcher = None if ranks else []
    # what Open MPI leaves of a job that was killed stays in the test's folder
    changes = {"OMPI_MCA_btl_vader_backing_directory": str(folder), "OMPI_MCA_orte_tmpdir_base": str(folder)}
    program = [PROGRAM, task, json.dumps(settings)]
    return jobs.run(folder, program, ranks=ranks or 1, launcher=launcher, changes=changes, forked=forked)


def noted(folder: Path, what: str) -> list[int]:
    """The numbers of samples that a job has decoded or seen."""
    path = folder / what
    return np.fromfile(path, "<i8").tolist() if path.exists() else []


def result(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"result{rank}.json").read_text())


def index_of(disk: Path, name: str) -> Path:
    """The index of a cache on disk, of which there must be one."""
    (index,) = disk.glob(f"*/{name}-*/index")
    return index


def kept_files(name: str) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"hvd_ext-*-{name}-*"))


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cache that no other test has; its memory that stays is deleted."""
    one = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield one
    for path in kept_files(one):
        path.unlink()


SAMPLES = 1000
SLOW = {"samples": SAMPLES, "nbytes": 20_000, "pause_s": 0.002}


def kill(folder: Path, chance: random.Random, **settings: Any) -> None:
    """Has a job fill a cache, and kills all of its processes at a random instant."""
    goal, pause_s = chance.randint(1, SAMPLES // 6), chance.uniform(0, 0.02)
    with ThreadPoolExecutor(1) as pool:
        # ranks that are killed are found by their environment
        job = pool.submit(started, folder, "fill", 2, forked=False, caches=[settings])
        try:
            end_s = time.monotonic() + jobs.LIMIT_S
            while len(noted(folder, "decoded")) < goal:
                assert not job.done(), job.result().text()
                assert time.monotonic() < end_s
                time.sleep(0.005)
            assert len(marked(OUTPUT, str(folder))) >= 3, "the launcher and two ranks"
            time.sleep(pause_s)
        finally:
            living = list(marked(OUTPUT, str(folder)))
            chance.shuffle(living)
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        ended = job.result()
    assert not ended.timed_out and ended.code != 0, ended.text()
    assert not any("Traceback" in output for output in ended.outputs), ended.text()
    assert len(noted(folder, "decoded")) < SAMPLES
    assert left_of(folder) == []


def test_jobs_that_are_killed_while_they_fill_a_cache_leave_right_samples_and_nothing_else(
    tmp_path: Path, name: str
) -> None:
    chance = random.Random()
    disk, kept = tmp_path / "disk", f"{name}-kept"
    on_disk = {"name": name, "memory": "8MB", "disk": str(disk), "keep": False, **SLOW}
    in_memory = {"name": kept, "memory": "40MB", "disk": None, "keep": True, **SLOW}
    done: set[int] = set()
    for number in range(2):
        folder = tmp_path / f"job {number}"
        before = native.about(index_of(disk, name)).records if number else 0
        kill(folder, chance, **on_disk, seed=number)
        decoded = noted(folder, "decoded")
        assert len(done.intersection(decoded)) <= 0.01 * len(done)
        after = native.about(index_of(disk, name)).records
        assert before < after <= before + len(decoded)
        done.update(noted(folder, "seen"))
        assert not kept_files(name)
    folder = tmp_path / "job in memory"
    kill(folder, chance, **in_memory, seed=4)
    (file,) = kept_files(kept)
    assert file.stat().st_mode & 0o777 == 0o600
    stored = {name: native.about(index_of(disk, name)).records, kept: native.about(file).records}

    last = tmp_path / "last"
    started(last, "fill", 2, caches=[{**on_disk, "seed": 5}, {**in_memory, "seed": 6, "clear": True}]).must_succeed()
    assert left_of(last) == []
    assert not kept_files(name)
    for place, one in enumerate((name, kept)):
        of_ranks = [result(last, rank)[place] for rank in range(2)]
        loaded = sum(stats["loaded"] for stats in of_ranks)
        print(f"{one}: {stored[one]} records were finished, {loaded} of {SAMPLES} samples were loaded")
        assert sum(stats["hits"] for stats in of_ranks) + loaded == SAMPLES
        assert SAMPLES - loaded >= 0.99 * stored[one] > 0
        assert sum(stats["damaged"] for stats in of_ranks) == 0


FILES = 400


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two jobs that fill one cache together, and of a later one that reads it.

    Before the later job the source's files lose their bytes, and keep their names, sizes and times.
    """
    path = tmp_path_factory.mktemp("caches")
    source, meet = path / "source", path / "meet"
    own = {"source": str(source), "disk": str(path / "disk")}
    cached.write_files(source, FILES)
    meet.mkdir()
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(started, path / f"together {seed}", "together", seed=seed, meet=str(meet), **own)
            for seed in range(2)
        ]
        for job in both:
            job.result().must_succeed()
    for file in source.iterdir():
        times = file.stat()
        os.truncate(file, 0)
        os.truncate(file, times.st_size)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    started(path / "later", "later", **own).must_succeed()
    return path


def test_two_jobs_fill_one_cache_together(of: Path) -> None:
    decoded = []
    for seed in range(2):
        folder = of / f"together {seed}"
        numbers, stats = result(folder)
        assert sorted(numbers) == list(range(FILES))
        assert stats["hits"] + stats["loaded"] == FILES
        assert stats["damaged"] == 0
        decoded.append(noted(folder, "decoded"))
    again = len(decoded[0]) + len(decoded[1]) - FILES
    print(f"decoded: {len(decoded[0])} and {len(decoded[1])} of {FILES}")
    assert set(decoded[0] + decoded[1]) == set(range(FILES))
    assert 0 <= again <= 0.01 * FILES


def test_the_next_job_on_the_host_reads_nothing_from_the_source_and_decodes_nothing(of: Path) -> None:
    numbers, stats, first_s = result(of / "later")
    assert sorted(numbers) == list(range(FILES))  # with the bytes that the files have no more
    assert (stats["loaded"], stats["damaged"], stats["passed_through"]) == (0, 0, 0)
    assert stats["memory_records"] < FILES == stats["disk_records"]
    print(f"first batch {first_s:.2f} s after opening")


GROUP_NBYTES = 200_000_000
NO_TMPFS = "a small disk cannot be mounted here: it needs root"
NO_CGROUP = "there is no cgroup here whose memory this process may limit"


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[str]:
    """A disk of 12 MB; nothing where it cannot be mounted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)], capture_output=True, check=False
    )
    try:
        yield "" if mounted.returncode else str(path)
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def cgroup() -> Iterator[str]:
    """A cgroup with a limit of memory, below that of this process; nothing where it cannot be made."""
    made = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        limit = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = Path(hierarchy + path) / f"hvd_ext-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            made = folder
            (folder / limit).write_text(str(GROUP_NBYTES))
            break
    else:
        if made is not None:
            made.rmdir()
        made = None
    try:
        yield str(made or "")
    finally:
        if made is not None:
            made.rmdir()


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Limited:
    """What a job at its limits has counted, and its lines."""
    path = tmp_path_factory.mktemp("limits")
    with small_disk(path / "small") as disk, cgroup() as group:
        job = started(path / "job", "limits", small_disk=disk, cgroup=group).must_succeed()
    return result(path / "job"), job.outputs[0].splitlines()


def warned(lines: list[str], name: str, words: str) -> None:
    """Checks that there was one warning of a cache, with these words."""
    of_cache = [line for line in lines if f"cache '{name}'" in line]
    assert len(of_cache) == 1, lines
    assert words in of_cache[0]


def test_a_disk_that_is_full_takes_no_more_and_training_goes_on(limited: Limited) -> None:
    outcome, lines = limited
    if "disk" not in outcome:
        pytest.skip(NO_TMPFS)
    epochs, stats = outcome["disk"]
    assert [sorted(epoch) for epoch in epochs] == [list(range(60))] * 2
    warned(lines, "full", "No space left on device")
    assert 20 <= stats["disk_records"] == stats["hits"] <= 31  # 12 MiB of 400 kB each
    assert stats["loaded"] == 120 - stats["hits"]
    assert not stats["disk_open"]


def test_a_job_whose_samples_are_larger_than_its_cgroup_is_not_killed(limited: Limited) -> None:
    outcome, lines = limited
    if "cgroup" not in outcome:
        pytest.skip(NO_CGROUP)
    epochs, stats = outcome["cgroup"]
    assert [sorted(epoch) for epoch in epochs] == [list(range(300))] * 2
    warned(lines, "grouped", " must stay free")
    assert 50 < stats["memory_records"] < GROUP_NBYTES / 1_000_000
    assert stats["hits"] == stats["memory_records"]
    assert stats["loaded"] == 600 - stats["hits"]


@pytest.mark.cluster
def test_each_host_has_memory_and_a_folder_of_its_own_with_its_own_part(tmp_path: Path) -> None:
    disk, samples = tmp_path / "disk", 240
    settings = {"disk": str(disk), "samples": samples}
    program = f"from tests.mpi import cached\ncached.main(['hosts', {json.dumps(settings)!r}])\n"
    folder = tmp_path / "job"
    folder.mkdir()
    with running(folder, Spec((2, 1), rate="1gbit"), program) as job:
        job.end()
        assert job.status == 0, job.text()
    ranks = [result(folder, rank) for rank in range(3)]
    assert [one["host"] for one in ranks] == ["h1", "h1", "h2"]
    for rank, one in enumerate(ranks):
        assert [sorted(epoch) for epoch in one["epochs"]] == [list(range(rank, samples, 3))] * 2
        records = samples // 3 * (2 if one["host"] == "h1" else 1)
        assert (one["first"]["memory_records"], one["first"]["disk_records"]) == (records, records)
        assert one["second"]["loaded"] == one["first"]["loaded"] == samples // 3
        assert one["second"]["memory_hits"] == samples // 3
        (index,) = (disk / one["host"]).glob("hosts-*/index")
        assert native.about(index).records == records
    assert sorted(noted(folder, "decoded")) == list(range(samples))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What jobs of 4, 2 and 1 ranks have trained on, each from where the one before was stopped."""
    path = tmp_path_factory.mktemp("trained")
    found = {}
    for ranks in (4, 2, 1):
        folder = path / f"{ranks} ranks"
        started(folder, "train", ranks, folder=str(path), disk=str(path / "disk")).must_succeed()
        found[ranks] = result(folder)
    return found, path


def numbers_of(steps: list[Any]) -> list[list[int]]:
    return [sorted(int(row[0]) for row in step) for step in steps]


def seeds_of(steps: list[Any], first: int) -> dict[tuple[int, int], tuple[float, float]]:
    """The seeds of each sample in each epoch of 5 steps."""
    return {((first + at) // 5, int(row[0])): tuple(row[1:]) for at, step in enumerate(steps) for row in step}


def test_training_that_was_stopped_goes_on_bit_for_bit_on_as_many_ranks(trained: Trained) -> None:
    first = trained[0][4]
    assert len(first["whole"]) == 15
    assert first["steps"] == first["whole"][:8]
    assert first["same"] == first["whole"][7:]  # saved after 7 steps
    assert len(first["equal"]) > 2
    assert all(first["equal"])


def test_on_any_number_of_ranks_each_step_has_the_same_samples_with_the_same_seeds(trained: Trained) -> None:
    found, path = trained
    wanted = []
    for epoch in range(3):
        numbers = order.numbers(np.arange(5 * 8), seed=3, epoch=epoch, samples=43, parts=4)
        wanted += [sorted(step) for step in numbers.reshape(5, 8).tolist()]
    whole = found[4]["whole"]
    assert numbers_of(whole) == wanted
    seeds = seeds_of(whole, 0)
    assert len(set(seeds.values())) == len(seeds) == 15 * 8
    for ranks, begin, end in ((2, 7, 12), (1, 11, 15)):
        steps = found[ranks]["steps"]
        assert numbers_of(steps) == wanted[begin:end]
        own = seeds_of(steps, begin)
        assert own == {key: seeds[key] for key in own}
        # what the first job has decoded is on the disk
        assert not set(noted(path / "4 ranks", "decoded")) & set(noted(path / f"{ranks} ranks", "decoded"))
