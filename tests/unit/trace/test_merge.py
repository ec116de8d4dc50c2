"""Merging: good files, missing ones, torn ones, files of another run; and the command around it."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner, Result

from hvd_ext.__main__ import app
from hvd_ext.errors import InvalidError
from hvd_ext.job import recording
from hvd_ext.trace import merge
from tests.unit.trace.files import RANK_0, RANK_1, document, put, span, submitted


def run(*arguments: object) -> Result:
    """Runs the command `trace`."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["trace", *map(str, arguments)])


def test_all_ranks_are_merged(tmp_path):
    put(tmp_path, 0, RANK_0)
    put(tmp_path, 1, RANK_1, clock_uncertainty_us=30)
    merged = merge.read(tmp_path)
    assert merged.problems == []
    assert sorted(merged.ranks) == [0, 1]
    assert merged.events == RANK_0 + RANK_1
    assert merged.uncertainty_us == 32
    assert [about["rank"] for about in merged.document()["otherData"]["ranks"]] == [0, 1]


def test_missing_and_torn_files_are_named_and_the_others_merged(tmp_path):
    put(tmp_path, 0, RANK_0, size=4, dropped=12)
    torn = put(tmp_path, 2, RANK_0, size=4)
    torn.write_text(torn.read_text()[:200])
    (tmp_path / ".rank_3.json.77.tmp").write_text("{")
    merged = merge.read(tmp_path)
    assert list(merged.ranks) == [0]
    text = "\n".join(merged.problems)
    assert "rank_2.json cannot be used and is left out" in text
    assert "missing of 4 ranks: 1, 3 (killed" in text
    assert "rank 0: 12 records were dropped" in text


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ([], "must be an object with a list of traceEvents"),
        ({"traceEvents": []}, "its otherData must say job, rank, size"),
        (document(1, []), "must be the trace of rank 0, it is that of rank 1"),
        (document(0, [{"ph": "Q"}]), "ph must be one of X, i, M"),
        (document(0, [{"ph": "M", "name": 3, "pid": 0}]), "name must be a text"),
        (document(0, [{**span("step", 0, 1, 2), "dur": None}]), "dur must be a number"),
        (document(0, [{**span("step", 0, 1, 2), "args": 4}]), "args must be an object"),
    ],
)
def test_a_file_that_is_no_trace_says_why(tmp_path, broken, rule):
    (tmp_path / "rank_0.json").write_text(json.dumps(broken))
    with pytest.raises(InvalidError, match=f"no file in it can be used: rank_0.json .*{rule}"):
        merge.read(tmp_path)


def test_files_of_an_earlier_run_are_left_out_and_of_two_runs_with_as_many_files_the_newer_is_taken(tmp_path):
    os.utime(put(tmp_path, 0, RANK_0, job="old"), (1000, 1000))
    os.utime(put(tmp_path, 1, RANK_1), (2000, 2000))
    assert list(merge.read(tmp_path).ranks) == [1]
    put(tmp_path, 0, RANK_0)
    put(tmp_path, 2, [], size=3, job="old")
    merged = merge.read(tmp_path)
    assert merged.problems == ["rank_2.json is of another run and is left out"]
    assert sorted(merged.ranks) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}/empty"], "it must hold files rank_0.json"),
        (["{folder}/empty"], "set HVD_EXT_TRACE"),
        (["{folder}/nowhere"], "must be the folder of a trace, but it does not exist"),
        (["{folder}", "-o", "{folder}/no/such/x.json"], "it cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_read_or_written_is_an_error_with_words(tmp_path, arguments, words):
    put(tmp_path, 0, RANK_0, size=1)
    (tmp_path / "empty").mkdir()
    result = run(*(word.format(folder=tmp_path) for word in arguments))
    assert result.exit_code == 1
    assert words in result.output


def test_the_command_writes_the_merged_trace_and_prints_the_summary(tmp_path):
    put(tmp_path, 0, RANK_0, size=3)
    put(tmp_path, 1, RANK_1, size=3)
    result = run(tmp_path, "--summary", "-o", tmp_path / "all.json")
    assert result.exit_code == 0
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["traceEvents"] == RANK_0 + RANK_1
    words = [line.replace("│", " ").split() for line in result.output.splitlines()]
    assert ["Adam", "1", "0.040", "0.030", "75%", "0:", "0.020", "1:", "+0.064"] in words
    assert ["median", "0.040", "0.030", "75%", "0.020", "+0.064"] in words
    assert "came last: rank 1 in 1 of 1 steps; clocks agree to 0.004 ms" in result.output
    assert "missing of 3 ranks: 2" in result.output


def test_only_the_last_steps_get_a_row_and_a_trace_without_a_step_says_so(tmp_path):
    put(tmp_path, 0, [span("step", 0, 10 * n, 10 * n + 9, step=n) for n in range(30)], size=1)
    output = run(tmp_path, "--summary", "--steps", "3").output
    assert [n for n in range(30) if f" Adam {n} " in output] == [27, 28, 29]
    assert "30 steps of 1 rank;" in output
    assert (tmp_path / "trace.json").exists()
    assert run(tmp_path, "--summary", "--steps", "0").exit_code == 0
    put(tmp_path, 0, [submitted(0, 3)], size=1)
    assert "no complete step of a channel" in run(tmp_path, "--summary").output


def test_a_file_that_cannot_be_written_leaves_the_older_one_as_it_was(tmp_path):
    path = put(tmp_path, 0, RANK_0)
    before = path.read_text()
    with pytest.raises(TypeError):
        recording.write(path, {"traceEvents": [object()]})
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank_0.json"]
