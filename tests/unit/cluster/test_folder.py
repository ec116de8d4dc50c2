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

import pytest

from hvd_ext.cluster import folder as folders

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


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
    done = subprocess.run(
        ["sh", "-euc", f"cd {shlex.quote(str(place))}; umask 022; {script}"],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def left_alone() -> list[str]:
    """Look for stale folders, and give the lines that are said; none is removed."""
    said: list[str] = []
    assert folders.remove_stale(said.append) == []
    return said


@needs_root
@pytest.mark.parametrize("mode", ["0700", "0755", "0777"])
@pytest.mark.parametrize(
    "lock",
    ["ln -s {target} X/lock", "mkfifo -m 666 X/lock", "touch X/lock", "true"],
    ids=["link", "fifo", "file", "none"],
)
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


@needs_root
def test_a_name_of_another_user_that_is_no_folder_is_left_as_it_is(shared: Path) -> None:
    own = shared / "own"
    own.mkdir(mode=0o700)
    (own / "state.json").touch()
    for name, script in {
        "a-link": "ln -s {own} X",
        "dangling": "ln -s /no/such/place X",
        "fifo": "mkfifo -m 666 X",
        "file": "touch X",
    }.items():
        as_nobody(shared, script.replace("X", folders.PREFIX + name).format(own=own))
    stem = f"left alone in {shared}: {folders.PREFIX}"
    assert left_alone() == [
        stem
        + f"; {folders.PREFIX}".join(
            [
                "a-link is a symbolic link, not a folder",
                "dangling is a symbolic link, not a folder",
                "fifo is a FIFO, not a folder",
                "file is a file, not a folder",
            ]
        )
    ]
    assert (own / "state.json").exists()
    assert len(list(shared.iterdir())) == 5


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        (lambda path: os.mkfifo(path), "has a lock that is a FIFO, not a file"),
        (lambda path: path.symlink_to(path.parent.parent / "made"), "has a lock that is a symbolic link, not a file"),
        (lambda path: path.mkdir(), "has a lock that is a folder, not a file"),
    ],
    ids=["fifo", "link", "folder"],
)
def test_a_lock_that_is_no_file_is_neither_opened_nor_followed(lock, words: str, shared: Path) -> None:
    folder = shared / f"{folders.PREFIX}own"
    folder.mkdir(mode=0o700)
    lock(folder / "lock")
    assert left_alone() == [f"left alone in {shared}: {folder.name} {words}"]
    assert [path.name for path in shared.iterdir()] == [folder.name]


@needs_root
def test_a_lock_of_another_user_is_left_as_it_is(shared: Path) -> None:
    folder = shared / f"{folders.PREFIX}own"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    os.chown(folder / "lock", NOBODY, NOBODY)
    assert left_alone() == [f"left alone in {shared}: {folder.name} has a lock that belongs to user {NOBODY}"]


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_with_another_mode_is_left_as_it_is_and_gets_no_lock(mode: int, shared: Path) -> None:
    folder = shared / f"{folders.PREFIX}own"
    folder.mkdir()
    folder.chmod(mode)
    assert left_alone() == [f"left alone in {shared}: {folder.name} has the mode {mode:04o}, not 0700"]
    assert list(folder.iterdir()) == []


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


def test_the_line_names_a_few_of_many_and_no_name_commands_the_terminal(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
