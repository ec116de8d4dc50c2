"""`hvd_ext.run` without a job: what it refuses, the command that it would run, and how the end of a job is told."""

from __future__ import annotations

import inspect
import io
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import hvd_ext as hvd
from hvd_ext import runner
from hvd_ext.errors import HvdExtError, InvalidError, RankError
from hvd_ext.runner import ended, handover, launcher
from hvd_ext.runner.handover import Files, Outcome, Shown
from hvd_ext.runner.launcher import JobError


@pytest.mark.parametrize("name", runner.REFUSED)
def test_what_has_no_meaning_here_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(InvalidError, match=rf"run: {name} \(3\) has no meaning here: ") as caught:
        hvd.run(print, **{name: 3})
    assert runner.REFUSED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"np": 0}, r"num_proc \(0\): must be a whole number of ranks, at least 1"),
        ({"num_proc": True}, r"num_proc \(True\): must be"),
        ({"np": "4"}, r"num_proc \('4'\): must be"),
        ({"num_proc": 2, "np": 4}, "two names of one number"),
        ({"hosts": "a:1", "hostfile": "b"}, "hosts and hostfile both say"),
        ({"hostfile": "/nowhere/hosts"}, "there is no such file"),
        ({"args": "text"}, "args .*must be a tuple or a list"),
        ({"args": 3}, "args .*must be a tuple or a list"),
        ({"kwargs": [1]}, "kwargs .*must be a dictionary"),
        ({"func": 3}, "func .*must be a function"),
        (
            {"func": len, "args": (threading.Lock(),)},
            r"func \(len\): it, its arguments .* must pickle: .*inside of the",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        hvd.run(**{"func": print, **keywords})


def test_a_rank_of_a_job_does_not_start_another_and_more_ranks_than_cores_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "find", lambda program: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    for ranks, messages in ((2, []), (3, ["run: 3 ranks share 2 cores of this machine: they take turns"])):
        with pytest.raises(JobError, match=r"mpirun: .*doctor"):
            hvd.run(print, np=ranks)
        assert caplog.messages == messages
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(InvalidError, match="this process is one of 4 ranks already"):
        hvd.run(print)


def test_arguments_of_the_launch_reach_mpirun(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    made = runner._options(None, str(tmp_path / "hosts"), 22, "key", "eth0,eth1", "--mca x 'y z'")
    words = made({"HVD_EXT_QUIET": "1", "PYTHONPATH": "p", "HOME": "h"})
    assert words[:2] == ["--hostfile", str(tmp_path / "hosts")]
    assert words[2:5] == ["--mca", "plm_rsh_args", "-p 22 -i key"]
    assert words[words.index("btl_tcp_if_include") + 1] == words[words.index("oob_tcp_if_include") + 1] == "eth0,eth1"
    assert words[words.index("x") - 1 : words.index("x") + 2] == ["--mca", "x", "y z"]
    sent = {word for flag, word in itertools.pairwise(words) if flag == "-x"}
    assert sent == {"HVD_EXT_QUIET", "PYTHONPATH", launcher.MARK}
    assert runner._options(None, None, None, None, None, None)({"PATH": "p"}) == []


def test_the_cores_are_dealt_out_unless_the_user_has_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    for name in runner._THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    environment = runner._environment(2, elsewhere=False)
    assert [environment[name] for name in runner._THREADS] == ["5", "4", "4"]
    assert "TF_NUM_INTRAOP_THREADS" not in runner._environment(2, elsewhere=True)


def files(folder: Path, **outcomes: Outcome) -> Files:
    """Gives the files of a job that has ended, with the outcomes of ranks "r0", "r1", ..."""
    made = Files(folder, folder / "output")
    made.outputs.mkdir(parents=True)
    for rank in range(3):
        made.output(rank).write_text(f"rank {rank}'s last line\n")
    for name, outcome in outcomes.items():
        made.write_outcome(int(name[1:]), outcome)
    return made


def returned(value: object) -> Outcome:
    return Outcome(pickle.dumps(value))


def test_the_first_rank_that_failed_by_itself_is_the_one_that_is_raised(tmp_path: Path) -> None:
    gone = Outcome(error="CommunicationError: rank 2 has shut down", consequence=True, at_s=1.0)
    first = Outcome(error="ValueError: a", traceback="the lines", exception=pickle.dumps(ValueError("a")), at_s=2.0)
    later = Outcome(error="ValueError: b", at_s=3.0)
    with pytest.raises(RankError, match=r"run: rank 2 raised ValueError: a\n(.|\n)*On rank 2:\nthe lines") as caught:
        ended.results(files(tmp_path, r0=gone, r1=later, r2=first), 3, 1)
    assert (caught.value.rank, caught.value.remote_traceback) == (2, "the lines")
    assert isinstance(caught.value.__cause__, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).rank == 2


def test_exceptions_and_results_that_cannot_be_read_here_are_told_with_their_rank(tmp_path: Path) -> None:
    unknown = b"cno_such_module\nOdd\n."
    with pytest.raises(RankError, match="rank 0 raised Odd: no") as caught:
        ended.results(files(tmp_path, r0=Outcome(error="Odd: no", exception=unknown, at_s=1.0)), 1, 1)
    assert caught.value.__cause__ is None
    made = files(tmp_path / "other", r0=returned([1]), r1=Outcome(unknown))
    with pytest.raises(HvdExtError, match="the result of rank 1 cannot be read in this process: .*no_such_module"):
        ended.results(made, 2, 0)
    assert ended.results(made, 1, 0) == [[1]]


def test_a_signal_is_the_cause_where_the_others_only_say_that_a_rank_is_gone(tmp_path: Path) -> None:
    made = files(tmp_path, r0=Outcome(error="CommunicationError: rank 1 has shut down", consequence=True))
    words = "mpirun noticed that process rank 1 with PID 7 on node n exited on signal 11 (Segmentation fault).\n"
    made.launcher.write_text(words)
    with pytest.raises(JobError, match=r"rank 1 was ended by signal 11 \(Segmentation fault\)\. (.|\n)*rank 1's last"):
        ended.results(made, 2, 139)
    made.launcher.unlink()
    with pytest.raises(RankError, match="rank 0 raised CommunicationError: rank 1 has shut down"):
        ended.results(made, 2, 1)


def test_ranks_without_a_result_and_jobs_that_never_start_are_told_apart(tmp_path: Path) -> None:
    made = files(tmp_path, r1=returned(5))
    with pytest.raises(
        JobError, match=r"ranks 0, 2 ended without a result, and mpirun with status 3\. (.|\n)*rank 0's"
    ):
        ended.results(made, 3, 3)
    for path in made.outputs.iterdir():
        path.unlink()
    made.launcher.write_text("no such host\n")
    with pytest.raises(JobError, match="no rank has started; mpirun ended with status 3: no such host"):
        ended.results(made, 1, 3)


def test_what_a_rank_prints_is_shown_in_pieces_as_it_was_written(tmp_path: Path) -> None:
    shown, stream = Shown(tmp_path / "rank.0.txt"), io.StringIO()
    shown.more(stream)
    for piece in (b"1/2 \xe2", b"\x94\x81", b"\r2/2\n"):
        with (tmp_path / "rank.0.txt").open("ab") as file:
            file.write(piece)
        shown.more(stream)
    assert stream.getvalue() == "1/2 ━\r2/2\n"


def test_the_text_of_cells_goes_along_and_what_is_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "<cell 1>": (3, 0.0, ["x\n"], "<cell 1>"),
        __file__: (3, 0.0, ["y\n"], __file__),
        "lazy": (lambda: "",),
    }
    monkeypatch.setattr("linecache.cache", entries)
    assert handover._cells() == {"<cell 1>": ["x\n"]}


def test_other_names_of_horovods_runner_say_what_to_use() -> None:
    assert hvd.runner.run is hvd.run
    with pytest.raises(AttributeError, match="only hvd_ext.run"):
        hvd.runner.launch  # noqa: B018
    assert "func" in inspect.signature(hvd.run).parameters
