"""`DataCache` on any number of ranks: one copy for the host, each sample loaded once, equal steps."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ext.data import cache as caches, folders
from hvd_ext.errors import InvalidError, MismatchError
from tests.unit.data.caching import Counted, decode, epoch, numbered, numbers_of, write_pictures

pytestmark = pytest.mark.slow

SAMPLES = np.arange(48)


@pytest.fixture(autouse=True)
def closed(hvd: ModuleType) -> Any:
    """Close what a test has opened, after all ranks have used it."""
    yield
    hvd.barrier()
    for one in caches.open_caches():
        one.clear()


def make(hvd: ModuleType, counted: Counted, **settings: Any) -> Any:
    settings = {"memory": "8MB", "version": "1", "progress": False, **settings}
    return hvd.DataCache("ranks", SAMPLES, numbered(counted), **settings)


def of_all(hvd: ModuleType, mine: list[int]) -> list[int]:
    return [number for each in hvd.allgather_object(mine) for number in each]


def test_the_ranks_of_a_host_have_one_copy_and_load_each_sample_once(hvd: ModuleType, size: int) -> None:
    counted = Counted()
    cache = make(hvd, counted)
    used = len(SAMPLES) // size * size
    data = cache.dataset(4, shuffle=True, seed=1)
    mine = [numbers_of(epoch(data)) for _ in range(3)]
    assert all(sorted(one) == sorted(mine[0]) for one in mine)  # each epoch has the same part, in another order
    assert len(set(map(tuple, mine))) == 3
    assert len(set(of_all(hvd, mine[0]))) == used
    stats = cache.stats()
    assert (stats["loaded"], stats["hits"]) == (used // size, 2 * used // size)
    assert counted.times == dict.fromkeys(mine[0], 1)
    hvd.barrier()
    assert cache.stats()["memory_records"] == used  # what the other ranks have stored is in this memory too


def test_the_pipelines_of_a_hosts_ranks_share_its_processors(
    hvd: ModuleType, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(cores: set[int], **settings: Any) -> int:
        monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)
        data = make(hvd, Counted(), **settings).dataset(4)
        return int(data.options().threading.private_threadpool_size)

    assert threads(set(range(4 * size))) == 4
    assert threads(set(range(4 * rank, 4 * rank + 4))) == 4  # bound to processors of its own
    assert threads({0}) == 1
    assert threads(set(range(4 * size)), threads=3) == 3


def test_tensorflow_tunes_nothing_in_it(hvd: ModuleType) -> None:
    assert make(hvd, Counted()).dataset(4).options().autotune.enabled is False
    assert hvd.shard(np.arange(64.0), batch_size=1, shuffle=True).options().autotune.enabled is False


def test_ranks_that_take_each_others_samples_find_them(hvd: ModuleType, size: int) -> None:
    counted = Counted()
    cache = make(hvd, counted)
    data = cache.dataset(4, shuffle=True, seed=1, parts=1)
    used = len(SAMPLES) // size * size
    for _ in range(3):
        assert len(set(of_all(hvd, numbers_of(epoch(data))))) == used
    times = [number for number, often in counted.times.items() for _ in range(often)]
    loaded = of_all(hvd, times)
    assert len(loaded) == len(set(loaded))


def test_all_ranks_have_equal_steps_with_a_bad_sample(hvd: ModuleType, shared: Path, rank: int, size: int) -> None:
    if rank == 0:
        write_pictures(shared / "pictures", 24, broken=(7,))
    hvd.barrier()
    source = folders.folder(shared / "pictures", "*.jpg")
    cache = hvd.DataCache("bad", source, decode, memory="8MB", on_error="replace", progress=False)
    data = cache.dataset(4, shuffle=True)
    steps = [len(epoch(data)) for _ in range(2)]
    assert steps == [-(-(24 // size) // 4)] * 2
    replaced = of_all(hvd, [cache.stats()["replaced"]])
    assert sum(replaced) == 2  # in both epochs, by the rank whose part has it
    raising = hvd.DataCache("raising", source, decode, memory="8MB", progress=False)
    words = ""
    try:
        epoch(raising.dataset(4))
    except tf.errors.OpError as error:
        words = str(error)
    assert [("0007.jpg): it could not be loaded" in each) for each in hvd.allgather_object(words)].count(True) == 1


def test_ranks_with_other_arguments_or_data_are_refused_on_all(
    hvd: ModuleType, rank: int, size: int, tmp_path: Path
) -> None:
    if size == 1:
        return
    with pytest.raises(MismatchError, match="DataCache: name .* must be the same on all ranks"):
        hvd.DataCache("b" if rank else "a", SAMPLES, memory="8MB")
    with pytest.raises(MismatchError, match="DataCache ranks: on_error must be the same on all ranks"):
        make(hvd, Counted(), on_error="raise" if rank else "retry")
    with pytest.raises(MismatchError, match="DataCache other: the data must be the same on all ranks"):
        hvd.DataCache("other", SAMPLES + rank, memory="1MB")
    with pytest.raises(MismatchError, match="DataCache other: load .* must be the same on all ranks"):
        hvd.DataCache("other", SAMPLES, lambda number: number + rank, memory="1MB")
    with pytest.raises(InvalidError, match=r"rank 1: source \('nowhere'\): say what lies there"):
        hvd.DataCache("other", "nowhere" if rank else SAMPLES, memory="1MB")
    with pytest.raises(MismatchError, match="DataCache other: disk must be the same on all ranks"):
        hvd.DataCache("other", SAMPLES, memory="1MB", disk=None if rank else str(tmp_path))
    with pytest.raises(InvalidError, match=r"memory \('lots'\)"):
        hvd.DataCache("other", SAMPLES, memory="lots" if rank else "1MB")
    cache = make(hvd, Counted())
    with pytest.raises(MismatchError, match="dataset: batch_size must be the same on all ranks"):
        cache.dataset(4 + rank)


def test_the_logs_of_fit_have_the_hits_of_each_epoch(hvd: ModuleType) -> None:
    cache = hvd.DataCache("logged", np.arange(48.0), lambda x: (x[None], x[None] * 2), memory="8MB", progress=False)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), "mse")
    data = cache.dataset(4, shuffle=True)
    history = model.fit(data, epochs=2, verbose=0, callbacks=hvd.callbacks.synchronized()).history
    assert history["logged_cache_hits"] == [0, 1]
    assert history["logged_cache_mb"][1] > 0
    assert history["logged_cache_wait_s"][0] > history["logged_cache_wait_s"][1] == 0
