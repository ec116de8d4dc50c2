"""Every reader of files, fuzzed: flipped bits, cut ends, grown lengths. It gives what is there, or an error of hvd_ext.

A short time each in the ordinary suite; `make fuzz` sets FUZZ_S, the seconds of each reader.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.commands import cache as commands
from hvd_ext.data import arrays, folders, native, store, tar_files, tfrecord_files
from hvd_ext.errors import CheckpointError, HvdExtError, InvalidError, TopologyError
from hvd_ext.state import arrays as state_arrays, manifest
from hvd_ext.state.manifest import Manifest
from hvd_ext.topology import read as topology_files
from tests.unit.data.caching import RECORDS, read_all

SECONDS = float(os.environ.get("FUZZ_S", "0.1"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or time.time_ns() % 1_000_000
GOOD = [(f"{index}.{key}", RECORDS[index]) for index in (3, 20) for key in ("cls", "jpg")]

LENGTHS = (b"\xff" * 8, b"\x80" + b"\xff" * 7, b"9" * 11, b"-1", b"77777777777")
OF_HEADS = (b"77777777777", b"S", b"1", b"x", b"g", b"L", b"\xff", b"9 ")


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Flip bits, cut the end, or put numbers that are far too large into some bytes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        if not data:
            break
        place, kind = draw.randrange(len(data)), draw.randrange(6)
        if kind <= 1:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            field = draw.choice([*LENGTHS, draw.randbytes(8)])
            data[place : place + len(field)] = field
        elif kind == 4:
            del data[place : place + draw.choice([1, 8, 512])]
        else:
            data[place:place] = data[place : place + draw.choice([1, 8, 512])]
    return bytes(data)


def with_checksums(draw: random.Random, content: bytes) -> bytes:
    """Damage a tar file, mostly its heads, and give those right checksums, without which nothing else is looked at."""
    data = bytearray(damaged(draw, content) if draw.randrange(4) else content)
    heads = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    for at in heads:
        if not draw.randrange(3):
            place = at + draw.choice([draw.randrange(148), 124, 156, 157, 345, 512])
            field = draw.choice([*OF_HEADS, b"\x80" + draw.randbytes(11)])
            data[place : place + len(field)] = field
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def with_lengths(draw: random.Random, content: bytes) -> bytes:
    """Damage a TFRecord file: give one of its records another length, with the checksum of this length."""
    if not draw.randrange(3):
        return damaged(draw, content)
    begins, at = [], 0
    while at < len(content):
        begins.append(at)
        at += 16 + struct.unpack_from("<Q", content, at)[0]
    place = draw.choice(begins)
    length = draw.choice([0, 2**63, 2**64 - 1, 2**64 - 17, len(content), draw.getrandbits(64), draw.getrandbits(10)])
    head = struct.pack("<Q", length)
    crc = tfrecord_files._masked(native.load().hvd_ext_cache_crc32c(0, head, len(head))).to_bytes(4, "little")
    return content[:place] + head + crc + content[place + 12 :]


@pytest.fixture
def fuzzed(request: pytest.FixtureRequest) -> Iterator[Iterator[random.Random]]:
    """Give sources of random numbers for some seconds, and say what a failed test was given."""
    number = 0

    def drawn() -> Iterator[random.Random]:
        nonlocal number
        end = time.monotonic() + SECONDS
        while number == 0 or time.monotonic() < end:
            number += 1
            yield random.Random(f"{SEED} {number}")

    yield drawn()
    print(f"{request.node.name}: {number:,} files; FUZZ_SEED={SEED}")


def write_tar(path: Path, form: int) -> bytes:
    """Write a tar file with long names, links and an attribute."""
    folder = f"{'a' * 40}/{'b' * 50}" if form == tarfile.USTAR_FORMAT else f"{'a' * 60}/{'b' * 60}"
    links = (("cls", tarfile.LNKTYPE, f"{folder}/3.cls"), ("jpg", tarfile.SYMTYPE, "3.jpg"))
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in GOOD:
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size = len(data)
            if form == tarfile.PAX_FORMAT:
                about.pax_headers = {"comment": "none"}
            archive.addfile(about, io.BytesIO(data))
        for key, kind, target in links:
            about = tarfile.TarInfo(f"{folder}/x.{key}")
            about.type, about.linkname = kind, target
            archive.addfile(about)
    return path.read_bytes()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_files(tmp_path: Path, fuzzed: Any, form: int) -> None:
    path = tmp_path / "a.tar"
    content = write_tar(path, form)
    assert tar_files.tar(path).samples == 3
    for draw in fuzzed:
        path.write_bytes(with_checksums(draw, content))
        with contextlib.suppress(InvalidError):
            source = tar_files.tar(path)
            for member in (member for _, members in tar_files._samples(str(path)) for member in members.values()):
                assert len(native.read_range(str(path), member.offset, member.nbytes).numpy()) == member.nbytes
            assert source.samples


def test_tfrecord_files(tmp_path: Path, fuzzed: Any) -> None:
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in RECORDS[:5]:
            writer.write(record)
    content = path.read_bytes()
    for draw in fuzzed:
        path.write_bytes(with_lengths(draw, content))
        with contextlib.suppress(InvalidError):
            columns = tfrecord_files.tfrecord(path).columns
            for offset, nbytes in zip(columns["offset"].tolist(), columns["nbytes"].tolist(), strict=True):
                with contextlib.suppress(tf.errors.DataLossError):  # a cache says which sample this is
                    native.read_range(str(path), offset, nbytes, checked=True)


def test_indices_of_record_files_that_were_kept(tmp_path: Path, fuzzed: Any) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, tarfile.GNU_FORMAT)
    tar_files.tar(path).open(tmp_path / "kept")
    (index,) = (tmp_path / "kept").iterdir()
    content, columns = index.read_bytes(), tar_files.tar(path).columns
    for draw in fuzzed:
        index.write_bytes(damaged(draw, content))
        source = tar_files.tar(path)
        source.open(tmp_path / "kept")
        assert source.columns.keys() == columns.keys()
        assert all(np.array_equal(source.columns[name], columns[name]) for name in columns)


def test_folders(tmp_path: Path, fuzzed: Any) -> None:
    names = [os.fsdecode(name) for name in (b"a", b"b.jpg", b"\xff.jpg", b"c d\n", b".x", b"e.JPG")]
    for draw in fuzzed:
        root = tmp_path / str(draw.getrandbits(62))
        places = [root]
        root.mkdir()
        for _ in range(draw.randint(1, 8)):
            place = draw.choice(places) / draw.choice(names)
            targets = [".", "a", "b.jpg", *(["..", "../a"] if place.parent != root else [])]
            with contextlib.suppress(OSError):  # it is there already
                if (kind := draw.randrange(4)) == 0:
                    place.mkdir()
                    places.append(place)
                elif kind == 1:
                    with place.open("xb") as file:
                        file.write(b"x")
                elif kind == 2:
                    place.symlink_to(draw.choice(targets))
                else:
                    os.mkfifo(place)
        with contextlib.suppress(InvalidError):
            source = folders.folder(root, draw.choice(["*", "*.jpg"]), labels=draw.random() < 0.5)
            assert all(os.path.isfile(source.place_of(number)) for number in range(source.samples))


def test_arrays_in_files(tmp_path: Path, fuzzed: Any) -> None:
    path = tmp_path / "a.npy"
    rows = np.arange(60, dtype=np.int16).reshape(20, 3)
    np.save(path, rows)
    content = path.read_bytes()
    source = arrays.as_source(np.load(path, mmap_mode="r"))
    for draw in fuzzed:
        path.write_bytes(content[: draw.randrange(len(content))])
        with contextlib.suppress(tf.errors.DataLossError):
            source.read(tf.constant(draw.randrange(20), tf.int64))
    path.write_bytes(content)
    np.testing.assert_array_equal(read_all(source), rows)


PRINTED = "0123456789abcdef" * 4
SAMPLES = 40


def record(number: int) -> bytes:
    """Give the record of a sample."""
    return bytes([number]) * (1 + number * 7)


def read_store(**place: Any) -> int:
    """Open a store, check what it gives, store what it lacks, and give the number of records that were there."""
    opened = store.Store("fuzz", PRINTED, SAMPLES, claim_s=0.01, **place)
    try:
        there = 0
        for wait in (False, True):
            numbers = tf.range(SAMPLES, dtype=tf.int64)
            (rows,), missing, pending = native.lookup(opened.cache, numbers, [tf.string], [1], wait=wait)
            lacking = {*missing.numpy().tolist(), *pending.numpy().tolist()}
            for number, row in enumerate(rows.numpy()[:, 0]):
                assert row == (b"" if number in lacking else record(number))
            there = there or SAMPLES - len(lacking)
            for number in missing.numpy().tolist():
                native.insert(opened.cache, tf.constant([number], tf.int64), [tf.constant([[record(number)]])])
        counts = opened.verify()
        assert counts["disk_damaged"] == counts["memory_damaged"] == 0
        return there
    finally:
        opened.close()


@pytest.mark.parametrize("part", ["index", "segment-000000", "about.json"])
def test_caches_on_a_disk(tmp_path: Path, fuzzed: Any, part: str) -> None:
    folder = tmp_path / "host" / f"fuzz-{PRINTED[:16]}"
    read_store(folder=folder)
    assert read_store(folder=folder) == SAMPLES
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    for draw in fuzzed:
        for path, content in contents.items():
            path.write_bytes(damaged(draw, content) if path.name == part else content)
        for cache in store.on_disk(tmp_path):
            cache.records()
            with contextlib.suppress(HvdExtError):
                commands._verified(cache)
        with contextlib.suppress(InvalidError):
            read_store(folder=folder)


def test_memory_that_stays(tmp_path: Path, fuzzed: Any) -> None:
    path = tmp_path / "memory"
    read_store(memory_bytes=1 << 20, keep=path)
    assert read_store(memory_bytes=1 << 20, keep=path) == SAMPLES
    content = path.read_bytes()[: 1 << 14]
    for draw in fuzzed:
        path.write_bytes(damaged(draw, content) + bytes(draw.choice([0, 1 << 20])))
        path.chmod(0o600)
        with contextlib.suppress(InvalidError):
            read_store(memory_bytes=1 << 20, keep=path)


TOPOLOGY = b"""
name: cluster
link: {alpha_s: 30.0e-6, gbit_per_s: 10}
children:
  - {name: left, link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}, ranks: [0, 2, 4]}
  - {name: right, link: {alpha_s: 5.0e-6, beta_s_per_byte: 5.0e-10}, ranks: [1, 3]}
