"""The window of versions: what is known to break is refused, what nobody has tried is a warning, in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_ext.engine import versions
from hvd_ext.engine.versions import WINDOWS, check, numbers
from hvd_ext.errors import InvalidError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "version", "verdict", "words"),
    [
        ("tensorflow", "2.16.1", "ok", ""),
        ("tensorflow", "2.21.0", "ok", ""),
        ("tensorflow", "2.21.7", "ok", ""),
        ("tensorflow", "2.15.1", "error", r"TensorFlow \(2.15.1\): .*Keras 2.*pip install 'tensorflow>=2.16'"),
        ("tensorflow", "2.22.0-rc1", "warning", r"newer.*TensorFlow 2.16 to 2.21"),
        ("tensorflow", "3.0", "warning", "newer"),
        ("tensorflow", "nightly", "warning", "no released version"),
        ("keras", "3.8.0", "ok", ""),
        ("keras", "3.15.1", "ok", ""),
        ("keras", "3.16.0", "warning", "newer"),
        ("keras", "3.7.0", "warning", "older than what the tests pass on"),
        ("keras", "3.4.1", "error", "clips every gradient before it is accumulated"),
        ("keras", "2.15.0", "error", "hvd_ext is tested with Keras 3.8 to 3.15"),
    ],
)
def test_a_version_is_judged_in_words(name: str, version: str, verdict: str, words: str) -> None:
    seen = WINDOWS[name].judge(version)
    assert seen[0] == verdict
    assert re.search(words, seen[1])


@pytest.mark.parametrize(("version", "parts"), [("2.22.0-rc1", (2, 22, 0)), ("3.15.1", (3, 15, 1)), ("nightly", ())])
def test_the_numbers_of_a_version_are_those_before_its_words(version: str, parts: tuple[int, ...]) -> None:
    assert numbers(version) == parts


def test_an_error_is_raised_and_a_warning_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "_logged", set())
    with pytest.raises(InvalidError, match=r"TensorFlow \(2\.15\.0\)"):
        check("tensorflow", "2.15.0")
    for _ in range(2):
        check("keras", "3.99.0")
    check("keras", "3.15.1")
    assert len(caplog.messages) == 1
    assert "Keras (3.99.0): it is newer" in caplog.messages[0]


@pytest.mark.parametrize(
    ("file", "edge"), [("requirements.txt", "newest"), ("requirements-oldest.txt", "oldest")], ids=["newest", "oldest"]
)
def test_both_edges_of_the_window_are_what_the_two_environments_have(file: str, edge: str) -> None:
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    for name, package in (("tensorflow", "tensorflow-cpu"), ("keras", "keras")):
        wanted = numbers(getattr(WINDOWS[name], edge))
        assert numbers(pinned[package])[: len(wanted)] == wanted
        assert WINDOWS[name].judge(pinned[package])[0] == "ok"
