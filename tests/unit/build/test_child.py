"""Asking children: whatever happens to them, the parent goes on and has words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvd_ext.build import child


@pytest.mark.parametrize(
    ("code", "values", "error"),
    [
        ("print('noise'); print('{\"x\": 0}'); answer = {'x': 3}", {"x": 3}, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); answer = {}", {}, "crashed: SIGSEGV"),
        (
            "import no_module_has_this_name",
            *({}, "ModuleNotFoundError: No module named 'no_module_has_this_name'"),
        ),
        ("import sys; sys.exit(7)", {}, "ended with status 7 and without output"),
    ],
    ids=["answer", "crash", "exception", "silence"],
)
def test_an_answer_is_found_behind_what_libraries_print_and_how_a_child_failed_is_told(code, values, error):
    assert child.ask(sys.executable, code) == child.Answer(values, error)


def test_a_child_that_hangs_is_given_up_and_an_interpreter_that_is_not_there_is_no_exception():
    answer = child.ask(sys.executable, "import time; time.sleep(600)", timeout_s=0.5)
    assert answer.error == "no answer within 0.5 s"
    assert child.ask("/no/such/python", "answer = {}").error == "cannot run /no/such/python: No such file or directory"


def test_tools_beside_the_interpreter_come_first_on_the_path(monkeypatch):
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", "/some/venv/bin"]))
    assert child.python_environment("/some/venv/bin/python")["PATH"] == os.pathsep.join(["/some/venv/bin", "/usr/bin"])


def test_only_the_entries_of_pip_leave_the_python_path_in_isolation(monkeypatch):
    pip = "/somewhere/pip-build-env-abc/site"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([pip, "/modules/site"]))
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    isolated = child.python_environment(sys.executable, isolated=True)
    assert isolated["PYTHONPATH"] == "/modules/site"
    assert "PYTHONNOUSERSITE" not in isolated
    assert child.python_environment(sys.executable)["PYTHONPATH"] == os.pathsep.join([pip, "/modules/site"])
    monkeypatch.setenv("PYTHONPATH", "/modules/site")  # then it is the user who shuts out the user site
    assert child.python_environment(sys.executable, isolated=True)["PYTHONNOUSERSITE"] == "1"


def test_the_first_line_of_a_failing_command_is_empty():
    environment = child.python_environment(sys.executable)
    assert child.version_line([sys.executable, "-c", "print(); print('4.1'); print('more')"], environment) == "4.1"
    assert child.version_line([sys.executable, "-c", "print('4.1'); raise SystemExit(1)"], environment) == ""
    assert child.version_line(["/no/such/tool"], environment) == ""


def test_a_long_command_shows_its_lines_and_keeps_them(tmp_path: Path):
    lines: list[str] = []
    log = tmp_path / "deep" / "log"
    child.run_logged([sys.executable, "-c", "print('a'); print('b')"], log, echo=lines.append)
    assert lines == ["a", "b"]
    assert log.read_text().splitlines()[1:] == ["a", "b"]


def test_a_failing_command_says_its_last_lines_and_where_all_of_it_is(tmp_path: Path):
    code = "import sys; [print('line', i) for i in range(100)]; print('the cause', file=sys.stderr); sys.exit(3)"
    with pytest.raises(child.InstallError, match=r"(?s)failed with status 3.*the cause") as caught:
        child.run_logged([sys.executable, "-c", code], tmp_path / "log")
    assert "line 10\n" not in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    with pytest.raises(child.InstallError, match="cannot run '/no/such/tool': No such file"):
        child.run_logged(["/no/such/tool"], tmp_path / "log")
