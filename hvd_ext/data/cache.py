"""`DataCache`: samples are loaded once on each host, and come from its memory or its disk from then on."""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvd_ext.data import arrays, fingerprint, native, store
from hvd_ext.data.elements import Elements
from hvd_ext.data.filling import Filling
from hvd_ext.data.loading import ON_ERROR, OTHERS, Loader, first_line
from hvd_ext.data.settings import check_division, check_enough, check_whole
from hvd_ext.data.steps import Steps, untuned
from hvd_ext.errors import InvalidError, NotInitializedError
from hvd_ext.job import consensus, launch, log, membership, process, process_sets, runtime
from hvd_ext.tensorflow.ops import plain

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.job.process_sets import ProcessSet

_LOG = logging.getLogger("hvd_ext")

_PLACES = ("memory", "disk")
_PREFETCHED = 2  # batches that are ready before they are needed
_WARMED = 32  # samples of a batch of `warm`
_LOOK_S = 1.0  # between two looks of `warm` whether there is room: each counts all samples

_open: weakref.WeakSet[DataCache] = weakref.WeakSet()


def open_caches() -> list[DataCache]:
    """Give the caches of this process that are open, by their names."""
    return sorted((cache for cache in _open if cache.is_open), key=lambda cache: cache.name)


class DataCache:
    """Samples that are loaded once on each host: later they come from memory that its ranks share, or from its disk.

    The first time a sample is needed, it is read from the source and goes through `load`, and the result is stored.
    Memory and disk are filled until they have what they may take, and nothing is thrown out of them again; samples that
    find no room are loaded in every epoch. After a change of the source or of `load` the cache starts empty.

    One rank needs no `init()`. In a job of several ranks all of them make the cache, with the same arguments.

    Attributes:
        name: of the cache.
        samples: the number of samples.
        element_spec: the nest of `tf.TypeSpec` of a sample.
    """

    def __init__(
        self,
        name: str,
        source: Any,
        load: Callable[..., Any] | None = None,
        *,
        memory: int | str | None = "50%",
        disk: str | os.PathLike[str] | None = None,
        disk_limit: int | str | None = None,
        keep: bool = False,
        on_error: Literal["raise", "retry", "replace"] = "raise",
        retries: int = 3,
        version: str = "",
        threads: int | None = None,
        process_set: ProcessSet | None = None,
        progress: bool = True,
    ) -> None:
        """Open the cache.

        Args:
            name: of the cache: letters, digits, ".", "_" and "-".
            source: `hvd_ext.data.folder`, `tfrecord`, `tar`, or arrays (one, or a nest of them).
            load: makes a sample of what the source gives, such as a decoded picture of its file: a function of
                TensorFlow without random parts, called as `tf.data.Dataset.map` calls it. It may return numbers,
                strings, ragged and sparse tensors, in any nest. A tensor of unknown rank, such as `tf.numpy_function`
                gives, must have the shape of the first sample in all of them. None: samples are what the source gives.
            memory: the bytes of samples in memory for all ranks of the host: a number, "8GB", "8GiB", or a share of the
                free memory, the smaller of what the cgroup and the machine have left. None or 0: none.
            disk: a folder on a disk of this host, where samples stay for later jobs; each host has a folder of its own
                in it, by its name. None: none.
            disk_limit: the bytes of samples on the disk, as a number or "200GB"; None: no limit.
            keep: leave the memory to the next job on this host, in a file in /dev/shm that others cannot read, until
                `clear()` or the end of the machine. Else nothing is left of it when the job ends.
            on_error: what happens if a sample cannot be loaded. "raise": training ends with its name. "retry": the same
                after `retries` more attempts. "replace": another sample comes in its place, so that all ranks keep
                equal steps; `stats()` counts them.
            retries: the number of attempts after the first with on_error="retry".
            version: a word of your own; another one starts an empty cache. For what load does outside of its graph; the
                attributes of objects whose methods it calls do not count then.
            threads: how many samples this rank loads at the same time; None: the processors that the process may use,
                divided by the ranks of the host that use the same ones.
            process_set: the ranks that use the cache; None: all.
            progress: show on rank 0 how the first fill goes on.

        Raises:
            InvalidError: an argument breaks its rule, the source cannot be read, or load cannot be traced.
            MismatchError: the ranks have different arguments or data; on all ranks.
            NotInitializedError: a launcher has started several ranks, and `init()` was not called.
        """
        self.name = store.check_name(name)
        self._disk = disk
        self._process_set = process_set
        self._engine = _engine(process_set, name)
        self._load = load
        limits: dict[str, Any] = {}

        def prepare() -> dict[str, Any]:
            _check(on_error, retries, threads, version)
            limits["memory"] = store.nbytes_of(memory, "memory", store.free_memory)
            limits["limit"] = store.nbytes_of(disk_limit, "disk_limit")
            self._source = arrays.as_source(source)
            self._source.open(None if disk is None else store.host_folder(disk))
            self._prepare(on_error, retries, version)
            return {
                "disk": disk is not None,
                "keep": keep,
                "on_error": on_error,
                "retries": retries,
                "version": version,
                "samples": self.samples,
                "the data": self._source.contents,
                "load (without the attributes of objects, if there is a version=)": self._load_digest,
                "the structure of a sample": repr(self._elements.described()),
            }

        self._agree(prepare)
        memory_bytes = limits["memory"]
        self._folder = None if disk is None else store.folder_of(disk, name, self._digest)
        self._kept = store.kept_path(name, self._digest) if keep and memory_bytes else None
        self._tell_of_earlier()
        if progress and self._rank == 0 and self._source.left_out:
            log.write(log.line(f"cache {name}: {self._source.words}"))
        sharing = self._open_store(memory_bytes, limits["limit"])
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // sharing)
        self._filling = Filling(name, self._expected(), self._seen) if progress and self._rank == 0 else None
        self._loader = Loader(
            self._store,
            self._elements,
            self._source.locate,
            lambda located: self._call(self._source.read(located)),
            self._source.place_of,
            on_error,
            retries,
            (lambda: None) if self._filling is None else self._filling.tick,
            self._threads,
        )
        self.is_open = True
        _open.add(self)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self._source.samples

    @property
    def element_spec(self) -> Any:
        """The nest of `tf.TypeSpec` of a sample."""
        return self._elements.spec

    @property
    def _rank(self) -> int:
        return 0 if self._engine is None else self._engine.rank

    @property
    def _size(self) -> int:
        return 1 if self._engine is None else self._engine.size

    def _agree(self, prepare: Callable[[], dict[str, Any]]) -> None:
        """Prepare on all ranks, and compare what they have.

        With a disk the first rank of each host looks for the samples first, because the others can read what it finds.
        """
        if self._engine is None:
            prepare()
            return
        subject = f"DataCache {self.name}"
        first = self._disk is None or process.local_rank() == 0
        mine: dict[str, Any] = {}

        def begun() -> dict[str, Any]:
            if first:
                mine.update(prepare())
            return {"name (all ranks must open their caches in the same order)": self.name}

        # one name for all caches: ranks that open different ones meet and raise
        names = consensus.exchange(self._engine, "DataCache", begun)
        consensus.check_same("DataCache", names, self._engine.ranks)
        settings = consensus.exchange(self._engine, subject, lambda: mine or prepare())
        consensus.check_same(subject, settings, self._engine.ranks)

    def _prepare(self, on_error: str, retries: int, version: str) -> None:
        """Trace load, and say what the cache is of."""
        what = "load" if self._load is not None else "source"
        with tf.device("CPU:0"):
            traced = tf.function(self._call).get_concrete_function(self._source.element_spec)
        spec = tf.nest.map_structure(_spec_of, traced.structured_outputs)
        if any(map(_without_rank, tf.nest.flatten(spec))):
            first = self._first(traced, on_error, retries)
            spec = tf.nest.map_structure(
                lambda part, value: _spec_of(value) if _without_rank(part) else part, spec, first
            )
        self._elements = Elements(spec, what)
        self._load_digest = fingerprint.of_function(traced, version)
        self._digest = fingerprint.of_parts(
            self._source.digest, self._load_digest, self._elements.described(), version, self.samples
        )

    def _first(self, traced: Any, on_error: str, retries: int) -> Any:
        """Load the first sample, or the first one that can be loaded, for the shapes that tracing does not tell."""
        attempts = {"raise": [0], "retry": [0] * (1 + retries), "replace": range(min(self.samples, 1 + OTHERS))}
        for number in attempts[on_error]:
            try:
                located = self._source.locate(tf.constant([number], tf.int64))
                return traced(self._source.read(tf.nest.map_structure(lambda column: column[0], located)))
            except tf.errors.OpError as error:
                place = self._source.place_of(number)
                words = f"it could not be loaded, and all samples must have its shape: {first_line(error)}"
        raise InvalidError(
            f"cache {self.name}: sample {number} ({place}): {words}; mend or remove it, or give the shape in load: "
            "tensor.set_shape(...)"
        )

    def _call(self, element: Any) -> Any:
        if self._load is None:
            return element
        return self._load(*element) if isinstance(element, tuple) else self._load(element)

    def _tell_of_earlier(self) -> None:
        if self._rank != 0:
            return
        stored: list[store.Found] = []
        if self._folder is not None and not self._folder.exists():
            stored += store.on_disk(self._folder.parent)
        if self._kept is not None and not self._kept.exists():
            stored += store.in_memory()
        earlier = sorted(
            {str(cache.path) for cache in stored if cache.name == self.name and cache.digits != self._digest[:16]}
        )
        if earlier:
            _LOG.warning(
                "cache %s: starts empty, because the source, load or version is another than that of %s, which stays "
                "until `python -m hvd_ext cache clear` deletes it",
                self.name,
                " and ".join(earlier),
            )

    def _open_store(self, memory_bytes: int, disk_bytes: int) -> int:
        """Open the store, and give the number of ranks of this host that use the processors of this one."""
        subject = f"DataCache {self.name}: memory"
        host, cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
        of_host = [cores]

        def opened() -> tuple[str, list[int], list[int]]:
            self._store = store.Store(
                self.name,
                self._digest,
                self.samples,
                memory_bytes=memory_bytes,
                keep=self._kept,
                folder=self._folder,
                disk_bytes=disk_bytes,
                about={
                    "source": self._source.words,
                    "elements": self._elements.described(),
                    "fingerprint": self._digest,
                },
            )
            return host, cores, self._store.address()

        if self._engine is None:
            opened()
        else:
            # Hosts of a rehearsed cluster could map each other's memory, and must not: they stand for machines.
            of_ranks = consensus.exchange(self._engine, subject, opened)
            of_host = [affinity for name, affinity, _ in of_ranks if name == host]
            addresses = [address for name, _, address in of_ranks if name == host]
            # No rank continues, and perhaps ends, before all have mapped what they share.
            consensus.exchange(self._engine, f"{subject} is shared", lambda: self._store.share(addresses))
        self._store.tell_warnings()
        # A launcher may have bound ranks to processors of their own. Where it has not, ranks that do not use this cache
        # have the same ones.
        same = of_host.count(cores)
        return same if same < len(of_host) else _local_size()

    def _expected(self) -> int:
        """Give the number of samples that the ranks of this host read if each has a part of its own."""
        return self.samples // self._size * min(_local_size(), self._size)

    def _seen(self) -> tuple[int, int, bool]:
        seen = self._store.statistics()
        records = max(seen["memory_records"], seen["disk_records"])
        stored = max(seen["memory_inserted_bytes"], seen["disk_inserted_bytes"])
        inserted = max(1, seen["memory_inserted"], seen["disk_inserted"])
        records += self._loader.counts["failed"]  # those will never be there
        return records, records * stored // inserted, bool(seen["memory_open"] or seen["disk_open"])

    def dataset(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        remainder: Literal["drop", "repeat", "uneven"] = "drop",
        steps: int | None = None,
        drop_remainder: bool = False,
        parts: int | None = None,
        keys: bool = False,
        padding: Any = None,
        process_set: ProcessSet | None = None,
    ) -> tf.data.Dataset:
        """Give this rank's batches of each epoch; all ranks of a job call it alike, and all have equally many steps.

        In every epoch each rank has the same part of the samples, in a new order if shuffled; so what its host has
        stored is what it needs. Where training stopped and goes on, also on another number of ranks with the same
        number of samples in a step, it goes on with the samples that would have come (docs/saving.md).

        Args:
            batch_size: samples in a batch of one rank.
            shuffle: a new order in every epoch, of the whole part of the rank: there is no buffer.
            seed: of the order and of keys; the same on all ranks.
            remainder: what happens to the samples that are left when all ranks have equally many. "drop": no rank sees
                them. "repeat": samples from the beginning fill up. "uneven": the first ranks have one more, for
                validation.
            steps: the number of steps in an epoch, all with full batches; None: those that the samples make.
            drop_remainder: drop a last, smaller batch.
            parts: into how many parts the order divides the samples; None: the number of ranks. An earlier job's
                number is taken over from its checkpoint.
            keys: give each sample a seed: batches are (samples, seeds), with seeds int32 [batch, 2] that depend on
                seed, epoch and sample alone. With `tf.image.stateless_random_crop` and the like, augmentation is the
                same on any number of ranks.
            padding: of samples of varying shape: None gives ragged batches; a value, or a nest of values as
                `tf.data.Dataset.padded_batch` takes it, pads to the largest sample of the batch.
            process_set: the ranks that divide the samples; None: those of the cache.

        Returns:
            A `tf.data.Dataset` with its cardinality. Augmentation goes behind it, with `map`.

        Raises:
            InvalidError: an argument breaks its rule, there are fewer samples than ranks, or the cache is closed.
            MismatchError: the ranks have different arguments; on all ranks.
        """
        self._check_open()
        engine = self._engine if process_set is None else process_sets.member(process_set, "dataset").engine
        if engine is not None and membership.session() is not None:  # another world may have begun since
            engine = process_sets.member(process_set or self._process_set, "dataset").engine
        rank, size = (0, 1) if engine is None else (engine.rank, engine.size)
        settings = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "remainder": remainder,
            "steps": steps,
            "drop_remainder": drop_remainder,
            "parts": parts,
        }

        def mine() -> dict[str, Any]:
            _check_dataset(self.samples, size, settings)
            return {**settings, "keys": keys}

        if engine is None:
            mine()
        else:
            subject = f"DataCache {self.name}: dataset"
            consensus.check_same(subject, consensus.exchange(engine, subject, mine), engine.ranks)
        elements = self._elements if padding is None else Elements(self.element_spec, "load", padding)
        epochs = Steps(self.name, self.samples, rank=rank, size=size, **settings)
        spec: Any = elements.batch_spec(epochs.rows)
        if keys:
            spec = (spec, tf.TensorSpec([epochs.rows, 2], tf.int32))

        def read(numbers: tf.Tensor, seeds: tf.Tensor, parts: tf.Tensor) -> Any:
            batch = elements.batch(self._rows(numbers, parts), epochs.rows)
            return (batch, seeds) if keys else batch

        dataset = epochs.batches(read, spec, self._loader.begin)
        return dataset.with_options(self._options()).prefetch(_PREFETCHED)

    def _options(self) -> tf.data.Options:
        options = untuned()
        options.threading.private_threadpool_size = self._threads
        # shuffling and sharding are done already; TensorFlow must not divide the data of a distributed fit again
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return options

    def _rows(self, numbers: tf.Tensor, parts: tf.Tensor | int) -> list[tf.Tensor]:
        """Give the rows of samples from the nearest place that has them, in a graph."""
        return native.read(self._store.cache, numbers, self._elements.dtypes, self._elements.counts, parts)

    def warm(self) -> dict[str, Any]:
        """Load this rank's part of the samples now, as far as there is room, with a bar on rank 0.

        Returns:
            `stats()`.

        Raises:
            InvalidError: a sample cannot be loaded, or the cache is closed.
        """
        self._check_open()
        self._loader.begin()
        numbers = tf.data.Dataset.range(self._rank, self.samples, self._size).batch(_WARMED)

        def read(numbers: tf.Tensor) -> tf.Tensor:
            return tf.shape(self._rows(numbers, self._size)[0])[0]

        warmed = numbers.map(plain(read)).with_options(self._options())
        next_look = 0.0
        for _ in warmed:
            if time.monotonic() < next_look:
                continue
            if not self._seen()[2]:
                break
            next_look = time.monotonic() + _LOOK_S
        if self._filling is not None:
            self._filling.tick(now=True)
        return self.stats()

    def stats(self) -> dict[str, Any]:
        """Count what this rank has done since it opened the cache, and what the host's places hold.

        Returns:
            "samples"; of this rank: "hits", "memory_hits", "disk_hits" and "memory_bytes", "disk_bytes" that they had,
            "loaded" (from the source), "passed_through" (of those: found no room), "damaged" (records that were not
            what was written, and were loaded again), "replaced", "retried", "failed" (samples that could not be
            loaded), "taken_over" (loads of processes that have ended), "waits" (for samples that other processes load);
            where its threads were, in seconds: "memory_s", "disk_s", "load_s" (the source and load) and "wait_s" (for
            other processes); of the host: "memory_records", "disk_records", and whether a place takes more:
            "memory_open", "disk_open".
        """
        seen, counts = self._store.statistics(), self._loader.counts
        return {
            "samples": self.samples,
            "hits": seen["memory_hits"] + seen["disk_hits"],
            **{f"{place}_hits": seen[f"{place}_hits"] for place in _PLACES},
            **{f"{place}_bytes": seen[f"{place}_hit_bytes"] for place in _PLACES},
            **{name: counts[name] for name in ("loaded", "replaced", "retried", "failed")},
            **{name: seen[name] for name in ("passed_through", "damaged", "taken_over", "waits")},
            **{f"{place}_s": seen[f"{place}_ns"] / 1e9 for place in _PLACES},
            "load_s": counts["load_ns"] / 1e9,
            "wait_s": seen["waited_ns"] / 1e9,
            **{f"{place}_records": seen[f"{place}_records"] for place in _PLACES},
            **{f"{place}_open": bool(seen[f"{place}_open"]) for place in _PLACES},
        }

    def verify(self) -> dict[str, int]:
        """Read every stored sample of this host and compare its checksum; damaged ones are forgotten and loaded again.

        Returns:
            "memory_records", "memory_bytes", "memory_damaged", and the same of the disk.

        Raises:
            InvalidError: the cache is closed.
        """
        self._check_open()
        verified = self._store.verify()
        self._store.tell_warnings()
        return verified

    def clear(self) -> None:
        """Delete what the cache has stored on this host's disk and in memory that stays, and close it."""
        self.close()
        for path in (self._folder, self._kept):
            if path is not None and path.exists():
                store.Found(path, self.name, self._digest[:16]).clear()

    def close(self) -> None:
        """Give this rank's hold of the memory back; data sets of the cache cannot be read any more."""
        if self.is_open:
            self.is_open = False
            if self._filling is not None:
                self._filling.close()
            self._store.close()

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidError(f"cache {self.name}: it is closed; make it again")

    def __repr__(self) -> str:
        return f"DataCache({self.name!r}, {self._source.words})"