"""


def test_topology_files(tmp_path: Path, fuzzed: Any) -> None:
    path = tmp_path / "cluster.yaml"
    for draw in fuzzed:
        scalar = draw.choice([b"2020-13-45", b"9" * 5000, b"[" * 400, b"!!float x", b"!!int ''", b"&a [*a]", b"left"])
        path.write_bytes(damaged(draw, TOPOLOGY.replace(b"left", scalar)))
        with contextlib.suppress(TopologyError):
            topology_files.read(path)


def test_manifests_of_checkpoints(tmp_path: Path, fuzzed: Any) -> None:
    good = Manifest.model_validate(
        {
            **{"id": "a", "reason": "test", "created": "2026-01-01T00:00:00+00:00", "epoch": 1, "step": 2, "ranks": 2},
            **{"hosts": [2], "versions": {"a": "1"}, "variables": ["x"], "own": ["y"], "states": ["z"], "model": "m"},
            **{"data": {"d": {"parts": 2}}, "files": [{"name": "f", "nbytes": 3, "sha256": "0" * 64}]},
        }
    )
    for draw in fuzzed:
        (tmp_path / manifest.FILE).write_bytes(damaged(draw, good.text().encode()))
        with contextlib.suppress(CheckpointError):
            manifest.read(tmp_path)


def test_states_of_ranks(tmp_path: Path, fuzzed: Any) -> None:
    buffer = io.BytesIO()
    state_arrays.write(buffer, {"a": {"x": np.arange(5), "y": np.zeros((2, 3), np.float32)}, "b": {}})
    for draw in fuzzed:
        with contextlib.suppress(CheckpointError):
            state_arrays.read(io.BytesIO(damaged(draw, buffer.getvalue())))
