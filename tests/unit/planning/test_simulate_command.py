"""`python -m hvd_ext simulate`: its table, its files, its errors, and the commands of docs/simulator.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_ext.__main__ import app as main
from hvd_ext.commands.figures import BUCKETERS
from hvd_ext.commands.simulate import app
from hvd_ext.commands.simulate_plots import FILES
from hvd_ext.planning import step_times
from tests.unit.drawing import assert_colours_differ, assert_readable

PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulator.md"
MODEL = """\
forward_seconds,0.010
update_seconds,0.002
name,elements,backward_seconds
output/bias,1000,0.0005
output/kernel,2048000,0.002
convolution/kernel,2359296,0.006
"""
YAML = """\
name: cluster
link: {alpha_s: 30.0e-6, gbit_per_s: 10}
children:
  - {name: left, link: {alpha_s: 5.0e-6, gbit_per_s: 16}, ranks: [0, 1]}
  - {name: right, link: {alpha_s: 5.0e-6, gbit_per_s: 16}, ranks: [2, 3]}
"""
COLUMNS = {"ranks", "bucketer", "algorithm", "buckets", "iteration_seconds", "exposed_seconds", "speedup", "efficiency"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a cluster, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.csv").write_text(MODEL)
    (tmp_path / "empty.csv").write_text("forward_seconds,0.01\nname,elements,backward_seconds\n")
    (tmp_path / "cluster.yaml").write_text(YAML)
    return tmp_path


def command(*arguments: str) -> tuple[int, str]:
    """Runs the command; gives its status and all that it prints, with the spaces of tables taken out."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, " ".join(done.output.split())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_of_the_issue_writes_a_row_for_each_number_of_ranks_and_bucketer(folder: Path) -> None:
    bucketers = "wfbp,single,by_size,mgwfbp,optimal"
    arguments = ["--topology", "cluster.yaml", "--trace", "model.csv", "--bucketers", bucketers]
    status, said = command(*arguments, "--algorithms", "auto,ring", "--ranks", "2,4,8", "--json", "out.json")
    assert status == 0, said
    found = rows(folder / "out.json")
    assert len(found) == 3 * 2 * 5 and all(set(row) >= COLUMNS for row in found)
    assert [row["ranks"] for row in found[::10]] == [2, 4, 8]
    for row in found:
        assert row["iteration_seconds"] == pytest.approx(0.0205 + row["exposed_seconds"])
        assert row["efficiency"] == pytest.approx(0.0205 / row["iteration_seconds"])
        assert row["speedup"] == pytest.approx(row["ranks"] * row["efficiency"])
    assert "forward pass 10 ms, backward pass 8.5 ms, and 2 ms for the update; 3 tensors, 17,633,184 bytes" in said
    assert "8 ranks: " in said and " times as fast as single with ring" in said


def test_a_price_without_a_cluster_is_mgwfbps_line(folder: Path) -> None:
    arguments = ["--trace", "model.csv", "--allreduce-cost", "1e-3,1e-9", "--ranks", "16", "--json", "out.json"]
    status, said = command(*arguments, "--bucketers", "single", "--what-if")
    assert status == 0, said
    row, *changes = rows(folder / "out.json")
    assert (row["ranks"], row["buckets"]) == (16, 1)
    assert row["exposed_seconds"] == pytest.approx(1e-3 + 17_633_184e-9)
    assert {change["what_if"] for change in changes} > {"as it is", "updates one step late"}
    assert "best: " in said and "--allreduce-cost holds for one number of ranks" in said


def test_plots_are_drawn_of_all_bucketers(folder: Path, seen: list[Any]) -> None:
    arguments = ["--trace", "model.csv", "--topology", "cluster.yaml", "--ranks", "2,4,8", "--plots", "plots"]
    status, said = command(*arguments)
    assert status == 0, said
    assert [path.name for path in sorted((folder / "plots").iterdir())] == sorted(FILES)
    bars, speedup, step = seen
    labels = [text.get_text() for text in speedup.legends[0].get_texts()]
    assert labels == ["linear", "wfbp", "single", "by_size", "mgwfbp", "optimal"]
    assert [tick.get_text() for tick in bars.axes[0].get_xticklabels()] == ["2", "4", "8"]
    assert len(step.axes) == 5 and "8 ranks" in step.axes[0].get_title()
    for drawn in seen:
        assert_readable(drawn)
    assert_colours_differ({"bucketers": [colour for colour, _ in BUCKETERS.values()]})


def test_what_is_assumed_is_said_and_a_model_of_a_paper_is_written_as_a_file_that_can_be_read(folder: Path) -> None:
    arguments = "--preset blueconnect-ibm --model resnet50 --bucketers single --write-model resnet.csv"
    status, said = command(*arguments.split())
    assert status == 0, said
    assert "that of the step from BlueConnect, Section 4.2: 32 pictures on a P100" in said
    assert "between hosts 100gbit each way and 5 us a message" in said and "from BlueConnect, Section 4.1" in said
    assert len(step_times.read(folder / "resnet.csv").tensors) == 161
    arguments = "--model resnet50 --compute 0.3 --write-model resnet.csv --hosts 2,2 --bucketers single"
    assert "assumed; --rate sets the rate" in command(*arguments.split())[1]
    assert step_times.read(folder / "resnet.csv").computed_s == pytest.approx(0.3)


