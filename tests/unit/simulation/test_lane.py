"""A lane as it is played: one window over all runs, ready times of ranks, and the processor's time of messages."""

from __future__ import annotations

import random

import pytest

from hvd_ext.simulation.events import Message, Play, Program, Run

PART = 60_000
RATE_S = 1e-6


def across(alpha_s: float = 0.0, message_s: float = 0.0, gamma: float = 0.0, share: float = 1.0) -> Program:
    """Two ranks that send each other the share of a segment, in one round. The ports are numbered as in a tree."""
    messages = tuple(
        Message(share, (2 * rank, 3 - 2 * rank), alpha_s, 1 - rank, 0, gamma, message_s) for rank in range(2)
    )
    return Program(messages, ((((0,), 1, 0.0),), (((1,), 1, 0.0),)), (RATE_S,) * 4, PART)


def ends_s(runs: list[Run], window: int = 4) -> tuple[float, ...]:
    return Play(runs, window).seconds()[1]


def test_a_run_is_its_segments_one_after_another_on_the_port() -> None:
    assert ends_s([Run(across(), 1000.0, 7)]) == (pytest.approx(7e-3),)
    assert ends_s([Run(across(0.5), 1000.0, 3)], window=1) == (pytest.approx(3 * 0.501),)


def test_runs_share_the_window_so_that_the_next_begins_while_the_one_before_is_under_way() -> None:
    """With a latency of a second, four segments are in flight at once, whichever run they belong to."""
    program = across(alpha_s=1.0)
    begins, ends = Play([Run(program, 1000.0, 2), Run(program, 1000.0, 2)], 4).seconds()
    assert begins == (0.0, 0.0)
    assert ends == (pytest.approx(1.002), pytest.approx(1.004))
    begins, ends = Play([Run(program, 1000.0, 3), Run(program, 1000.0, 2)], 2).seconds()
    assert begins == (0.0, pytest.approx(1.002))
    assert ends == (pytest.approx(2.002), pytest.approx(3.003))


def test_a_run_waits_until_all_ranks_are_ready_and_for_the_runs_before_it() -> None:
    runs = [Run(across(), 1000.0, 1, ready_s) for ready_s in (5.0, 1.0, 9.0)]
    begins, ends = Play(runs, 4).seconds()
    assert begins == (5.0, 5.0, 9.0)
    assert ends == (pytest.approx(5.001), pytest.approx(5.002), pytest.approx(9.001))
    begins, ends = Play([Run(across(), 1000.0, 1, (0.0, 3.0))], 4).seconds()
    assert begins == (0.0,), "the first rank begins"
    assert ends == (pytest.approx(3.001),), "the latest rank holds up the others"


def test_runs_may_have_programs_of_their_own() -> None:
    ends = ends_s([Run(across(), 1000.0, 1), Run(across(share=0.5), 1000.0, 2)])
    assert ends == (pytest.approx(1e-3), pytest.approx(2e-3))


def test_a_message_occupies_its_sender_and_its_receiver() -> None:
    """A rank hands over one message and takes one; with several segments the processor is the narrowest place."""
    assert ends_s([Run(across(message_s=0.1), 1000.0, 1)]) == (pytest.approx(0.201),)
    many = ends_s([Run(across(message_s=0.1), 1000.0, 50)])
    assert many == (pytest.approx(50 * 0.2, rel=0.01),)
    reduced = ends_s([Run(across(message_s=0.1, gamma=1e-4), 1000.0, 1)])
    assert reduced == (pytest.approx(0.301),)


@pytest.mark.parametrize("seed", range(12))
def test_a_lane_cut_into_runs_is_the_lane_in_one(seed: int) -> None:
    rng = random.Random(seed)
    program = across(rng.random(), rng.choice([0.0, 0.01]), rng.choice([0.0, 1e-5]))
    counts = [rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
    window = rng.randint(1, 6)
    cut = ends_s([Run(program, 1000.0, count) for count in counts], window)
    assert cut[-1] == ends_s([Run(program, 1000.0, sum(counts))], window)[0]
    assert list(cut) == sorted(cut)


@pytest.mark.parametrize("seed", range(12))
def test_later_ready_times_never_end_earlier(seed: int) -> None:
    rng = random.Random(seed)
    runs = [Run(across(0.1), rng.randint(1, 9) * 1000.0, rng.randint(1, 4), rng.random()) for _ in range(6)]
    late = [Run(run.program, run.segment_nbytes, run.segments, run.ready_s + rng.random()) for run in runs]  # type: ignore[operator]
    assert all(one <= other for one, other in zip(ends_s(runs), ends_s(late), strict=True))
