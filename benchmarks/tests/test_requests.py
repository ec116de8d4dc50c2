"""What each study refuses, how much it measures, and how it starts its jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from benchmarks.studies.__main__ import app
from benchmarks.studies.data import jobs as data, worker as data_worker
from benchmarks.studies.hitopk import jobs as hitopk
from benchmarks.studies.lars import jobs as lars, worker as lars_worker
from benchmarks.studies.schedule import jobs as schedule
from benchmarks.studies.stragglers import jobs as stragglers
from benchmarks.studies.topk import jobs as topk
from hvd_ext.bench.jobs import Launcher
from hvd_ext.errors import InvalidError

# By the request of a study: what its call needs, and what makes it wrong with words of the message.
REFUSED: dict[Any, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    data.Request: (
        {},
        [
            ({"parts": ("disk",)}, r"part \('disk'\): must be one of"),
            ({"parts": ("hits", "hits")}, "named only once"),
            ({"parts": ()}, "must name at least one"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"scale": 0.0}, r"scale \(0\)"),
            ({"timeout_s": 0.0}, r"timeout \(0\)"),
        ],
    ),
    lars.Request: (
        {},
        [
            ({"models": ("lenet",)}, r"model \('lenet'\): must be one of resnet50, transformer"),
            ({"parts": ()}, r"parts \(\): name at least one"),
            ({"parts": ("pto", "pto")}, r"parts \(pto, pto\): name at least one, and each only once"),
            ({"ranks": (0,)}, r"ranks \(0\): must be at least 1"),
            ({"threads": 0}, r"threads \(0\): must be at least 1"),
            ({"timeout_s": 0.0}, r"timeout \(0\): must be above 0"),
        ],
    ),
    schedule.Request: (
        {"models": ("resnet50",)},
        [
            ({"models": ()}, "at least one"),
            ({"bucketers": ("best",)}, "'best'.*auto.*single"),
            ({"bucketers": ("by_groups",)}, "'by_groups'"),
            ({"bucketers": ("auto", "auto")}, "'auto'.*once"),
            ({"algorithm": "rings"}, "'rings'.*auto.*ring"),
            ({"ratios": (float("nan"),)}, r"ratio \(nan\)"),
            ({"scale": 0.0}, r"scale \(0\)"),
            ({"ranks": (0,)}, r"ranks \(0\)"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"timeout_s": 0.0}, r"timeout \(0\)"),
        ],
    ),
    stragglers.Request: (
        {},
        [
            ({"workloads": ()}, "at least one"),
            ({"modes": ("none",)}, "'none'.*full, solo, majority, quorum, auto, delay, horovod"),
            ({"modes": ("solo", "solo")}, "'solo'.*once"),
            ({"steps": 1}, r"steps \(1\).*one for each repetition"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"ranks": (1,)}, r"ranks \(1\)"),
            ({"timeout_s": 0.0}, r"timeout \(0\)"),
        ],
    ),
    topk.Request: (
        {},
        [
            ({"inputs": ("cauchy",)}, r"input \('cauchy'\).*gauss.*sparse"),
            ({"contestants": ("tf", "tf")}, "contestants.*once"),
            ({"densities": ()}, "densities: name at least one"),
            ({"densities": (0.0,)}, r"density \(0\)"),
            ({"elements": (2**31,)}, r"elements \(2147483648\)"),
            ({"threads": (2, 0)}, r"threads \(0\)"),
            ({"repetitions": 0}, r"repetitions \(0\)"),
            ({"timeout_s": -1.0}, r"timeout \(-1\)"),
        ],
    ),
    hitopk.Request: (
        {"elements": (10,), "names": ("ring",)},
        [
            ({"names": ()}, "at least one"),
            ({"names": ("ring", "ring")}, "once"),
            ({"elements": (0,)}, "elements, ranks: each must be at least 1"),
            ({"repetitions": 0}, "repetitions, seconds per row, timeout"),
        ],
    ),
}
ROWS = [
    pytest.param(request, {**needed, **changes}, words, id=f"{request.__module__.split('.')[-2]}-{words}")
    for request, (needed, wrong) in REFUSED.items()
    for changes, words in wrong
]


@pytest.mark.parametrize(("request_of", "values", "words"), ROWS)
def test_a_request_that_cannot_be_measured_is_refused(request_of: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        request_of(**values)


COMMANDS = [
    ("data --parts hits,disks", "must be one of hits"),
    ("schedule --scale 1/0", "1/16"),
    ("schedule --scale quarter", "1/16"),
    ("topk --densities few", "must be numbers"),
    ("stragglers --append", "--json"),
]


@pytest.mark.parametrize(("line", "words"), COMMANDS)
def test_a_command_refuses_in_words_before_it_starts_anything(line: str, words: str) -> None:
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


def test_a_command_that_a_launcher_starts_on_all_ranks_is_done_by_rank_0_alone() -> None:
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        for rank, status in (("1", 0), ("0", 2)):  # there is no such option
            ended = CliRunner().invoke(app, [name, "--no-such-option"], env={"OMPI_COMM_WORLD_RANK": rank})
            assert (ended.exit_code, bool(ended.output)) == (status, rank == "0"), (name, rank, ended.output)


def test_a_launcher_has_its_own_number_of_ranks() -> None:
    launcher = Launcher(f"{sys.executable} -m x --")
    assert (lars.Request().jobs(Launcher()), lars.Request().jobs(launcher)) == ((1, 2, 4), (None,))


TASKS: list[Any] = [
    data_worker.Task("hits", "folder", 0.25, 3, ("memcpy", "cache"), {"side": 32}),
    lars_worker.Task("folder", ("resnet50",), (lars_worker.NORMS, lars_worker.PTO), 7, 3, 1),
    topk.Request(inputs=("gauss", "nan"), densities=(0.01,)).task(Path("folder"), 1),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__module__.split(".")[-2])
def test_a_task_survives_the_command_line(task: Any) -> None:
    assert type(task).read(task.write()) == task


def test_turns_divide_the_steps() -> None:
    assert [stragglers.Request(steps=7, repetitions=3).first_of(number) for number in range(4)] == [0, 2, 4, 7]


def test_full_is_always_measured_and_first() -> None:
    assert stragglers.Request(modes=("solo", "horovod", "full")).ours == ("full", "solo")
    assert stragglers.Request(modes=("horovod",)).ours == ("full",)


def test_hard_inputs_and_several_threads_have_fewer_contestants(tmp_path: Path) -> None:
    request = topk.Request(inputs=("gauss", "nan"), threads=(1, 2), densities=(0.01,))
    one, two = request.task(tmp_path, 1), request.task(tmp_path, 2)
    assert set(one.contestants["gauss"]) == set(topk.NAMES)
    assert set(one.contestants["nan"]) == set(topk.FOR_HARD)
    assert set(two.contestants["gauss"]) == set(topk.NAMES) - set(topk.ONE_THREAD)
    assert request.groups() == 4


def test_a_small_data_set_is_a_part_of_the_large_one_but_two_batches() -> None:
    task = data_worker.Task("hits", "folder", 0.25, 3, ("memcpy",), {})
    assert (task.count(1000, 10), task.count(10, 10)) == (250, 20)


def test_what_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data.PACKAGES, "grain", ("no_such_package", "Grain is left out"))
    request = data.Request(parts=("hits",), contestants=("memcpy", "grain"))
    assert request.of("hits") == ("memcpy",)
    assert request.notes() == ["Grain is left out"]
    assert data.Request(parts=("half",)).notes() == []
    assert len(data.Request(parts=("half",), scale=0.5).notes()) == 1
