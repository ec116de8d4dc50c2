"""What other users leave in the temporary folder under a rehearsal's name: it is left alone, and said in one line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_ext.cluster import folder as folders

NOBODY = 65534


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder that all users share; pytest's own is closed to others."""
    place = Path(tempfile.mkdtemp(prefix="hx"))
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    now = time.time()
    monkeypatch.setattr(folders.time, "time", lambda: now + folders.YOUNG_S + 1)
    yield place
    shutil.rmtree(place)


def as_nobody(place: Path, script: str) -> None:
    """Run a script of the shell as another user."""
    command = ["sh", "-euc", f"cd {shlex.quote(str(place))}; umask 022; {script}"]
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **user)
    assert done.returncode == 0, done.stderr


def left_alone() -> list[str]:
    """Look for stale folders, and give the lines that are said; none is removed."""
    said: list[str] = []
    assert folders.remove_stale(said.append) == []
    return said


# which names, owners and modes are refused is in tests/unit/job/test_owned.py
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
@pytest.mark.parametrize("mode", ["0700", "0777"])
@pytest.mark.parametrize("lock", ["ln -s {target} X/lock", "mkfifo -m 666 X/lock", "touch X/lock", "true"])
def test_a_folder_of_another_user_is_left_as_it_is(lock: str, mode: str, shared: Path) -> None:
    inner = shared / f"{folders.PREFIX}planted"
    target = shared / "of-root"
    target.mkdir(mode=0o700)
    script = f"mkdir {inner.name}; touch X/state.json; {lock}; chmod {mode} X"
    as_nobody(shared, script.replace("X", inner.name).format(target=target / "made"))
    before = sorted(inner.iterdir())
    assert left_alone() == [f"left alone in {shared}: {inner.name} belongs to user {NOBODY}"]
    assert sorted(inner.iterdir()) == before
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    ("lock", "kind"),
    [
        (os.mkfifo, "FIFO"),
        (lambda path: path.symlink_to(path.parent.parent / "made"), "symbolic link"),
        (Path.mkdir, "folder"),
    ],
)
def test_a_lock_that_is_no_file_is_neither_opened_nor_followed(lock: Any, kind: str, shared: Path) -> None:
    folder = shared / f"{folders.PREFIX}own"
    folder.mkdir(mode=0o700)
    lock(folder / "lock")
    assert left_alone() == [f"left alone in {shared}: {folder.name} has a lock that is a {kind}, not a file"]
    assert [path.name for path in shared.iterdir()] == [folder.name]


def test_a_stale_folder_goes_with_its_links_and_not_with_what_they_lead_to(shared: Path) -> None:
    folder, lock = folders.make()
    lock.close()
    outside = shared / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "session").mkdir()
    (folder / "session" / "link").symlink_to(outside)
    (folder / "hosts").symlink_to(outside / "kept")
    os.mkfifo(folder / "session" / "pipe")
    said: list[str] = []
    assert folders.remove_stale(said.append) == [folder]
    assert said == []
    assert [path.name for path in shared.iterdir()] == ["outside"]
    assert (outside / "kept").exists()


def test_a_stale_folder_without_a_lock_goes_too(shared: Path) -> None:
    folder = shared / f"{folders.PREFIX}own"
    folder.mkdir(mode=0o700)
    assert folders.remove_stale() == [folder]


def test_the_line_names_a_few_and_commands_no_terminal(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{folders.PREFIX}{number}" for number in range(8)]
    names[0] += "\n\x1b[2J\udcff"
    for name in names:
        (shared / name).touch()
    assert folders.remove_stale() == []
    shown = [f"{folders.PREFIX}0\\n\\x1b[2J\\udcff", *names[1 : folders.MOST_NAMED]]
    listed = "; ".join(f"{name} is a file, not a folder" for name in shown)
    assert capsys.readouterr().err == f"hvd_ext cluster: left alone in {shared}: {listed}; and 3 more\n"


def test_a_folder_is_made_afresh_for_this_user_alone(shared: Path) -> None:
    folder, lock = folders.make()
    with lock:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.path.samestat(os.fstat(lock.fileno()), (folder / "lock").stat())
