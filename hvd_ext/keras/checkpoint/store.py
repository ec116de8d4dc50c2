"""Checkpoints of a model on several ranks: which rank writes which files, and which checkpoint all ranks can read."""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

import hvd_ext
from hvd_ext import state
from hvd_ext.errors import CheckpointError, HvdExtError, InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.checkpoint import callback_states, model_state, optimizer_states
from hvd_ext.state import arrays, folder, manifest
from hvd_ext.state.arrays import Sections
from hvd_ext.state.manifest import File, Manifest
from hvd_ext.tensorflow import layers

# Sections of a rank's file; each owner of hvd_ext.state has one, whose name begins with the last of these.
_WEIGHTS, _SEEDS, _METRICS, _RANDOM, _OWNER = "weights", "seeds", "metrics", "random", "state:"
# More sections, which older checkpoints lack: the random generators at the begin of the epoch in whose middle the
# checkpoint was saved; the state of `fit`; and one for each callback.
_BEGAN, _FIT, _CALLBACK = "random at the epoch's begin", "fit", "callback:"
# What layers have besides variables: of all layers on rank 0, on the others of those that differ from rank 0's.
_LAYERS = "layers"

_WRITES = "a checkpoint could not be written, older ones are unchanged; make room on the disk, or check that it works"

T = TypeVar("T")


