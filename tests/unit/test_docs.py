"""The pages say what the code does: tables, commands, files and settings are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import api, tables
from hvd_ext import options

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
# of setup.py, of the tools that start jobs, of C++
OTHER_NAMES = {"HVD_EXT_NATIVE", "HVD_EXT_LAUNCHER", "HVD_EXT_PLAN_VERSION", "HVD_EXT_LINK_LIMIT_S", "HVD_EXT_RSH"}
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
    with pytest.raises(ValueError, match="the marks <!-- settings --> and <!-- /settings --> must be there once, seen"):
        tables.rewritten("# a page without tables\n", "docs/settings.md")


def test_a_bar_inside_a_cell_does_not_end_it():
    assert tables.markdown(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


def without_blocks(text: str) -> str:
    """Gives a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_file_place_make_target_and_setting_that_a_page_names_is_there(path):
    text = page(path)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (path.parent / link).exists()]
    scripts = re.findall(r"python ((?:examples|benchmarks|tests)/[\w/.-]+\.py)", text)
    missing += [script for script in scripts if not (ROOT / script).exists()]
    for link, place in re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", text):
        target = page(path.parent / link) if link else text
        headings = re.findall(r"^#+ (.*)$", without_blocks(target), re.MULTILINE)
        if place not in {api.anchor(heading) for heading in headings}:
            missing.append(f"{link}#{place}")
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    targets = set(re.findall(r"^([a-z-]+):", page(ROOT / "Makefile"), re.MULTILINE))
    missing += set(re.findall(r"\bmake ([a-z-]+)\b", code)) - targets
    used = set(re.findall(r"\bHVD_EXT_[A-Z_]+\b(?!\()", CMAKE_OPTION.sub("", text)))
    missing += used - {setting.name for setting in options.SETTINGS} - OTHER_NAMES
    assert missing == []


def test_every_target_of_the_makefile_is_in_its_help():
    makefile = page(ROOT / "Makefile")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) == phony


def test_every_page_of_docs_can_be_found_from_the_readme():
    links = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", page(ROOT / "README.md")))
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")} - links == set()
