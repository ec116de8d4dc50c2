"""What the benchmark makes of its samples: ratios, table, words about where we are slower; and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import hvd_ext.bench
from hvd_ext.bench.allreduce import Request, compared
from hvd_ext.bench.page import BEGIN, END, markdown, rewritten
from hvd_ext.bench.table import losses, seconds, table
from hvd_ext.errors import InvalidError


def row(what: str, median_s: float, **more: Any) -> dict[str, Any]:
    values = {"ranks": 2, "nbytes": 4096, "what": what, "median_s": median_s, "min_s": median_s / 2}
    return {"algorithm": "", "chosen": "", **values, **more}


ROWS = [
    row("noop", 1e-6),
    row("mpi", 2e-4),
    row("channel", 4e-4, algorithm="auto", chosen="ring"),
    row("eager", 5e-4, algorithm="auto"),
    row("horovod graph", 8e-4),
    row("horovod eager", 2.5e-4),
]


def test_ratios_compare_like_with_like() -> None:
    found = {one["what"]: (one["to_mpi"], one["to_horovod"]) for one in compared(ROWS)}
    assert found["channel"] == (pytest.approx(2.0), pytest.approx(0.5))
    assert found["eager"] == (pytest.approx(2.5), pytest.approx(2.0))
    assert found["horovod graph"] == (pytest.approx(4.0), None)
    assert found["noop"] == found["mpi"] == (None, None)


def test_ratios_never_cross_sizes_or_numbers_of_ranks() -> None:
    rows = [row("mpi", 1e-3, ranks=4), row("mpi", 1e-3, nbytes=4), row("channel", 1e-3, algorithm="ring")]
    assert compared(rows)[2]["to_mpi"] is None


def test_the_table_has_a_row_per_contestant_and_says_what_auto_has_chosen() -> None:
    stream = io.StringIO()
    drawn = table({"benchmark": "title", "rows": compared(ROWS)})
    Console(file=stream, width=160).print(drawn)
    text = stream.getvalue()
    assert drawn.row_count == len(ROWS)
    for words in (
        "hvd_ext graph auto -> ring",
        "MPI_Allreduce",
        "Horovod eager",
        "no-op",
        "400 us",
        "0.50",
    ):
        assert words in text


def test_losses_are_counted_and_the_worst_is_told_with_its_place() -> None:
    more = [row("channel", 6e-4, algorithm="two_level"), row("channel", 1e-5, algorithm="flexreduce")]
    lines = losses(compared(ROWS + more))
    assert lines == [
        "slower than MPI_Allreduce in 2 of 3 rows, at worst x3.00 (2 ranks, 4,096 bytes, two_level)",
        "slower than Horovod in none of 3 rows",
    ]


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (1e-3, "1 ms")])
def test_times_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": (0,)}, "ranks \\(0\\)"),
        ({"sizes": (6,)}, "bytes \\(6\\).*multiple of 4"),
        ({"sizes": (0,)}, "bytes \\(0\\)"),
        ({"algorithms": ("rings",)}, "'rings'.*auto.*ring"),
        ({"repetitions": 0}, "repetitions"),
        ({"ranks": ()}, "at least one"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Request(**{"ranks": (2,), "sizes": (4,), **changes})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "four"], "whole numbers"),
        (["--algorithms", "rings"], "rings"),
        (["--json", "/no/such/folder/x.json"], "folder"),
    ],
)
def test_the_command_refuses_in_words_before_it_starts_anything(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(hvd_ext.bench.app, ["allreduce", *arguments])
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())


def test_kept_results_hold_machine_versions_command_and_every_sample() -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "results"
    files = sorted(folder.glob("allreduce_*.json"))
    assert files, "no kept result of the allreduce benchmark"
    for path in files:
        kept = json.loads(path.read_text())
        assert kept["machine"]["cores"] >= 1
        assert kept["versions"]["hvd_ext"]
        assert kept["command"].startswith("python -m hvd_ext bench allreduce")
        assert {"noop", "mpi", "channel", "eager"} <= {one["what"] for one in kept["rows"]}
        assert all(len(one["samples_s"]) == kept["request"]["repetitions"] for one in kept["rows"])


def test_the_page_about_benchmarks_shows_the_kept_result() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    kept = json.loads((folder / "results" / "allreduce_one_host.json").read_text())
    page = (folder / "README.md").read_text()
    assert rewritten(page, markdown(kept)) == page, "run: python -m hvd_ext.bench.page"


def test_a_result_without_horovod_makes_a_page_too() -> None:
    facts = {"processor": "p", "cores": 2, "memory_gib": 4, "system": "s", "load_before": 0.1}
    rows = compared([one for one in ROWS if "horovod" not in one["what"]])
    result = {"date": "d", "machine": facts, "versions": {"x": "1"}, "request": {"repetitions": 3}, "rows": rows}
    assert "| 2 | 4,096 | 1 us | 200 us | - | 400 us | ring | 2.00 | - |" in markdown(result)
    assert rewritten(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    with pytest.raises(ValueError, match="marks"):
        rewritten("a page without them", "new")