class Store:
    """The checkpoints of one model in one directory, on a disk that the ranks share or on one of each host."""

    def __init__(self, model: keras.Model, directory: Path, keep: int, arguments: dict[str, Any]) -> None:
        """Make and look at the directory; all ranks call it.

        Args:
            arguments: the user's, which must be the same on all ranks.

        Raises:
            InvalidError: the model has no variables yet, or the directory cannot be used; on all ranks.
            MismatchError: the ranks have different arguments.
        """
        self._model, self._directory, self._keep = model, directory, keep
        self._job = runtime.current()
        self._rank = self._job.engine.rank
        self._own: Sections = {}
        mark = uuid.uuid4().hex
        answers = self._exchange("begin", lambda: self._prepared(mark, arguments))
        consensus.check_same("Checkpoint", [answer["arguments"] for answer in answers])
        marks = [answer["mark"] for answer in answers]
        self._newest = [answer["newest"] for answer in answers]
        self._serial = max(self._newest)
        # the first rank of those that share a directory makes, renames and removes folders in it
        leaders = self._exchange("disks", lambda: next(i for i, m in enumerate(marks) if folder.has_mark(directory, m)))
        self._leads = leaders[self._rank] == self._rank
        with contextlib.suppress(OSError):
            folder.unmark(directory, mark)
            if self._leads:
                folder.clean(directory)

    def save(
        self,
        epoch: int,
        step: int,
        reason: str,
        signal: str | None,
        data: dict[str, dict[str, int]],
        callbacks: Sequence[Any] = (),
        began: Mapping[str, np.ndarray] | None = None,
    ) -> str | None:
        """Save; all ranks call it.

        Args:
            epoch: the epoch to go on with.
            step: the number of its batches that are done.
            signal: a signal that this rank has got, or None.
            data: how the data are divided, of rank 0, by their names (`hvd_ext.data.cursor`).
            began: the state of the random generators when the epoch began, if batches of it are done.

        Returns:
            A signal that some rank has got, or None.

        Raises:
            CheckpointError: a rank's disk is full or does not work; on all ranks. Older checkpoints are as they were.
            MismatchError: the ranks are not after the same batch.
        """
        start_s = time.monotonic()
        written, others = model_state.variables(self._model)
        about = {"position": {"epoch": epoch, "step": step}, "signal": signal, "id": uuid.uuid4().hex, "data": data}

        def described() -> dict[str, Any]:
            sums = [crc for _, crc in layers.checksums(layers.stateful(self._model))]
            return {**about, "digests": model_state.digests(written), "layers": sums}

        answers = self._exchange("save", described)
        consensus.check_same("Checkpoint", [answer["position"] for answer in answers])
        first = answers[0]["digests"]
        differing = [[i for i, digest in enumerate(answer["digests"]) if digest != first[i]] for answer in answers]
        all_layers, mine_here = answers[0]["layers"], answers[self._rank]["layers"]
        own_layers = [i for i, digest in enumerate(mine_here) if self._rank == 0 or [digest] != all_layers[i : i + 1]]
        self._serial += 1
        writing = folder.writing(self._directory, self._serial, answers[0]["id"])
        try:
            self._exchange("folder", lambda: self._disk(_WRITES, writing.mkdir) if self._leads else None)
            write = functools.partial(self._write, writing, differing[self._rank], own_layers, callbacks, began)
            entries = self._exchange("files", lambda: self._disk(_WRITES, write))
            files = [File.model_validate(file) for answer in entries for file in answer["files"]]
            complete = Manifest(
                id=answers[0]["id"],
                reason=reason,
                created=entries[0]["created"],
                epoch=epoch,
                step=step,
                ranks=self._job.engine.size,
                hosts=[self._job.hosts.count(host) for host in dict.fromkeys(self._job.hosts)],
                versions=entries[0]["versions"],
                variables=model_state.described([*written, *others]),
                own=[written[index].path for index in sorted({i for indices in differing for i in indices})],
                states=sorted({owner for answer in entries for owner in answer["states"]}),
                data=answers[0]["data"],
                swapped=any(getattr(callback, "_ema_weights_in_model", False) for callback in callbacks),
                model=files[0].name,
                files=files,
            )
            publish = functools.partial(folder.publish, self._directory, writing, self._serial, complete)
            self._exchange("publish", lambda: self._disk(_WRITES, publish) if self._leads else None)
        except BaseException:
            if self._leads:
                shutil.rmtree(writing, ignore_errors=True)
            raise
        try:
            if self._leads:
                folder.prune(self._directory, self._keep)
        except OSError as error:
            logger.warning("Checkpoint: rank %d cannot remove an old checkpoint: %s", self._rank, error)
        if self._rank == 0:
            megabytes, seconds = sum(file.nbytes for file in files) / 1e6, time.monotonic() - start_s
            name = folder.path_of(self._directory, self._serial).name
            words = "%s: saved (%s): epoch %d, batch %d; %.1f MB in %.2f s"
            logger.info(words, name, reason, epoch, step, megabytes, seconds)
        return next((answer["signal"] for answer in answers if answer["signal"]), None)

    def find(self, must: bool) -> tuple[Path, Manifest] | None:
        """Find the newest checkpoint complete on all ranks; None, or with must `CheckpointError`, if none is."""
        waiting = folder.serials(self._directory) if self._rank == 0 else []
        while (offer := self._exchange("offer", lambda: self._offer(waiting))[0]) is not None:
            offered = manifest.parse(offer["manifest"], "Checkpoint")
            path = folder.path_of(self._directory, offer["serial"])
            faults = self._exchange("have", functools.partial(self._fault, path, offered))
            lacking = [rank for rank, fault in enumerate(faults) if fault]
            if not lacking:
                return path, offered
            self._pass_over(f"rank {lacking[0]}: {faults[lacking[0]]}")
        best = max(range(len(self._newest)), key=self._newest.__getitem__)
        if must:
            raise CheckpointError(
                f"Checkpoint, directory ({self._directory}): no checkpoint is complete, but resume=True needs one"
            )
        if self._newest[best] and self._rank == 0:
            name = folder.path_of(self._directory, self._newest[best]).name
            logger.warning(
                "Checkpoint: rank %d has %s, but no checkpoint is complete on all ranks: training starts over",
                best,
                name,
            )
        return None

    def restore(self, path: Path, saved: Manifest) -> None:
        """Restore what `find` has found; all ranks call it; `CheckpointError` on all if the model differs."""
        self._load(path, saved)
        alike = saved.ranks == self._job.engine.size
        left = optimizer_states.restore(self._model, self._sections(_OWNER), path, saved, _OWNER)
        if self._rank == 0:
            logger.info("%s: restored: epoch %d, batch %d", path.name, saved.epoch, saved.step)
            if not alike:
                words = "%s: saved by %d ranks, restored on %d: all ranks get rank 0's model; dropped: %s"
                dropped = [*saved.own, *left, "seeds, random state and the state of callbacks"]
                logger.warning(words, path.name, saved.ranks, self._job.engine.size, ", ".join(dropped))

    def restore_variables(self, path: Path, saved: Manifest) -> bool:
        """Restore only the model of what `find` has found; False if it is another model; all ranks call it."""

        def suits() -> bool:
            written, others = model_state.variables(self._model)
            with contextlib.suppress(CheckpointError):
                model_state.check(saved.variables, [*written, *others], path.name)
                return True
            return False

        if not all(self._exchange("model", suits)):
            return False
        self._load(path, saved)
        self.forget()
        return True

    def swap_back(self, callbacks: Sequence[Any]) -> None:
        """Exchange the weights and their moving averages, as `keras.callbacks.SwapEMAWeights` does before an epoch.

        Args:
            callbacks: those of `fit`; one that has swapped in this process need not do so once more.
        """
        written, _ = model_state.variables(self._model)
        swap = keras.callbacks.SwapEMAWeights()
        swap.set_model(self._model)
        swap.on_test_begin()
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                callback._ema_weights_in_model = False
        if self._own:
            self._own[_WEIGHTS] = model_state.arrays(written, [int(index) for index in self._own[_WEIGHTS]])

    def restore_own(self) -> None:
        """Set the variables and random generators that are this rank's own once more."""
        if self._own:
            self._assign(self._own)

    def restore_callbacks(self, callbacks: Sequence[Any]) -> tuple[str, ...]:
        """Give the callbacks of `fit` their state. Returns the saved callbacks that are not among them."""
        return callback_states.restore(callbacks, self._sections(_CALLBACK))

    @property
    def stopped(self) -> bool:
        """Whether a callback had stopped training when the checkpoint was saved."""
        return bool(self._own.get(_FIT, {}).get("stop_training", False))

    def replay(self) -> None:
        """Set the random generators to their states at the begin of the epoch: skipped batches are drawn once more."""
        model_state.set_random_state(self._own.get(_BEGAN, {}))

    def replayed(self) -> None:
        """After the skipped batches, set the metrics, and the random generators that those batches do not draw from.

        The other generators are where the batches have left them. Where another thread prepares data before the step
        asks for it, they are ahead of their states in the checkpoint.
        """
        if _BEGAN in self._own:
            model_state.set_random_state(model_state.not_drawn_from(self._own[_BEGAN], self._own[_RANDOM]))
        saved = self._own.get(_METRICS, {})
        seen = self._model.metrics_variables
        if [value.shape for value in saved.values()] == [tuple(variable.shape) for variable in seen]:
            model_state.assign(seen, saved, "Checkpoint")

    def forget(self) -> None:
        """Drop the restored state: training has gone on from it."""
        self._own = {}

    def _sections(self, prefix: str) -> Sections:
        """Give the restored sections whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): section for name, section in self._own.items() if name.startswith(prefix)}

    def _prepared(self, mark: str, arguments: dict[str, Any]) -> dict[str, Any]:
        model_state.ready(self._model)
        try:
            folder.prepare(self._directory, mark)
            newest = next(iter(folder.serials(self._directory)), 0)
        except OSError as error:
            raise InvalidError(
                f"Checkpoint, directory ({self._directory}): must be writable: {error.strerror}"
            ) from error
        return {"arguments": arguments, "mark": mark, "newest": newest}

    def _write(
        self,
        writing: Path,
        differing: list[int],
        own_layers: list[int],
        callbacks: Sequence[Any],
        began: Mapping[str, np.ndarray] | None,
    ) -> dict[str, Any]:
        """Write this rank's files."""
        written, others = model_state.variables(self._model)
        states = {**state.collect(), **optimizer_states.collect(self._model)}
        content = {
            _WEIGHTS: model_state.arrays(written, differing),
            _SEEDS: model_state.arrays(others),
            _LAYERS: layers.collect(self._model, own_layers),
            _METRICS: model_state.arrays(self._model.metrics_variables),
            _RANDOM: model_state.random_state(),
            **({_BEGAN: began} if began else {}),
            _FIT: {"stop_training": np.array(bool(getattr(self._model, "stop_training", False)))},
            **{_CALLBACK + key: values for key, values in callback_states.collect(callbacks).items()},
            **{_OWNER + owner: values for owner, values in states.items()},
        }
        files = [folder.settle(writing / model_state.save(self._model, writing))] if self._rank == 0 else []
        files.append(folder.write(writing / manifest.rank_file(self._rank), lambda file: arrays.write(file, content)))
        return {
            "files": [file.model_dump() for file in files],
            "states": list(states),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {
                "hvd_ext": hvd_ext.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        }

    def _offer(self, waiting: list[int]) -> dict[str, Any] | None:
        """Find the next checkpoint whose model's file is whole, on rank 0."""
        while waiting:
            serial = waiting.pop(0)
            path = folder.path_of(self._directory, serial)
            try:
                saved = manifest.read(path)
                manifest.check(path, saved, [saved.model])
            except CheckpointError as error:
                self._pass_over(str(error))
                continue
            return {"serial": serial, "manifest": saved.text()}
        return None

    def _fault(self, path: Path, offered: Manifest) -> str | None:
        """Say what is wrong with this rank's part of a checkpoint; None where nothing is."""
        if offered.ranks != self._job.engine.size:
            return None
        try:
            if manifest.read(path).id != offered.id:
                return f"{path.name}: it differs from rank 0's checkpoint of this name"
            manifest.check(path, offered, [manifest.rank_file(self._rank)])
        except CheckpointError as error:
            return str(error)
        return None

    def _pass_over(self, words: str) -> None:
        if self._rank == 0:
            logger.warning("Checkpoint: skipped: %s", words)

    def _load(self, path: Path, saved: Manifest) -> None:
        """Set the variables of the model and of its optimizers, and the random generators."""
        written, others = model_state.variables(self._model)
        alike = saved.ranks == self._job.engine.size

        def load() -> None:
            model_state.check(saved.variables, [*written, *others], path.name)
            if self._rank == 0 or alike:
                with (path / manifest.rank_file(self._rank)).open("rb") as file:
                    self._own = arrays.read(file)
            if self._rank == 0:
                self._model.load_weights(path / saved.model)
                layers.restore(self._model, self._own.get(_LAYERS, {}))

        self._exchange("load", lambda: self._disk("a complete checkpoint must be readable", load))
        if self._job.engine.size > 1:
            model_state.send(written)
            layers.send("Checkpoint", self._model, 0)
        if alike:
            self._assign(self._own)
        else:
            self.forget()
            layers.refresh(self._model)

    def _assign(self, sections: Sections) -> None:
        written, others = model_state.variables(self._model)
        model_state.assign(written, sections[_WEIGHTS], "Checkpoint")
        model_state.assign(others, sections[_SEEDS], "Checkpoint")
        layers.restore(self._model, sections.get(_LAYERS, {}))
        model_state.set_random_state(sections[_RANDOM])

    def _disk(self, rule: str, work: Callable[[], T]) -> T:
        """Do work on the disk; every failure becomes a `CheckpointError`, whichever library it comes from."""
        try:
            return work()
        except HvdExtError:
            raise
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"Checkpoint, directory ({self._directory}): {rule}; {seen}") from error

    def _exchange(self, what: str, make: Callable[[], Any]) -> list[Any]:
        return consensus.exchange(self._job.engine, f"Checkpoint: {what}", make)
