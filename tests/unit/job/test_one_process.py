"""A rank is one process: children and programs that follow are refused in words, and nested launches are not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_ext.errors import InvalidError
from hvd_ext.job import one_process, runtime
from hvd_ext.job.startup_watch import Arrivals

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "12/1", "PMIX_RANK": "3"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_process, "_claimed", "")


def as_other_process(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What follows is done as by another process, which has none of this module's memory."""
    monkeypatch.setattr(one_process, "_claimed", "")
    monkeypatch.setattr(os, "getpid", lambda: number)


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("launcher", [OPEN_MPI, {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}])
def test_a_child_with_the_environment_of_a_rank_is_refused_also_with_its_memory(
    launcher: dict[str, str], forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = dict(launcher)
    one_process.claim(environ)
    one_process.claim(environ)  # init() after shutdown()
    rank = os.getpid()
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: 77)
    else:
        as_other_process(monkeypatch, 77)
    with pytest.raises(InvalidError, match=f"process 77 has the MPI environment of rank 3, which is process {rank}"):
        one_process.claim(environ)


def test_a_job_that_a_rank_launches_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = dict(OPEN_MPI)
    one_process.claim(environ)
    as_other_process(monkeypatch, 77)
    one_process.claim({**environ, "PMIX_NAMESPACE": "13/1"})


def test_a_program_that_has_replaced_the_rank_after_init_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = dict(OPEN_MPI)
    one_process.claim(environ)
    as_other_process(monkeypatch, os.getpid())
    with pytest.raises(InvalidError, match=r"replaced its program \(exec\).*call exec before init"):
        one_process.claim(environ)


@pytest.mark.parametrize("name", ["SpawnProcess-1", "SpawnPoolWorker-2"])
def test_a_child_of_multiprocessing_learns_about_the_guard_and_a_pool_ends(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: interrupted.append(arguments))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(_inheriting=True, name=name))
    said = str(one_process.refusal("3", "1234"))
    assert 'put init() below `if __name__ == "__main__":`' in said
    pool = "Pool" in name
    assert interrupted == ([(1234, signal.SIGINT)] if pool else [])
    assert ("put init() below" in capfd.readouterr().err) == pool


def test_a_fork_of_a_running_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one_process.refuse_fork("init")
    job = SimpleNamespace(process=os.getpid(), engine=SimpleNamespace(rank=3))
    monkeypatch.setattr(runtime, "_current", job)
    one_process.refuse_fork("init")
    job.process = 1
    with pytest.raises(InvalidError, match="shutdown: process .* was forked from process 1, rank 3"):
        one_process.refuse_fork("shutdown")


def test_the_mark_of_a_rank_refuses_a_process_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    variables = {**OPEN_MPI, **place, "PMIX_SERVER_TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    first = Arrivals(variables)
    first.mark()
    assert first.here() == {1: "3"}
    Arrivals(variables, start=2).mark()
    as_other_process(monkeypatch, 77)
    with pytest.raises(InvalidError, match="process 77 has the MPI environment of rank 3, which is process"):
        Arrivals(variables).mark()
