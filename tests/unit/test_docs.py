"""The pages say what the code does: tables, commands, files and settings are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from docs import api, tables
from hvd_ext import options
from hvd_ext.__main__ import app
from hvd_ext.bench.cli import app as bench

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
OTHER_SETTINGS = {"HVD_EXT_NATIVE", "HVD_EXT_LAUNCHER"}  # of setup.py, of the tools that start jobs
CMAKE_OPTION = re.compile(r"-D\w+(=\S+)?")


def page(path: Path) -> str:
    """Reads a page."""
    return path.read_text(encoding="utf-8")


def page_id(path: Path) -> str:
    """Names a page in the repository."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", tables.PAGES)
def test_the_tables_of_a_page_come_from_the_code(name):
    text = page(ROOT / name)
    assert tables.rewritten(text, name) == text, "run `make docs`"


def test_a_table_without_its_marks_is_an_error():
    with pytest.raises(
        ValueError, match="the marks <!-- settings --> and <!-- /settings --> must be there once, seen 0"
    ):
        tables.rewritten("# a page without tables\n", "docs/settings.md")


def test_a_bar_inside_a_cell_does_not_end_it():
    assert tables.markdown(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_command_on_a_page_is_there(path):
    commands = typer.main.get_command(app).commands
    used = set(re.findall(r"python -m hvd_ext ([a-z][a-z-]*)", page(path)))
    assert used - set(commands) == set()
    measured = set(re.findall(r"python -m hvd_ext bench ([a-z][a-z-]*)", page(path)))
    assert measured - set(typer.main.get_command(bench).commands) == set()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_make_target_on_a_page_is_there(path):
    makefile = page(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page(path), re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", code)) - targets == set()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_link_and_every_script_on_a_page_is_there(path):
    text = page(path)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (path.parent / link).exists()]
    scripts = re.findall(r"python ((?:examples|benchmarks|tests)/[\w/.-]+\.py)", text)
    assert missing + [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_place_in_a_page_that_a_link_names_is_there(path):
    missing = []
    for link, place in re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", page(path)):
        target = page(path.parent / link) if link else page(path)
        headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", target, flags=re.M | re.S), re.MULTILINE)
        if place not in {api.anchor(heading) for heading in headings}:
            missing.append(f"{link}#{place}")
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_setting_on_a_page_is_there(path):
    known = {setting.name for setting in options.SETTINGS} | OTHER_SETTINGS
    text = CMAKE_OPTION.sub("", page(path))
    used = set(re.findall(r"\bHVD_EXT_[A-Z_]+\b(?!\()", text)) - {"HVD_EXT_PLAN_VERSION"}
    assert used - known == set()


def test_every_target_of_the_makefile_is_in_its_help():
    makefile = page(ROOT / "Makefile")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) == phony


def test_every_page_of_docs_can_be_found_from_the_readme():
    links = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", page(ROOT / "README.md")))
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")} - links == set()
