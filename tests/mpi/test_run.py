"""`hvd_ext.run`: from a notebook's cells, its errors, and that nothing of a job stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import hvd_ext as hvd
from hvd_ext.errors import InvalidError, RankError
from hvd_ext.runner.launcher import MARK, JobError, marked
from tests.mpi import jobs
from tests.waiting import until

LAUNCH = jobs.ROOT / "docs" / "launch.md"
LIMIT_S = 200.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the files of jobs written to a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def typed_in(text: str, folder: Path) -> subprocess.Popen[str]:
    """Starts Python with text that is in no file, as a notebook's cells are."""
    environment = {**jobs.environment(folder), "TMPDIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, "-"], env=environment, cwd=folder, text=True, **pipes)
    assert process.stdin is not None
    process.stdin.write(textwrap.dedent(text))
    process.stdin.close()
    process.stdin = None
    return process


def test_the_cells_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    part = LAUNCH.read_text(encoding="utf-8").split("<!-- notebook -->")[1]
    cells = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    assert len(cells) == 2 and "hvd.run(" in cells[1]
    last = """
        import numpy as np
        assert all(np.array_equal(*pair) for pair in zip(*[result["weights"] for result in results], strict=True))
        print("ranks", [result["rank"] for result in results])
    """
    process = typed_in("\n".join(cells) + textwrap.dedent(last), tmp_path)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "ranks [0, 1]" in said, said
    # rank 0's bar and its lines; the other rank's go to its file
    assert said.count("Epoch 2/2") == 1 and ("\b" in said or "\r" in said), said
    assert said.count("[rank 0] version") == 1 and "[rank 0] Adam: 1 bucket" in said, said
    assert not list(tmp_path.glob("hvd_ext_run_*"))


def test_results_come_back_by_rank_and_each_ranks_output_is_kept_where_it_was_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    factor = 10

    def place(first: int, *, second: int) -> tuple[int, int, list[int]]:
        hvd.init()
        print("rank", hvd.rank(), "begins", flush=True)
        return hvd.rank() * factor, first + second, hvd.allgather_object(hvd.rank())

    outputs = tmp_path / "outputs"
    found = hvd.run(place, (1,), {"second": 2}, np=3, output_filename=outputs, verbose=True)
    assert found == [(0, 3, [0, 1, 2]), (10, 3, [0, 1, 2]), (20, 3, [0, 1, 2])]
    shown = capfd.readouterr().out
    assert "rank 0 begins" in shown and "rank 1 begins" not in shown
    assert re.search(r"mpirun -np 3 .*--tag-output .*-m hvd_ext.runner.rank", shown)
    assert sorted(path.name for path in outputs.iterdir()) == ["rank.0.txt", "rank.1.txt", "rank.2.txt"]
    assert "rank 1 begins" in (outputs / "rank.1.txt").read_text()
    assert list(tmp_path.iterdir()) == [outputs]


def test_an_exception_of_a_rank_is_raised_with_its_rank_and_its_traceback() -> None:
    def fails() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("told to fail")
        hvd.allgather_object("rank 1 never sends this")

    with pytest.raises(RankError, match=r"run: rank 1 raised KeyError: 'told to fail'") as caught:
        hvd.run(fails, np=3)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("told to fail")' in str(caught.value)
    (named,) = re.findall(r"Its output is in (\S+),", str(caught.value))
    assert Path(named).read_text().endswith("hvd_ext: [rank 1] ended by KeyError: 'told to fail'\n")
    assert sorted(path.name for path in Path(named).parents[1].iterdir()) == ["output"]  # the files of all ranks


def test_a_result_that_does_not_pickle_is_an_error_that_says_what_to_return() -> None:
    with pytest.raises(RankError, match=r"result \(lock\): what the function returns must pickle") as caught:
        hvd.run(threading.Lock, np=1)
    assert isinstance(caught.value.__cause__, InvalidError)


def test_a_rank_that_is_killed_or_leaves_without_a_result_is_named_with_its_last_words() -> None:
    def goes(how: str) -> None:
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            print("rank 1 goes", flush=True)
            os._exit(0) if how == "leaves" else os.kill(os.getpid(), signal.SIGKILL)
        if how == "is killed":
            time.sleep(LIMIT_S)

    with pytest.raises(JobError, match=r"run: rank 1 was ended by signal 9 \(Killed\)(.|\n)*rank 1 goes"):
        hvd.run(goes, ("is killed",), np=2)
    with pytest.raises(JobError, match=r"run: rank 1 ended without a result, and mpirun with status 0(.|\n)*rank 1 go"):
        hvd.run(goes, ("leaves",), np=2)


@pytest.mark.parametrize(
    ("end", "joined"),
    [(signal.SIGINT, True), (signal.SIGKILL, False)],
    ids=["ctrl-c after init", "the program is killed before init"],
)
def test_no_process_of_a_job_outlives_its_program(end: signal.Signals, joined: bool, tmp_path: Path) -> None:
    program = f"""
        import hvd_ext as hvd

        def waits():
            import os, time
            if {joined}:
                hvd.init()
            open(f"mark{{os.environ['OMPI_COMM_WORLD_RANK']}}.part", "w").write(os.environ[{MARK!r}])
            os.rename(*(f"mark{{os.environ['OMPI_COMM_WORLD_RANK']}}{{end}}" for end in (".part", "")))
            time.sleep(3600)

        try:
            hvd.run(waits, np=2)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = typed_in(program, tmp_path)
    try:
        until(lambda: all((tmp_path / f"mark{rank}").exists() for rank in range(2)), "no rank started")
        marks = {(tmp_path / f"mark{rank}").read_text() for rank in range(2)}
        assert len(marked(MARK, *marks)) >= 3  # mpirun and its ranks
        process.send_signal(end)
        said, _ = process.communicate(timeout=LIMIT_S)
        until(lambda: not marked(MARK, *marks), "processes were left behind")
    finally:
        process.kill()
    if end == signal.SIGINT:
        assert said.endswith("interrupted\n"), said
        assert not list(tmp_path.glob("hvd_ext_run_*"))


def test_a_program_that_keras_refuses_for_horovods_argument_ends_with_what_to_do(tmp_path: Path) -> None:
    program = """
    import hvd_ext

    hvd_ext.init()
    raise TypeError("Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'")
    """
    job = jobs.run(tmp_path, program, ranks=1, launcher=[]).must_fail()
    if sys.version_info >= (3, 11):
        assert "hvd_ext: leave experimental_run_tf_function out of compile()" in job.outputs[0], job.text()
