"""What a job says: the lines at its start, the rank in front of warnings, and what is lost at its end."""

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
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.planner import Choice
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import from_hosts


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has nothing been said, by no rank."""
    monkeypatch.setattr(banner, "_logged", set())
    monkeypatch.setattr(log, "_rank", {"words": ""})


@contextlib.contextmanager
def no_log() -> Iterator[None]:
    """Takes away the handlers that pytest gives to the root logger: a program that sets up no log."""
    with pytest.MonkeyPatch.context() as change:
        change.setattr(logging.getLogger(), "handlers", [])
        yield


def job(rank: int = 0, size: int = 2, **settings: Any) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(rank=rank, size=size), options=Options(**settings))


def laid_out(*buckets: tuple[str, str, int, Any]) -> Layout:
    """Lays out buckets of one gradient: the algorithm, why it was chosen, bytes, and the selection of `TopK`."""
    plan = planner.allreduce_plan(from_hosts(["a", "b"]), "ring").plan
    tensors = [Tensor(f"v{place}", (nbytes // 2,), "float16") for place, (_, _, nbytes, _) in enumerate(buckets)]
    made = [
        BucketLayout("int8", (place,), hvd.Sum, plan, 64, selection=selection, choice=Choice(plan, name, why))
        for place, (name, why, _, selection) in enumerate(buckets)
    ]
    return Layout(tuple(tensors), tuple(made))


def test_the_jobs_line_has_version_ranks_and_hosts() -> None:
    assert banner.job_line(["a", "a", "b"]) == f"version {hvd.__version__}, 3 ranks on 2 hosts: a (2), b (1)"
    assert banner.job_line(["a", "b"], "TCP").endswith("2 ranks on 2 hosts: a (1), b (1); TCP between hosts")
    assert "between" not in banner.job_line(["a", "a"], "TCP")
    many = banner.job_line([f"h{number // 2}" for number in range(12)])
    assert many.endswith("12 ranks on 6 hosts: h0 (2), h1 (2), h2 (2), h3 (2) and 2 more")


ONE = laid_out(("ring", "cheapest", 4_000_000, None))
THREE = laid_out(
    ("tree", "it is small", 10, None),
    ("hitopk", "cheapest at 0.02", 500_000, Selection(dense_above=0.3)),
    ("hitopk", "cheapest at 0.02", 400_000, Selection(dense_above=0.0)),
)
CHEAPEST = "1 bucket, 4 MB of gradients; algorithm ring: cheapest"
WAITING = "steps do not wait for all ranks: quorum of 3, staleness 4"
SELECTING = (
    "3 buckets, 0.9 MB of gradients; algorithm hitopk (2), tree (1): cheapest at 0.02; TopK(density=0.02) in 1 bucket"
)


@pytest.mark.parametrize(
    ("layout", "options", "line"),
    [
        (laid_out(), {}, "no rank has a gradient to reduce"),
        (ONE, {}, CHEAPEST),
        (ONE, {"delay": 1}, f"{CHEAPEST}; results come one step late"),
        (ONE, {"sync": "quorum", "quorum": 3}, f"{CHEAPEST}; {WAITING}"),
        (THREE, {"compression": hvd.TopK(0.02)}, SELECTING),
    ],
)
def test_the_optimizers_line_has_buckets_algorithms_the_reason_topk_and_what_steps_wait_for(
    layout: Layout, options: dict[str, Any], line: str
) -> None:
    assert banner.optimizer_line("Adam", layout, GradientOptions(**options)) == f"Adam: {line}"


def test_the_first_of_several_ranks_says_a_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_rank(0, 2)
    for one in (job(rank=1), job(size=1), job(quiet=True)):
        banner.say(one, "what runs")
    assert capsys.readouterr().err == ""
    banner.say(job(), "what runs")
    banner.say(job(), "what runs")
    assert capsys.readouterr().err == "hvd_ext: [rank 0] what runs\n"


def test_warnings_carry_the_rank_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    with no_log():
        log.set_rank(3, 4)
        logging.getLogger("hvd_ext").warning("100 %% of %s", "it")
        log.set_rank(0, 1)
        logging.getLogger("hvd_ext").warning("alone")
    assert capsys.readouterr().err == "hvd_ext: [rank 3] 100 % of it\nhvd_ext: alone\n"


def test_a_programs_own_log_gets_lines_and_warnings_and_stderr_does_not(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_rank(0, 2)
    with caplog.at_level(logging.INFO, "hvd_ext"):
        banner.say(job(), "what runs")
    log.set_rank(3, 4)
    logging.getLogger("hvd_ext").warning("once")
    assert caplog.messages == ["[rank 0] what runs", "[rank 3] once"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "step", "words"),
    [(4, 5, "gradients of step 5 on"), (4, 7, "gradients of steps 5 to 7 on"), (5, 5, "gradients it held on")],
)
def test_the_steps_are_named_whose_gradients_are_lost(given: int, step: int, words: str) -> None:
    assert words in banner.lost(given, step)