def _engine(process_set: ProcessSet | None, name: str) -> Engine | None:
    """Give the engine of the ranks that use the cache; None for a process that is alone."""
    if process_set is not None or runtime.current_or_none() is not None:
        return process_sets.member(process_set, f"DataCache {name}").engine
    size = launch.examine(os.environ).size
    if size is not None and size > 1:
        raise NotInitializedError(
            f"DataCache {name}: this process is one of {size} ranks, and init() was not called; call hvd.init() first, "
            "so that the ranks share the cache and divide its samples"
        )
    return None


def _local_size() -> int:
    return process.local_size() if process.is_initialized() else 1


def _spec_of(value: Any) -> Any:
    return tf.type_spec_from_value(value) if not isinstance(value, tf.TypeSpec) else value


def _without_rank(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.shape.rank is None


def _check(on_error: object, retries: object, threads: object, version: object) -> None:
    if on_error not in ON_ERROR:
        raise InvalidError(f"on_error ({on_error!r}): must be one of {', '.join(ON_ERROR)}")
    check_whole("retries", retries, 0)
    check_whole("threads", threads, 1, optional=True)
    if not isinstance(version, str):
        raise InvalidError(f"version ({version!r}): must be a text")


def _check_dataset(samples: int, size: int, settings: Mapping[str, Any]) -> None:
    check_whole("batch_size", settings["batch_size"], 1)
    if not isinstance(settings["shuffle"], bool):
        raise InvalidError(
            f"shuffle ({settings['shuffle']!r}): must be True or False; a whole part is shuffled, without a buffer"
        )
    check_division("", settings)
    check_enough(f"{samples} samples", samples, size, settings["remainder"])
    elements = samples // size
    if settings["drop_remainder"] and settings["steps"] is None and settings["batch_size"] > elements:
        raise InvalidError(
            f"batch_size ({settings['batch_size']}): must be at most {elements}, the samples of each rank, with "
            "drop_remainder=True"
        )
