"""The planted faults of tests/faults: every patch applies to this tree, and the tests that it names exist."""

from __future__ import annotations

import json

import pytest

from tests.faults import patches
from tests.faults.__main__ import RESULTS, by_area
from tests.faults.patches import Check, Fault, PatchError


@pytest.mark.parametrize("name", patches.names())
def test_a_planted_fault_applies_and_its_tests_exist(name):
    patches.read(name).check()


def test_every_planted_fault_has_a_result_and_the_page_has_their_numbers():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [row["fault"] for row in rows] == patches.names()
    assert {row["result"] for row in rows} <= {"noticed", "limit", "missed"}
    assert by_area(rows) in (patches.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_a_patch_for_lines_that_are_not_there_is_refused(tmp_path):
    (tmp_path / "file.py").write_text("a\nb\na\n", encoding="utf-8")
    for before, times in (("c\n", 0), ("a\n", 2)):
        fault = Fault("area/name", "A sentence.", (), (("file.py", before, "d\n"),))
        with pytest.raises(PatchError, match=f"must occur once in file.py, they occur {times} times"):
            fault.changed(tmp_path)
    changed = Fault("area/name", "A sentence.", (), (("file.py", "b\na\n", "b\n"),)).changed(tmp_path)
    assert changed == {"file.py": "a\nb\n"}
    with pytest.raises(PatchError, match="the file other.py must exist"):
        Fault("area/name", "A sentence.", (), (("other.py", "a\n", ""),)).changed(tmp_path)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (Check("native", 0, ("no such test",)), "must be a part of a native test's name"),
        (Check("mpi", 2, ("messages: every",)), "must be a part of a native test's name"),
        (Check("pytest", 0, ("tests/unit/test_none.py",)), "test_none.py must exist"),
        (Check("pytest", 0, ("tests/unit/test_style.py::test_none",)), "test_style.py::test_none must exist"),
        (Check("ranks", 2, ("-k", "name")), "must get the path of a file"),
    ],
)
def test_a_test_that_does_not_exist_is_refused(check, words):
    with pytest.raises(PatchError, match=words):
        Fault("area/name", "A sentence.", (check,), ()).check()


def test_the_parts_of_a_patch_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(patches, "FOLDER", tmp_path)
    (tmp_path / "area").mkdir()
    text = "It is\nwrong.\n\nranks 3 tests/ranks/test_x.py -k name\nnative a filter\n\n"
    diff = "--- a/tf_ops/f.cc\n+++ b/tf_ops/f.cc\n@@\n before\n-old\n+new\n@@ -7,1 +7,1 @@\n-two\n\n behind\n"
    (tmp_path / "area" / "name.patch").write_text(text + diff, encoding="utf-8")
    fault = patches.read("area/name")
    assert (fault.name, fault.sentence) == ("area/name", "It is wrong.")
    assert list(map(str, fault.checks)) == ["ranks 3 tests/ranks/test_x.py -k name", "native 'a filter'"]
    assert fault.hunks[0] == ("tf_ops/f.cc", "before\nold\n", "before\nnew\n")
    assert fault.hunks[1] == ("tf_ops/f.cc", "two\n\nbehind\n", "\nbehind\n")
    for broken, words in (
        (text.replace("native", "natively") + diff, "a test .natively a filter. must be"),
        (text, "must have a sentence"),
        ("\n\nnative a filter\n\n" + diff, "must have a sentence"),
        (text + diff.replace("-old", "*old"), "must begin with a space"),
    ):
        (tmp_path / "area" / "name.patch").write_text(broken, encoding="utf-8")
        with pytest.raises(PatchError, match=words):
            patches.read("area/name")