MODEL_ON_FOUR = "--hosts 2,2 --trace model.csv"
ON_A_LINE = "--trace model.csv --allreduce-cost"
PARTIAL = "--topology cluster.yaml --trace model.csv"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2", "name the model with either --trace FILE or --model NAME"),
        ("--hosts 2 --trace no.csv", "model file no.csv: it cannot be read: No such file"),
        ("--hosts 2 --trace cluster.yaml", "cluster.yaml, line 1: must be 'forward_seconds,VALUE'"),
        ("--hosts 2 --trace empty.csv", "model file empty.csv: it has no tensors or no computation"),
        ("--hosts 2 --trace model.csv --compute 1", "--compute 1: the times are in the file"),
        ("--hosts 2 --model alexnet", "model 'alexnet': must be one of resnet50, "),
        ("--preset comlib --model resnet50", "preset 'comlib': must be one of mgwfbp-8, "),
        ("--topology no.yaml --model resnet50", "topology file no.yaml: it cannot be read"),
        (f"{MODEL_ON_FOUR} --bucketers best", "bucketer 'best': must be one of "),
        (f"{MODEL_ON_FOUR} --bucketers wfbp,,", "--bucketers 'wfbp,,': it lists names"),
        (f"{MODEL_ON_FOUR} --algorithms circle", "'circle'"),
        (f"{MODEL_ON_FOUR} --ranks 5", "have 4 or 6 ranks; name one of them"),
        ("--hosts 4 --trace model.csv --ranks 8", "says nothing of a link to others"),
        (f"{MODEL_ON_FOUR} --ranks 4;8", "--ranks '4;8': it lists numbers of ranks"),
        (f"{MODEL_ON_FOUR} --ranks 0", "--ranks '0': it lists numbers of ranks from 1"),
        (f"{ON_A_LINE} 1,1 --algorithms nonsense", "leave out --rate and"),
        (f"{ON_A_LINE} 1,1 --rate 1gbit", "leave out --rate and"),
        (f"{ON_A_LINE} 1", "--allreduce-cost '1': must be the seconds of a start"),
        (f"{ON_A_LINE} 1,-1", "--allreduce-cost '1,-1': must be"),
        (f"{ON_A_LINE} 1,1 --hosts 2", "it replaces the cluster"),
        ("--hosts 2 --trace model.csv --json no/x", "--json no/x: it cannot be written"),
        ("--hosts 2 --trace model.csv --write-model no/x", "--write-model no/x: it cannot be written"),
        (f"{PARTIAL} --sync solo", "--sync and --skew go together"),
        (f"{PARTIAL} --skew one:1ms", "--sync and --skew go together"),
        (f"{PARTIAL} --sync some --skew one:1ms", "sync 'some': must be full, delay, solo, majority or quorum:Q"),
        (f"{PARTIAL} --sync quorum:5 --skew one:1ms", "sync 'quorum:5': must be a number of ranks, in [1, 4]"),
        (f"{PARTIAL} --sync solo --skew one:1", "skew 'one:1': must be one of: one:200ms"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder: Path, arguments: str, words: str) -> None:
    status, said = command(*arguments.split())
    assert status == 1 and said.startswith("hvd_ext simulate: ") and words in said, said


@pytest.mark.parametrize("arguments", ["", "--hosts 2 --preset commlib", "--preset commlib --rate 1gbit"])
def test_a_cluster_is_named_in_one_way(folder: Path, arguments: str) -> None:
    status, said = command("--trace", "model.csv", *arguments.split())
    assert status == 2 and ("name the cluster with one of" in said or "--rate 1gbit" in said)


def test_the_commands_of_the_page_run(folder: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (model,) = re.findall(r"^```csv\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert model == MODEL
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("python -m hvd_ext simulate")]
    assert len(commands) == len(lines) == 6
    for words in commands:
        done = CliRunner().invoke(main, words, env={"COLUMNS": "160", "TERM": "dumb"})
        assert done.exit_code == 0, done.output
    assert {"rows.json", "bert.csv", "plots"} <= {path.name for path in folder.iterdir()}


def test_steps_that_do_not_wait_are_played_beside_full_ones(folder: Path) -> None:
    modes = "full,delay,majority,quorum:3,solo"
    arguments = f"{PARTIAL} --bucketers wfbp --sync {modes} --skew one:50ms --json rows.json"
    status, text = command(*arguments.split())
    assert status == 0, text
    assert "steps that do not wait for all ranks, one:50ms" in text
    by_mode = {row["sync"]: row for row in rows(folder / "rows.json") if "sync" in row}
    assert list(by_mode) == modes.split(",")
    assert by_mode["full"]["speedup_over_full"] == 1
    assert by_mode["solo"]["speedup_over_full"] > by_mode["quorum:3"]["speedup_over_full"] > 1
    assert by_mode["quorum:3"]["active_ranks"] >= 3
    assert sum(by_mode["majority"]["staleness_shares"]) == pytest.approx(1)
