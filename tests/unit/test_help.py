"""The help of every command: what takes a value says what it takes, what takes none shows nothing behind its name."""

from __future__ import annotations

import re

import pytest
import typer.main
from typer.testing import CliRunner

from hvd_ext.__main__ import app as main
from hvd_ext.bench.cli import app as bench
from hvd_ext.commands.cache import app as cache
from hvd_ext.commands.cluster import app as cluster
from hvd_ext.commands.plan import app as plan
from hvd_ext.commands.run import app as run
from hvd_ext.commands.simulate import app as simulate
from hvd_ext.commands.trace import app as trace

APPS = {
    "": main,
    "bench": bench,
    "cache": cache,
    "cluster": cluster,
    "plan": plan,
    "run": run,
    "simulate": simulate,
    "trace": trace,
}
FORWARDED = {"bench", "cache", "cluster", "plan", "probe", "run", "simulate", "trace"}  # main hands their arguments on


def commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, app in APPS.items():
        words = (name,) if name else ()
        found.append(words)
        group = getattr(typer.main.get_command(app), "commands", {})
        found += [(*words, inner) for inner in group if name or inner not in FORWARDED]
    return found


def options(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Gives the options in a command's help, and what the columns behind its names say."""
    name, *inner = words if words and words[0] in FORWARDED else ("", *words)
    shown = CliRunner().invoke(APPS[name], [*inner, "--help"], env={"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    rows = [re.split(r"\s{2,}", line.strip("│* ")) for line in shown.output.splitlines() if line[:1] == "│"]
    return {
        row[0].split(",")[0]: [cell for cell in row[1:] if not cell.startswith("-")]
        for row in rows
        if row[0].startswith("--")
    }


def flags(words: tuple[str, ...]) -> dict[str, bool]:
    """Gives a command's options, and whether they are flags."""
    name, *inner = words if words and words[0] in FORWARDED else ("", *words)
    command = typer.main.get_command(APPS[name])
    for word in inner:
        command = command.commands[word]  # type: ignore[attr-defined]
    found = {param.opts[0]: param.is_flag for param in command.params if param.opts[0].startswith("--")}
    return {**found, "--help": True}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_an_option_shows_a_value_where_it_takes_one_and_nothing_where_it_takes_none(words: tuple[str, ...]) -> None:
    shown, known = options(words), flags(words)
    assert shown.keys() == known.keys()
    for name, cells in shown.items():
        assert len(cells) == (1 if known[name] else 2), f"{name} shows {cells}"
        assert "bool" not in cells[0]


def test_every_command_is_in_the_list() -> None:
    assert {"doctor", "build", "install-horovod", *FORWARDED} == set(typer.main.get_command(main).commands)
    assert ("cluster", "run") in commands() and ("bench", "training") in commands()
