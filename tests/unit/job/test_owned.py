"""What others leave at a known name in a shared folder is neither followed, waited for, nor written to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hvd_ext.job import owned


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(owned.NotOwnedError) as caught:
        owned.open_folder(path)
    return str(caught.value)


def test_a_folder_of_this_users_own_is_opened(private: Path) -> None:
    descriptor = owned.open_folder(private)
    assert os.path.samestat(os.fstat(descriptor), private.stat())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    private.chmod(0o2700)  # a folder inherits the group's bit from the one that it is made in
    os.close(owned.open_folder(private))


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710, 0o500])
def test_a_folder_that_is_open_to_others_is_refused(mode: int, private: Path) -> None:
    private.chmod(mode)
    assert refusal(private) == f"has the mode {mode:04o}, not 0700"


def test_what_is_no_folder_is_refused_and_nobody_waits(tmp_path: Path, private: Path) -> None:
    (tmp_path / "link").symlink_to(private)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path / "link") == "is a symbolic link, not a folder"
    assert refusal(tmp_path / "file") == "is a file, not a folder"
    assert refusal(tmp_path / "fifo") == "is a FIFO, not a folder"
    with pytest.raises(FileNotFoundError):
        owned.open_folder(tmp_path / "none")


def test_the_user_is_compared_with_what_was_opened(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (private / "file").touch()
    folder = owned.open_folder(private)
    monkeypatch.setattr(os, "geteuid", lambda: private.stat().st_uid + 1)
    assert refusal(private) == f"belongs to user {private.stat().st_uid}"
    with pytest.raises(owned.NotOwnedError, match="belongs to user"):
        owned.open_file("file", folder, os.O_RDWR)
    os.close(folder)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT], ids=["read", "update", "make"])
def test_a_name_that_is_no_file_is_refused_and_nobody_waits(
    flags: int, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    (private / "link").symlink_to(target)
    os.mkfifo(private / "FIFO")
    (private / "folder").mkdir()
    monkeypatch.chdir(private)  # a socket's path is short
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket")
    folder = owned.open_folder(private)
    for name, kind in (("link", "symbolic link"), ("FIFO", "FIFO"), ("folder", "folder"), ("socket", "socket")):
        with pytest.raises(owned.NotOwnedError, match=f"^is a {kind}, not a file$"):
            owned.open_file(name, folder, flags)
    os.close(folder)
    server.close()
    assert not target.exists()


def test_a_file_is_made_only_where_that_is_asked_for(private: Path) -> None:
    folder = owned.open_folder(private)
    with pytest.raises(FileNotFoundError):
        owned.open_file("new", folder, os.O_RDWR)
    assert list(private.iterdir()) == []
    os.close(owned.open_file("new", folder, os.O_RDWR | os.O_CREAT))
    os.close(folder)
    assert (private / "new").stat().st_mode & 0o777 == 0o600
