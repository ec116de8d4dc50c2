"""Tar files as sources: every form, links, archives that follow each other, and what is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from hvd_ext.data import tar_files
from hvd_ext.errors import InvalidError
from tests.unit.data.caching import RECORDS, read_all


def tar_of(members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Give the bytes of an archive of files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data in members:
            archive.addfile(about(name, size=len(data)), io.BytesIO(data))
    return file.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.tar"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_tar_files_are_the_members_of_one_base_name(path: Path, form: int) -> None:
    long = "folder/" * 20 if form != tarfile.USTAR_FORMAT else "folder/" * 12
    members = []
    for index in range(20):
        base = f"{long if index % 2 else ''}{index:05}"
        members += [(f"{base}.jpg", RECORDS[index]), (f"{base}.seg.PNG", b"s%d" % index), ("README", b"no sample")]
    if form == tarfile.PAX_FORMAT:
        members = [(f"ü{name}" if name != "README" else name, data) for name, data in members]
    path.write_bytes(tar_of(members, form))
    source = tar_files.tar(path)
    assert source.samples == 20
    assert sorted(source.element_spec) == ["jpg", "seg.png"]
    assert read_all(source) == [{"jpg": RECORDS[index], "seg.png": b"s%d" % index} for index in range(20)]


def about(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, target: str = "") -> tarfile.TarInfo:
    """Describe a member."""
    described = tarfile.TarInfo(name)
    described.type, described.size, described.linkname = kind, size, target
    return described


def member(described: tarfile.TarInfo, data: bytes = b"", form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Give the bytes of a member."""
    return described.tobuf(form) + data + bytes(-len(data) % 512)


END = bytes(1024)
SAMPLES = [(f"{index:03}.{key}", RECORDS[index]) for index in range(20) for key in ("cls", "jpg")]
FIRST = member(about("0.jpg", size=3), b"one")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_have_the_bytes_of_the_file_before_them(path: Path, form: int) -> None:
    deep = "folder/" * (12 if form == tarfile.USTAR_FORMAT else 30)
    hard, symbolic = tarfile.LNKTYPE, tarfile.SYMTYPE
    members = [
        (about(f"{deep}0.jpg", size=5), b"first"),
        (about(f"{deep}0.txt", size=4), b"text"),
        (about("README", hard, target="/nowhere"), b""),  # no sample, so it may lead anywhere
        (about("1.jpg", hard, target=f"./{deep}0.jpg"), b""),
        (about("1.txt", symbolic, target=f"{deep}0.txt"), b""),
        (about(f"{deep}0.jpg", size=6), b"second"),
        (about(f"{deep}0.txt", hard, target="1.txt"), b""),  # a link to a link
        (about(f"{deep}2.jpg", hard, target=f"{deep}0.jpg"), b""),  # the last file before it of this name
        (about(f"{deep}2.txt", symbolic, target="0.txt"), b""),
    ]
    path.write_bytes(b"".join(member(described, data, form) for described, data in members) + END)
    assert read_all(tar_files.tar(path)) == [
        {"jpg": jpg, "txt": b"text"} for jpg in (b"first", b"first", b"second", b"second")
    ]


def test_archives_that_follow_each_other_are_read_as_one(path: Path) -> None:
    members = [(f"{index}.jpg", record) for index, record in enumerate(RECORDS[:5])]
    path.write_bytes(tar_of(members[:3]) + tar_of(members[3:]))
    assert [sample["jpg"] for sample in read_all(tar_files.tar(path))] == RECORDS[:5]
    path.write_bytes(path.read_bytes() + bytes(100))  # zeros are no archive, whatever their number
    assert tar_files.tar(path).samples == 5
    path.write_bytes(path.read_bytes() + b"no archive")
    with pytest.raises(InvalidError, match="the head at byte .* is damaged, or this is no tar file"):
        _ = tar_files.tar(path).samples


def sparse(settings: dict[str, str]) -> bytes:
    """Give a sparse member in the form of pax."""
    described = about("GNUSparseFile.1/1.jpg", size=512)
    described.pax_headers = settings
    return member(described, bytes(512), tarfile.PAX_FORMAT)


def renamed(settings: bytes) -> bytes:
    """Give a member with an extended head that holds these bytes."""
    return member(about("PaxHeaders/1.jpg", tarfile.XHDTYPE, len(settings)), settings) + member(about("1.jpg"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tar_of(SAMPLES[:-1]), "the first sample of the data has cls, jpg, and in sample '019' 019.jpg is missing"),
        (
            tar_of([*SAMPLES, *((f"020.{key}", b"") for key in ("cls", "jpg", "txt"))]),
            "in sample '020' 020.txt is there",
        ),
        (tar_of([("0.jpg", b""), ("0.JPG", b"")]), "the member '0.JPG' is there twice in one sample"),
        (tar_of(SAMPLES)[:3000], "it is torn: "),
        (b"x" * 5000, "the head at byte 0 is damaged, or this is no tar file"),
        (gzip.compress(tar_of(SAMPLES)), "it is compressed (gzip)"),
        (tar_of([("README", b"")]), "the files hold no samples"),
        (FIRST + member(about("1.jpg", b"S", 512), bytes(512)) + END, "'1.jpg' is stored without its holes"),
        (sparse({"GNU.sparse.major": "1", "GNU.sparse.name": "1.jpg"}) + END, "'1.jpg' is stored without its holes"),
        (sparse({"GNU.sparse.map": "0,1"}) + END, "'GNUSparseFile.1/1.jpg' is stored without its holes"),
        (FIRST + member(about("1.jpg", b"1", target="2.jpg")) + END, "'1.jpg' is a link to '2.jpg', which is no file"),
        (FIRST + member(about("1.jpg", b"2", target="/0.jpg")) + END, "'1.jpg' is a link to '/0.jpg'"),
        (FIRST + member(about("1.jpg", b"1", 3, "0.jpg"), b"one") + END, "'1.jpg' is a hard link of 3 bytes"),
        (FIRST + member(about("1.jpg", b"6")) + END, "'1.jpg' is no file: its type flag is '6'"),
        (FIRST + member(about("1.\udcff")) + END, "its name must be UTF-8"),
        (FIRST, "no mark of the archive's end follows its last member"),
        (FIRST + member(about("x", b"L", 6), b"1.jpg\0") + END, "no mark of the archive's end"),
        (renamed(b"12 path=a.jp\n") + END, "the extended head at byte 0 is damaged"),
        (renamed(b"13 path=a.jpgg") + END, "the extended head at byte 0 is damaged"),
        (renamed(b"no pax") + END, "the extended head at byte 0 is damaged"),
        (renamed(b"0 path=a.jpg\n") + END, "the extended head at byte 0 is damaged"),
        (renamed(b"14 path=a\0jpg\n") + END, "the extended head at byte 0 is damaged: path holds a zero byte"),
        (renamed(b"11 size=-5\n") + END, "'1.jpg': its extended head is damaged: its size is '-5'"),
        (renamed(b"15 size=999999\n") + END, "the member at byte 1,024 has 999,999 bytes, and the file ends"),
        (member(about("x", b"L", 20 << 20), bytes(20 << 20)) + END, "it has 20,971,520 bytes, and real ones"),
        (member(about("0.jpg", size=1 << 62), form=tarfile.GNU_FORMAT) + END, "has 4,611,686,018,427,387,904 bytes"),
    ],
)
def test_archives_without_the_bytes_of_equal_samples_are_refused_in_words(
    path: Path, content: bytes, words: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidError) as caught:
        _ = tar_files.tar(path).samples
    assert str(caught.value).startswith(f"tar ({path}): ") and words in str(caught.value)
