"""What each benchmark refuses, how much it measures, and how it starts its jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from hvd_ext.bench import allreduce, breakdown_worker, sampling, training, training_worker
from hvd_ext.bench.cli import app
from hvd_ext.bench.jobs import Launcher, choose, place, rotated, sample_count
from hvd_ext.errors import InvalidError

# By the request of a benchmark: what its call needs, and what makes it wrong with words of the message.
REFUSED: dict[Any, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    allreduce.Request: (
        {"sizes": (4,)},
        [
            ({"ranks": (0,)}, r"ranks \(0\)"),
            ({"sizes": (6,)}, r"bytes \(6\).*multiple of 4"),
            ({"algorithms": ("rings",)}, "'rings'.*auto.*ring.*mpi, horovod, tcp, memory"),
            ({"algorithms": ("ring", "ring")}, "'ring'.*once"),
            ({"algorithms": ()}, "at least one"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"timeout_s": -1.0}, r"timeout \(-1\)"),
        ],
    ),
    breakdown_worker.Request: (
        {},
        [
            ({"schemes": ("dense", "other")}, r"scheme \('other'\)"),
            ({"schemes": ("dense", "dense")}, "named only once"),
            ({"pixels": ()}, "at least one of each"),
            ({"pixels": (8,)}, "at least 16"),
            ({"steps": 0}, r"steps \(0\)"),
            ({"timeout_s": 0}, r"timeout \(0\)"),
        ],
    ),
    training.Request: (
        {},
        [
            ({"algorithms": ("rings",)}, "'rings'.*auto.*ring.*horovod, horovod-links2"),
            ({"algorithms": ("ring", "ring")}, "'ring'.*once"),
            ({"algorithms": ()}, "at least one"),
            ({"ranks": (2, 0)}, r"ranks \(0\)"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"steps": 4}, r"steps \(4\): must be at least 5, one for each repetition"),
            ({"timeout_s": 0.0}, r"timeout \(0\)"),
            ({"buckets": ("wfbp",), "options": {"buckets": "auto"}}, "say --buckets"),
            ({"options": {"algorithm": "ring"}}, "say --algorithms"),
            ({"options": {"compression": "fp8"}}, "compression"),
        ],
    ),
}
ROWS = [
    pytest.param(request, {**needed, **changes}, words, id=f"{request.__module__.split('.')[-1]}-{words}")
    for request, (needed, wrong) in REFUSED.items()
    for changes, words in wrong
]


@pytest.mark.parametrize(("request_of", "values", "words"), ROWS)
def test_a_request_that_cannot_be_measured_is_refused(request_of: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        request_of(**values)


COMMANDS = [
    ("allreduce --bytes four", "whole numbers"),
    ("allreduce --bytes 1002", "multiple of 4"),
    ("allreduce --algorithms rings", "rings"),
    ("allreduce --json /no/such/folder/x.json", "folder"),
    ("allreduce --plot /no/such/folder/x.png", "folder"),
    ("allreduce --append", "--json"),
    ("allreduce --rate fast", "100mbit"),
    ("allreduce --launcher 'mpirun -np 2' --ranks 2", "launcher says"),
    ("allreduce --launcher mpirun\\ \\'x", "command line"),
]


@pytest.mark.parametrize(("line", "words"), COMMANDS)
def test_a_command_refuses_in_words_before_it_starts_anything(line: str, words: str) -> None:
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


def test_a_file_that_is_no_result_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("mine")
    result = CliRunner().invoke(app, ["allreduce", "--append", "--json", str(path)])
    assert result.exit_code == 1
    assert path.read_text() == "mine"


def test_a_command_that_a_launcher_starts_on_all_ranks_is_done_by_rank_0_alone() -> None:
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert names == ["allreduce", "training", "breakdown"]
    for name in names:
        for rank, status in (("1", 0), ("0", 2)):  # there is no such option
            ended = CliRunner().invoke(app, [name, "--no-such-option"], env={"OMPI_COMM_WORLD_RANK": rank})
            assert (ended.exit_code, bool(ended.output)) == (status, rank == "0"), (name, rank, ended.output)


def test_a_rank_that_knows_no_launcher_says_what_to_do() -> None:
    environment = {"OMPI_COMM_WORLD_RANK": "0", "HVD_EXT_LAUNCHER": ""}
    result = CliRunner().invoke(app, ["allreduce"], env=environment)
    assert result.exit_code == 1
    assert "--launcher" in result.output


def test_the_option_goes_before_the_environment() -> None:
    environ = {"HVD_EXT_LAUNCHER": "srun -n 4"}
    assert choose(None, environ) == Launcher("srun -n 4")
    assert choose("mpirun -np 2", environ) == Launcher("mpirun -np 2")
    assert choose(None, {}) == Launcher()
    assert (place({}), place({"OMPI_COMM_WORLD_RANK": "3"}), place({"PMI_RANK": "0"})) == (None, 3, 0)


def test_a_launcher_is_read_as_a_shell_reads_it_and_has_its_own_number_of_ranks() -> None:
    launcher = Launcher(f"{sys.executable} -m x 'a b' --")
    assert launcher.command(None, ["job", "1"]) == [sys.executable, "-m", "x", "a b", "--", "job", "1"]
    assert launcher.describe() == "python -m x 'a b' --"
    assert Launcher().describe() == "mpirun on this host"
    assert Launcher("python -m hvd_ext.cluster.launch file --").describe() == "python -m hvd_ext.cluster.launch"
    with pytest.raises(InvalidError, match="blank"):
        Launcher("  ")


TASKS: list[Any] = [
    breakdown_worker.Request(("dense",), (32, 96), 16, 32, 5, 3),
    sampling.Task(("graph", "eager"), False),
    training_worker.Task("cnn", 3, 5, {"OMPI_MCA_btl_tcp_links": "2"}),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__module__.split(".")[-1])
def test_a_task_survives_the_command_line(task: Any) -> None:
    assert type(task).read(task.write()) == task


def test_the_task_of_a_training_sets_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OMPI_MCA_btl_tcp_links"
    monkeypatch.setenv(name, "1")
    training_worker.Task("cnn", 3, 5, {name: "2"}).set_environment()
    assert os.environ[name] == "2"


@pytest.mark.parametrize(
    ("algorithms", "jobs"),
    [
        (("ring",), ["hvd_ext"]),
        (("mpi", "tcp", "memory"), ["hvd_ext"]),
        (("horovod",), ["Horovod"]),
        (("ring", "horovod"), ["hvd_ext", "Horovod"]),
    ],
)
def test_only_what_is_named_is_measured(
    algorithms: tuple[str, ...], jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_ext.bench.allreduce.has_horovod", lambda: True)
    assert list(allreduce.Request(sizes=(4,), algorithms=algorithms).jobs) == jobs


def test_what_a_size_needs_is_counted_over_both_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ext.bench.allreduce.has_horovod", lambda: True)

    def needed(how: str, *algorithms: str) -> int:
        return allreduce.Request(sizes=(4,), algorithms=algorithms, hows=(how,)).memory_of(1000)

    numpy = needed("engine", "ring", "mpi")
    assert 1000 <= numpy < needed("graph", "ring") < needed("graph", "ring", "horovod")
    assert needed("engine", "ring", "mpi", "memory") == numpy + 2000  # the yardstick's own input and result


def test_long_calls_have_fewer_samples_but_three() -> None:
    request = allreduce.Request(sizes=(4,), repetitions=30, seconds_per_row=8.0)
    assert [sample_count(request, sample_s) for sample_s in (0.005, 1.0, 2.5, 100.0)] == [30, 8, 3, 3]
    assert sample_count(allreduce.Request(sizes=(4,), repetitions=2), 0.005) == 2


def test_turns_divide_the_steps_none_is_empty_and_another_contestant_is_first_in_each() -> None:
    for steps, repetitions in ((10, 5), (10, 3), (3, 3), (7, 1)):
        request = training.Request(steps=steps, repetitions=repetitions)
        turns = [request.steps_of(repetition) for repetition in range(repetitions)]
        assert sum(turns) == steps
        assert max(turns) - min(turns) <= 1 <= min(turns)
    assert [rotated("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 2) == []


def test_a_training_with_peers_that_are_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ext.bench.training.has_horovod", lambda: False)
    monkeypatch.setattr("hvd_ext.bench.training.importlib.util.find_spec", lambda name: name == "sklearn" or None)
    for algorithms, words in (
        (tuple(training.HOROVODS), "Horovod is not installed"),
        (("multiworker",), "tf_keras is not installed"),
    ):
        with pytest.raises(InvalidError, match=words):
            training.measure(training.Request(algorithms=algorithms), Launcher(), lambda *_: None)
