"""`DataCache` in one process: what is loaded once, what comes back, limits, faults, and what the next job finds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from hvd_ext.commands.cache import app
from hvd_ext.data import cache as caches, filling, folders, store
from hvd_ext.data.cache import DataCache
from hvd_ext.errors import InvalidError
from hvd_ext.keras.optimizers import models
from tests.unit.data.caching import CLASSES, Counted, decode, epoch, flip_a_bit, numbered, numbers_of, write_pictures

SAMPLES = np.arange(40)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test has opened, also those before these."""
    for one in caches.open_caches():
        one.close()
    yield
    for one in caches.open_caches():
        one.clear()


def make(counted: Counted, name: str = "test", width: int = 64, **settings: Any) -> DataCache:
    return DataCache(name, SAMPLES, numbered(counted, width), **{"memory": "8MB", "version": "1", **settings})


def test_samples_are_loaded_once_and_every_epoch_has_an_order_of_its_own() -> None:
    counted = Counted()
    cache = make(counted)
    data = cache.dataset(7, shuffle=True, seed=5)
    assert int(data.cardinality()) == 6
    epochs = [numbers_of(epoch(data)) for _ in range(3)]
    assert all(sorted(one) == SAMPLES.tolist() for one in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert counted.times == dict.fromkeys(range(40), 1)
    again = make(Counted(), "again").dataset(7, shuffle=True, seed=5)
    assert [numbers_of(epoch(again)) for _ in range(3)] == epochs
    stats = cache.stats()
    assert (stats["loaded"], stats["hits"], stats["memory_records"]) == (40, 80, 40)
    assert stats["memory_bytes"] == 80 * (64 * 4 + 8)
    assert stats["load_s"] > 0


def test_pictures_of_a_folder_come_back_with_labels_and_seeds(tmp_path: Path) -> None:
    source = folders.folder(write_pictures(tmp_path, 12), "*.jpg")
    cache = DataCache("pictures", source, decode, memory="8MB")
    assert cache.element_spec == (tf.TensorSpec((8, 8, 3), tf.uint8), tf.TensorSpec((), tf.int32))
    data = cache.dataset(5, keys=True)
    for _ in range(2):
        batches = epoch(data)
        pictures = np.concatenate([pictures for (pictures, _), _ in batches])
        assert np.array_equal(pictures[:, 3, 3, 0] // 2, np.arange(12))
        assert np.concatenate([labels for (_, labels), _ in batches]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    seeds = [np.concatenate([seeds for _, seeds in epoch(data)]) for _ in range(2)]
    assert seeds[0].shape == (12, 2) and not np.array_equal(seeds[0], seeds[1])


def test_steps_and_remainder_are_those_of_shard() -> None:
    cache = make(Counted())
    for settings, sizes in (({}, [16, 16, 8]), ({"drop_remainder": True}, [16, 16]), ({"steps": 5}, [16] * 5)):
        assert [len(batch["number"]) for batch in epoch(cache.dataset(16, **settings))] == sizes
    assert cache.dataset(16, steps=5).element_spec["row"].shape == (16, 64)


def test_elements_of_any_structure_made_in_branches_and_loops_come_back() -> None:
    def load(number: tf.Tensor) -> Any:
        total = number
        if number % 2 == 0:  # as in Dataset.map, a tensor decides
            total = -number
        for step in tf.range(2):
            total += tf.cast(step, tf.int64)
        return {
            "decided": total,
            "fixed": (tf.cast(number, tf.bfloat16), tf.equal(number % 2, 0), tf.strings.as_string(number)),
            "varying": tf.range(number)[:, None],
            "strings": tf.strings.as_string(tf.range(number)),
            "complex": tf.cast(number, tf.complex128) * (1 - 2j),
            "empty": tf.zeros([0, 2], tf.int64),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(number + 2), [number, 2]),
            "sparse": tf.sparse.from_dense(tf.one_hot(number, 5)),
        }

    cache = DataCache("structure", np.arange(6), load, memory="8MB")
    data = cache.dataset(4)
    for _ in range(2):
        first, last = list(data)
        assert [*first["decided"].numpy(), *last["decided"].numpy()] == [1, 2, -1, 4, -3, 6]
        assert [one.numpy().tolist() for one in last["fixed"]] == [[4, 5], [True, False], [b"4", b"5"]]
        assert first["varying"].to_list() == [[[row] for row in range(number)] for number in range(4)]
        assert first["strings"].to_list() == [[b"%d" % row for row in range(number)] for number in range(4)]
        assert last["complex"].numpy().tolist() == [4 - 8j, 5 - 10j]
        assert (last["empty"].shape, last["empty"].dtype) == ((2, 0, 2), tf.int64)
        assert last["ragged"].to_list() == [[[0, 1, 2, 3], [4, 5]], [[0, 1, 2, 3, 4], [5, 6]]]
        assert tf.sparse.to_dense(first["sparse"]).numpy().tolist() == np.eye(5)[:4].tolist()
    assert cache.stats()["loaded"] == 6
    padded = DataCache("padded", np.arange(6), lambda number: (number, tf.range(number)), memory="8MB")
    for padding in (-1, (0, -1)):
        ((_, rows),) = epoch(padded.dataset(6, padding=padding))
        assert rows.tolist() == [[column if column < number else -1 for column in range(5)] for number in range(6)]
    with pytest.raises(InvalidError, match=r"padding \(.*\): must be one value, or one for each of the 2 parts"):
        padded.dataset(6, padding=(1, 2, 3))


def test_room_for_half_of_the_samples_gives_half_hits(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    width = 25_000  # 100 kB a sample
    cache = make(counted, width=width, memory=20 * (width * 4 + 128))
    data = cache.dataset(8, shuffle=True)
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for _ in range(3):
            assert sorted(numbers_of(epoch(data))) == SAMPLES.tolist()
    stats = cache.stats()
    assert stats["memory_records"] in (19, 20)
    assert stats["hits"] == 2 * stats["memory_records"]
    assert sum(counted.times.values()) == 120 - stats["hits"]
    assert stats["passed_through"] > 0 and not stats["memory_open"]
    assert len([record for record in caplog.records if "memory" in record.getMessage()]) == 1


def test_the_second_job_loads_nothing_from_the_disk(tmp_path: Path) -> None:
    make(Counted(), disk=tmp_path).warm()
    caches.open_caches()[0].close()
    counted = Counted()
    cache = make(counted, disk=tmp_path)
    data = cache.dataset(7, shuffle=True)
    for _ in range(2):
        assert sorted(numbers_of(epoch(data))) == SAMPLES.tolist()
    assert counted.times == {}
    stats = cache.stats()
    assert (stats["loaded"], stats["disk_hits"], stats["memory_hits"]) == (0, 40, 40)
    (folder,) = (tmp_path / store.host_folder(tmp_path).name).glob("test-*")
    about = json.loads((folder / "about.json").read_text())
    assert (about["name"], about["samples"], about["source"]) == ("test", 40, cache._source.words)
    assert {"made", "elements", "fingerprint"} < set(about)


def test_memory_that_stays_serves_the_next_job() -> None:
    name = f"kept-{os.getpid()}"
    make(Counted(), name, keep=True).warm()
    (kept,) = (one for one in store.in_memory() if one.name == name)
    assert kept.path.stat().st_mode & 0o777 == 0o600
    caches.open_caches()[0].close()
    counted = Counted()
    cache = make(counted, name, keep=True)
    assert sorted(numbers_of(epoch(cache.dataset(8)))) == SAMPLES.tolist()
    assert counted.times == {}
    cache.clear()
    assert not kept.path.exists()


def test_another_load_begins_a_new_cache_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"disk": tmp_path, "memory": None}
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        DataCache("words", SAMPLES, lambda number: number + 1, **settings).warm()
        caches.open_caches()[0].close()
        DataCache("words", SAMPLES, lambda number: number + 1, **settings).close()
        assert caplog.records == []
        other = DataCache("words", SAMPLES, lambda number: number + 2, **settings)
        assert np.concatenate(epoch(other.dataset(8))).tolist() == (SAMPLES + 2).tolist()
        assert other.stats()["loaded"] == 40
    (record,) = caplog.records
    assert "cache words: starts empty, because the source, load or version is another" in record.getMessage()


def test_what_another_process_deletes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, raced = os.unlink, []

    def twice(path: Any, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if not raced:
            raced.append(path)
            unlink(path, dir_fd=dir_fd)

    cache = make(Counted(), disk=tmp_path)
    (folder,) = tmp_path.glob("*/test-*")
    monkeypatch.setattr(os, "unlink", twice)
    cache.clear()
    assert raced and not folder.exists()


def test_a_flipped_byte_on_the_disk_is_found_and_loaded_again(tmp_path: Path) -> None:
    make(Counted(), disk=tmp_path, memory=None).warm()
    caches.open_caches()[0].close()
    (segment,) = tmp_path.glob("*/*/segment-*")
    flip_a_bit(segment, 10 * 320 + 100)
    cache = make(Counted(), disk=tmp_path, memory=None)
    for _ in range(2):
        assert sorted(numbers_of(epoch(cache.dataset(8)))) == SAMPLES.tolist()
    stats = cache.stats()
    assert (stats["damaged"], stats["loaded"]) == (1, 1)
    assert cache.verify()["disk_damaged"] == 0
    flip_a_bit(segment, 11 * 320 + 100)  # of a record that this process has checked
    assert cache.verify()["disk_damaged"] == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    given = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(given, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    yield tmp_path
    for one in caches.open_caches():
        one.close()
    subprocess.run(["umount", str(tmp_path)], check=True)


def fills(cache: DataCache, caplog: pytest.LogCaptureFixture) -> None:
    """Check that two epochs come through, with one warning."""
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        for _ in range(2):
            assert sorted(numbers_of(epoch(cache.dataset(8)))) == SAMPLES.tolist()
    stats = cache.stats()
    assert stats["disk_hits"] == stats["disk_records"] < 12
    assert len(caplog.records) == 1


def test_a_limit_of_the_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fills(make(Counted(), width=25_000, disk=tmp_path, disk_limit="1MB", memory=None), caplog)


def test_a_disk_that_is_full_already_is_done_without(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.suppress(OSError):
        (small / "full").write_bytes(bytes(2 << 20))
    with caplog.at_level(logging.WARNING, "hvd_ext"):
        fills(make(Counted(), width=25_000, disk=small, memory=None), caplog)
    assert "does without its disk" in caplog.text
    assert not list(small.glob("*/*/.about*"))


def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    source = folders.folder(write_pictures(tmp_path, 12, broken=(5,)), "*.jpg")
    cache = DataCache("bad", source, decode, memory="8MB")
    with pytest.raises(tf.errors.OpError, match=r"cache bad: sample 5 \(.*/b/0005.jpg\): it could not be loaded: "):
        epoch(cache.dataset(4))
    assert cache.stats()["failed"] == 1
    (tmp_path / CLASSES[1] / "0005.jpg").write_bytes((tmp_path / CLASSES[1] / "0006.jpg").read_bytes())
    assert len(epoch(cache.dataset(4))) == 3  # the claims were given back


def test_a_bad_sample_is_replaced_by_another_one_if_there_is_one(tmp_path: Path) -> None:
    source = folders.folder(write_pictures(tmp_path / "some", 12, broken=(5, 6)), "*.jpg")
    cache = DataCache("bad", source, decode, memory="8MB", on_error="replace")
    data = cache.dataset(4)
    for _ in range(2):
        seen = np.concatenate([pictures for pictures, _ in epoch(data)])[:, 3, 3, 0] // 2
        assert seen.tolist() == [0, 1, 2, 3, 4, 7, 7, 7, 8, 9, 10, 11]
    stats = cache.stats()
    assert (stats["replaced"], stats["failed"], stats["memory_records"]) == (4, 4, 10)
    source = folders.folder(write_pictures(tmp_path / "all", 3, broken=(0, 1, 2)), "*.jpg")
    cache = DataCache("bad", source, decode, memory="8MB", on_error="replace")
    with pytest.raises(tf.errors.OpError, match="none of the 2 samples behind it could be loaded in its place either"):
        epoch(cache.dataset(3))


def test_a_sample_is_tried_again() -> None:
    left = {"fail": 2}

    def once(number: np.ndarray) -> np.ndarray:
        if number == 3 and left["fail"]:
            left["fail"] -= 1
            raise OSError("the network is away")
        return number

    def load(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(once, [number], tf.int64), [])

    cache = DataCache("again", SAMPLES, load, memory="8MB", on_error="retry", version="1")
    assert np.concatenate(epoch(cache.dataset(8))).tolist() == SAMPLES.tolist()
    assert cache.stats()["retried"] >= 1
    left["fail"] = 100
    cache = DataCache("again", SAMPLES, load, memory="8MB", on_error="retry", retries=1, version="2")
    with pytest.raises(tf.errors.OpError, match="sample 3 .*could not be loaded 2 times: .*the network is away"):
        epoch(cache.dataset(8))


def of_shapes(shapes: dict[int, tuple[int, ...] | None], op: Any = tf.numpy_function) -> Callable[[tf.Tensor], Any]:
    """Make a load of tensors of unknown rank: of shape (2, 3) but for some samples; those of None cannot be loaded."""

    def made(number: Any) -> np.ndarray:
        shape = shapes.get(int(number), (2, 3))
        if shape is None:
            raise OSError("it cannot be read")
        return np.full(shape, int(number), np.int32)

    return lambda number: {"value": op(made, [number], tf.int32), "number": number}


@pytest.mark.parametrize("op", [tf.numpy_function, tf.py_function])
def test_the_first_sample_tells_the_shape_that_load_does_not(op: Any) -> None:
    cache = DataCache("shapes", SAMPLES, of_shapes({}, op), memory="1MB", version="1")
    assert cache.element_spec["value"] == tf.TensorSpec((2, 3), tf.int32)
    data = cache.dataset(4, drop_remainder=True)
    assert data.element_spec["value"] == tf.TensorSpec((4, 2, 3), tf.int32)
    batches = epoch(data)
    seen = np.concatenate([batch["value"] for batch in batches])
    np.testing.assert_array_equal(seen, np.broadcast_to(SAMPLES[:, None, None], (len(SAMPLES), 2, 3)))


@pytest.mark.parametrize(("shape", "words"), [((3, 2), r"\[3,2\]"), ((6,), r"\[6\]"), ((), r"\[\]")])
def test_a_sample_of_another_shape_than_the_first_is_named(shape: tuple[int, ...], words: str) -> None:
    cache = DataCache("shapes", SAMPLES, of_shapes({5: shape}), memory="1MB", version="1")
    named = rf"sample 5 \(row 5.*it has the shape {words}, and the first sample \[2,3\].*set_shape"
    with pytest.raises(tf.errors.OpError, match=named):
        epoch(cache.dataset(4))


def test_a_first_sample_that_cannot_be_loaded_is_named_or_replaced() -> None:
    load = of_shapes({0: None, 1: None})
    for on_error in ("raise", "retry"):
        with pytest.raises(
            InvalidError, match=r"sample 0 \(row 0 .* could not be loaded.*: OSError: it cannot be read; "
        ):
            DataCache("shapes", SAMPLES, load, memory="1MB", version="1", on_error=on_error, retries=1)
    cache = DataCache("shapes", SAMPLES, load, memory="1MB", version="1", on_error="replace")
    assert epoch(cache.dataset(4))[0]["value"][:, 0, 0].tolist() == [2, 2, 2, 3]
    nothing = of_shapes(dict.fromkeys(range(len(SAMPLES))))
    with pytest.raises(InvalidError, match="could not be loaded, and all samples must have its shape"):
        DataCache("shapes", SAMPLES, nothing, memory="1MB", version="1", on_error="replace")


def test_what_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    def refused(match: str, name: Any = "refused", load: Any = None, **settings: Any) -> None:
        with pytest.raises(InvalidError, match=match):
            DataCache(name, SAMPLES, load, **settings)

    refused(r"name \('a/b'\): must be 1 to 64 letters", name="a/b")
    refused(r"on_error \('skip'\): must be one of raise, retry, replace", on_error="skip")
    refused(r"retries \(-1\): must be a whole number from 0", retries=-1)
    refused(r"threads \(0\): must be a whole number from 1", threads=0)
    refused(r"version \(3\): must be a text", version=3)
    refused(r"memory \('much'\): must be a number of bytes, a size such as", memory="much")
    refused(r"memory \('101%'\): must be", memory="101%")
    refused(r"disk_limit \('50%'\): must be", disk_limit="50%", disk=tmp_path)
    (tmp_path / "file").write_bytes(b"")
    refused(r"disk \(.*file.*\): it cannot be made or written", disk=tmp_path / "file")
    cache = make(Counted())
    for batch_size, settings, words in (
        (0, {}, r"batch_size \(0\): must be a whole number from 1"),
        (4, {"shuffle": 100}, r"shuffle \(100\): must be True or False"),
        (4, {"remainder": "keep"}, r"remainder \('keep'\): must be one of"),
        (4, {"remainder": "uneven", "steps": 3}, "cannot be given with remainder='uneven'"),
        (41, {"drop_remainder": True}, r"batch_size \(41\): must be at most 40"),
    ):
        with pytest.raises(InvalidError, match=words):
            cache.dataset(batch_size, **settings)
    cache.close()
    with pytest.raises(InvalidError, match="cache test: it is closed; make it again"):
        cache.dataset(4)


def test_sizes_in_words() -> None:
    read = store.nbytes_of
    assert [read(value, "x") for value in (None, 0, 5, "8GB", "1.5 GiB", "3kB", "7 B")] == [
        *(0, 0, 5, 8 * 10**9, 3 << 29, 3000, 7)
    ]
    assert read("50%", "x", lambda: 1001) == 500
    assert 0 < store.free_memory() < 1 << 60


def test_the_fill_is_shown_in_lines_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    make(Counted()).warm()
    assert "hvd_ext: cache test: 40 samples, 10.6 kB in " in capfd.readouterr().err
    make(Counted(), "silent", progress=False).warm()
    assert "silent" not in capfd.readouterr().err


def test_a_terminal_has_a_bar_that_ends_with_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing on one that is called dumb
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        epoch(make(Counted()).dataset(16))  # all samples between two looks
        shown = ""
        while "40 samples" not in shown:
            assert select.select([master], [], [], 60)[0]
            shown += os.read(master, 1 << 16).decode()
    os.close(master)
    assert "cache test " in shown and "/40" in shown
    assert shown.endswith("\r\x1b[Khvd_ext: cache test: 40 samples, " + shown.rsplit("samples, ", 1)[1])
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_inside_fit_there_is_a_bar_where_keras_has_none(verbose: int) -> None:
    seen: list[bool] = []

    def look(batch: int, logs: Any) -> None:
        seen.append(filling._keras_has_a_bar())

    models.watch(keras.Model)  # as in a job with a distributed optimizer
    looks = keras.callbacks.LambdaCallback(on_train_batch_begin=look, on_test_batch_begin=look)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 1))
    model.fit(x, x, validation_data=(x, x), batch_size=2, verbose=verbose, callbacks=[looks])
    assert seen == [verbose == 1] * 2


def test_warm_does_not_count_the_samples_for_each_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DataCache("large", np.arange(20_000), memory="8MB", progress=False)
    looks: list[bool] = []
    seen = cache._seen
    monkeypatch.setattr(cache, "_seen", lambda: looks.append(True) or seen())
    begin = time.monotonic()
    assert cache.warm()["memory_records"] == 20_000
    assert len(looks) <= 2 + time.monotonic() - begin


def test_the_commands_list_verify_and_clear(tmp_path: Path) -> None:
    name = f"listed-{os.getpid()}"
    make(Counted(), name, disk=tmp_path, keep=True).warm()
    caches.open_caches()[0].close()
    run = CliRunner().invoke
    listed = run(app, ["ls", str(tmp_path), "--name", name], env={"COLUMNS": "300"})
    rows = [line for line in listed.output.splitlines() if name in line]
    assert len(rows) == 2 and all("100.0%" in row and " 40 " in row for row in rows)
    verified = run(app, ["verify", str(tmp_path), "--name", name])
    assert verified.exit_code == 0 and verified.output.count("40 samples, ") == 2
    (segment,) = tmp_path.glob("*/*/segment-*")
    flip_a_bit(segment, 10 * 320 + 100)
    verified = run(app, ["verify", str(tmp_path), "--name", name])
    assert verified.exit_code == 1 and "1 damaged" in verified.output
    assert run(app, ["clear", str(tmp_path), "--name", name], input="n\n").exit_code == 1
    assert run(app, ["clear", str(tmp_path), "--name", name, "--yes"]).exit_code == 0
    assert not list(tmp_path.glob("*/*/index")) and name not in {one.name for one in store.in_memory()}
    assert "no caches" in run(app, ["ls", str(tmp_path), "--name", name]).output


ALONE = """
import ctypes, os, sys, types

package = types.ModuleType("hvd_ext.data")  # what the package itself imports is not in question
package.__path__ = [os.environ["PACKAGE"]]
sys.modules["hvd_ext.data"] = package
from hvd_ext.engine import libraries
libraries.ENGINE_LIBRARY = libraries.OPS_LIBRARY = "/absent.so"
from hvd_ext.data import native
number = ctypes.c_int64()
options = native.Options(name=b"early", samples=4, memory_bytes=1 << 27)
native.call("hvd_ext_cache_open", ctypes.byref(options), ctypes.byref(number))
native.call("hvd_ext_cache_insert", number, 2, b"abcd", 4, None)
assert "tensorflow" not in sys.modules
import tensorflow as tf
batch, missing, _ = native.lookup(number.value, [2, 3], [tf.uint8], [4])
print(bytes(batch[0][0].numpy()), missing.numpy())
mapped = open("/proc/self/maps").read()
assert "libhvd_ext_data.so" in mapped and "libhvd_ext_cache.so" in mapped
assert "libmpi" not in mapped and "libhvd_ext_engine" not in mapped, mapped
assert "mpi4py" not in sys.modules and "hvd_ext.engine.native" not in sys.modules

del sys.modules["hvd_ext.data"]
import numpy as np
import hvd_ext as hvd
from hvd_ext.errors import NotInitializedError
for batch in hvd.DataCache("alone", np.arange(100), memory="8MB", disk=os.environ["DISK"]).dataset(8).take(3):
    pass
print(hvd.is_initialized())
os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
try:
    hvd.DataCache("ranked", np.arange(100), memory="8MB")
except NotInitializedError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_without_engine_mpi_and_init_has_a_cache_and_ends_well_and_a_rank_is_refused(tmp_path: Path) -> None:
    environ = {**os.environ, "PACKAGE": str(Path(store.__file__).parent), "DISK": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, env=environ)
    found, initialized, refused = done.stdout.splitlines()
    assert (done.returncode, found, initialized) == (0, "b'abcd' [1]", "False"), done.stderr
    assert "one of 4 ranks, and init() was not called" in refused
