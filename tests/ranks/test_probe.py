"""The network probe in a job: all ranks get the same links, and a probe that fails costs a warning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, network, probe, runtime
from hvd_ext.job.probe import rings
from hvd_ext.options import Options
from hvd_ext.topology import write
from hvd_ext.topology.tree import from_hosts
from tests.ranks.conftest import LAUNCHED_SIZE

several = pytest.mark.skipif(LAUNCHED_SIZE == 1, reason="one rank has no links")


@pytest.fixture
def job() -> runtime.Runtime:
    """The job."""
    return runtime.current()


@pytest.fixture
def options(job: runtime.Runtime, tmp_path: Path) -> Options:
    """Options with which a job measures its links, and keeps them in a folder of the test."""
    return dataclasses.replace(job.options, probe="refresh", topology=None, algorithm="auto", cache=str(tmp_path))


def hosts_of(job: runtime.Runtime) -> list[str]:
    """Two hosts if there are three ranks or more: the ranks are in one memory, but the probe need not know."""
    return [f"host{rank >= (job.engine.size + 1) // 2 and job.engine.size > 2}" for rank in range(job.engine.size)]


def agreed(job: runtime.Runtime, value: object) -> None:
    """Check that all ranks have the same value."""
    values = consensus.exchange(job.engine, "agreed", lambda: value)
    assert all(one == values[0] for one in values)


def test_all_ranks_get_the_same_links_and_a_second_job_finds_them(
    job: runtime.Runtime, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = network.of_job(job.engine, hosts_of(job), options)
    text = write.text(found.tree)
    agreed(job, text)
    if job.engine.size == 1:
        assert found == network.Network(from_hosts(["hostFalse"]))
        return
    assert found.source == network.MEASURED
    assert found.tree.ranks == from_hosts(hosts_of(job)).ranks
    assert found.tree.hosts() == from_hosts(hosts_of(job)).hosts()
    assert found.tree.handover.beta_s_per_byte > 0
    assert found.tree.selection_s_per_byte is None or found.tree.selection_s_per_byte > 0
    curves = {curve.name for curve in found.curves}
    assert curves == ({"in hosts", "between hosts"} if job.engine.size > 2 else {"in hosts"})
    assert len(list(tmp_path.iterdir())) == (job.engine.rank == 0)
    monkeypatch.setattr(network, "FASTER", np.inf)
    again = network.of_job(job.engine, hosts_of(job), dataclasses.replace(options, probe="auto"))
    assert again.source == network.KEPT
    assert write.text(again.tree) == text


def fails(job: runtime.Runtime, monkeypatch: pytest.MonkeyPatch, rank: int, what: str) -> None:
    """Let a function of the probe fail on a rank; the others find that this rank has left the probe."""

    def refuse(*_: object) -> None:
        raise InvalidError("no memory for the probe")

    if job.engine.rank == rank % job.engine.size:
        monkeypatch.setattr(rings, what, refuse)
    monkeypatch.setattr(probe, "PATIENCE_S", 2.0)


def disturbed(folder: Path, factor: float) -> None:
    """Make what was kept so many times slower, as if something had disturbed the probe; rank 0 has it."""
    for path in folder.iterdir():
        kept = json.loads(path.read_text(encoding="utf-8"))
        kept["looked"] = {name: factor * seconds for name, seconds in kept["looked"].items()}
        path.write_text(json.dumps(kept), encoding="utf-8")


@several
def test_links_that_were_measured_while_something_disturbed_them_are_measured_again(
    job: runtime.Runtime, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network.of_job(job.engine, hosts_of(job), options)
    disturbed(tmp_path, 1e6)
    before = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    with caplog.at_level("INFO"):
        again = network.of_job(job.engine, hosts_of(job), dataclasses.replace(options, probe="auto"))
    assert again.source == network.MEASURED
    agreed(job, write.text(again.tree))
    for path, text in zip(tmp_path.iterdir(), before, strict=True):
        assert path.read_text(encoding="utf-8") != text
    assert ("the links are faster than when they were measured" in caplog.text) == (job.engine.rank == 0)


@several
@pytest.mark.parametrize("what", ["look", "time_hosts"])
def test_a_look_or_a_second_measurement_that_fails_on_a_rank_leaves_the_links_that_are_kept(
    what: str,
    job: runtime.Runtime,
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    measured = network.of_job(job.engine, hosts_of(job), options)
    disturbed(tmp_path, 1e6)
    fails(job, monkeypatch, -1, what)
    again = network.of_job(job.engine, hosts_of(job), dataclasses.replace(options, probe="auto"))
    assert again.source == network.KEPT
    assert write.text(again.tree) == write.text(measured.tree)
    assert ("the planner takes those that an earlier job has measured" in caplog.text) == (job.engine.rank == 0)


@several
@pytest.mark.parametrize("failing", [0, -1])
def test_a_probe_that_fails_on_a_rank_costs_a_warning(
    failing: int,
    job: runtime.Runtime,
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    fails(job, monkeypatch, failing, "time_hosts")
    found = network.of_job(job.engine, hosts_of(job), options)
    assert found == network.Network(from_hosts(hosts_of(job)))
    assert not list(tmp_path.iterdir())
    words = [record.getMessage() for record in caplog.records if "could not be measured" in record.getMessage()]
    assert len(words) == (job.engine.rank == 0)
    prepared = job.allreduce(4000)
    assert prepared.plan
    agreed(job, prepared.digest)


def test_the_probe_leaves_the_jobs_counters_alone(job: runtime.Runtime, options: Options) -> None:
    before = job.engine.statistics()
    network.of_job(job.engine, hosts_of(job), options)
    after = job.engine.statistics()
    assert (after.buckets, after.segments) == (before.buckets, before.segments)
    assert np.isfinite(after.bytes_sent)
