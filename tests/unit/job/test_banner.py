"""What a job says: the lines at its start, who says them, and the rank in front of warnings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext.job import banner, log
from hvd_ext.options import Options
from hvd_ext.options.gradients import GradientOptions
from hvd_ext.planning import planner
from hvd_ext.planning.choice import Choice
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import from_hosts


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has nothing been said, by no rank."""
    monkeypatch.setattr(banner, "_said", set())
    monkeypatch.setattr(log, "_rank", {"words": ""})


@contextlib.contextmanager
def no_log() -> Iterator[None]:
    """Takes away the handlers that pytest gives to the root logger: a program that sets up no log."""
    with pytest.MonkeyPatch.context() as change:
        change.setattr(logging.getLogger(), "handlers", [])
        yield


def job(rank: int = 0, size: int = 2, **settings: Any) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(rank=rank, size=size), options=Options(**settings))


def laid_out(choices: list[tuple[str, str]], nbytes: list[int], selections: list[Any] | None = None) -> Layout:
    plan = planner.allreduce_plan(from_hosts(["a", "b"]), "ring").plan
    buckets = [
        BucketLayout("int8", (place,), hvd.Sum, plan, 64, selection=selection, choice=Choice(plan, name, why))
        for place, ((name, why), selection) in enumerate(zip(choices, selections or [None] * len(choices), strict=True))
    ]
    return Layout(
        tuple(Tensor(f"v{place}", (size // 2,), "float16") for place, size in enumerate(nbytes)), tuple(buckets)
    )


def test_the_jobs_line_has_version_ranks_and_hosts() -> None:
    assert banner.job_line(["a", "a", "b"]) == f"version {hvd.__version__}, 3 ranks on 2 hosts: a (2), b (1)"
    assert banner.job_line(["a", "b"], "TCP").endswith("2 ranks on 2 hosts: a (1), b (1); TCP between hosts")
    assert "between" not in banner.job_line(["a", "a"], "TCP")
    many = banner.job_line([f"h{number // 2}" for number in range(12)])
    assert many.endswith("12 ranks on 6 hosts: h0 (2), h1 (2), h2 (2), h3 (2) and 2 more")


def test_the_optimizers_line_has_buckets_algorithms_the_reason_and_topk() -> None:
    line = banner.optimizer_line("Adam", laid_out([("ring", "cheapest")], [4_000_000]), GradientOptions())
    assert line == "Adam: 1 bucket, 4 MB of gradients; algorithm ring: cheapest"
    two = [("tree", "it is small"), ("hitopk", "cheapest at 0.02"), ("hitopk", "cheapest at 0.02")]
    selecting, whole = Selection(dense_above=0.3), Selection(dense_above=0.0)
    line = banner.optimizer_line(
        "Adam",
        laid_out(two, [10, 500_000, 400_000], [None, selecting, whole]),
        GradientOptions(compression=hvd.TopK(0.02)),
    )
    assert line == (
        "Adam: 3 buckets, 0.9 MB of gradients; algorithm hitopk (2), tree (1): cheapest at 0.02; "
        "TopK(density=0.02) in 1 bucket"
    )
    assert (
        banner.optimizer_line("Adam", laid_out([], []), GradientOptions()) == "Adam: no rank has a gradient to reduce"
    )


def test_the_optimizers_line_says_what_steps_wait_for() -> None:
    one = laid_out([("ring", "cheapest")], [4_000_000])
    line = banner.optimizer_line("Adam", one, GradientOptions(sync="quorum", quorum=3))
    assert line.endswith("cheapest; steps do not wait for all ranks: quorum of 3, staleness 4")
    line = banner.optimizer_line("Adam", one, GradientOptions(delay=1))
    assert line.endswith("cheapest; results come one step late")


def test_the_first_of_several_ranks_says_a_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_rank(0, 2)
    for one in (job(rank=1), job(size=1), job(quiet=True)):
        banner.say(one, "what runs")
    assert capsys.readouterr().err == ""
    banner.say(job(), "what runs")
    banner.say(job(), "what runs")
    assert capsys.readouterr().err == "hvd_ext: [rank 0] what runs\n"


def test_a_programs_own_log_gets_the_line_in_its_place(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_rank(0, 2)
    with caplog.at_level(logging.INFO, "hvd_ext"):
        banner.say(job(), "what runs")
    assert caplog.messages == ["[rank 0] what runs"]
    assert capsys.readouterr().err == ""


def test_warnings_carry_the_rank_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_rank(3, 4)
    with no_log():
        logging.getLogger("hvd_ext").warning("100 %% of %s", "it")
    assert capsys.readouterr().err == "hvd_ext: [rank 3] 100 % of it\n"
    log.set_rank(0, 1)
    with no_log():
        logging.getLogger("hvd_ext").warning("alone")
    assert capsys.readouterr().err == "hvd_ext: alone\n"


def test_a_programs_own_log_gets_the_warning_and_stderr_does_not(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_rank(3, 4)
    logging.getLogger("hvd_ext").warning("once")
    assert caplog.messages == ["[rank 3] once"]
    assert capsys.readouterr().err == ""
