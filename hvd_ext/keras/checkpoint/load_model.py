"""`load_model`: a model from a file, with its optimizer wrapped; ranks without the file get it from another rank."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_ext.errors import CheckpointError, InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.keras.optimizers.optimizer import wrap
from hvd_ext.options import faces
from hvd_ext.options.reduction import option
from hvd_ext.state.manifest import described
from hvd_ext.tensorflow.collectives.objects import broadcast_object

# A file is sent to the ranks that lack it in pieces of so many bytes.
_PIECE_NBYTES = 32 << 20
# In place of a digest: each rank reads a folder by itself.
_FOLDER = "a folder"


@dataclasses.dataclass(frozen=True, eq=False)
class LoadArguments(faces.Arguments):
    """The arguments of `load_model`."""

    filepath: str | os.PathLike[str]
    custom_optimizers: Sequence[type] | None = None
    custom_objects: Mapping[str, Any] | None = None
    _: dataclasses.KW_ONLY
    compile: bool = True
    safe_mode: bool = True
    root_rank: int | None = None
    legacy_opts: bool = False
    name: str | None = None
    use_locking: bool = option(False, "see device_dense.")


@faces.takes(LoadArguments, as_for="hvd_ext.DistributedOptimizer")
def load_model(arguments: LoadArguments) -> keras.Model:
    """Load a model that was saved with or without the wrapper, and wrap its optimizer.

    The model is one of Keras 3, or of tf_keras where the environment variable TF_USE_LEGACY_KERAS makes tf.keras that.

    Without `root_rank` each rank that calls it reads its own file, and does not communicate. So rank 0 alone may load a
    model, as scripts for Horovod do; its variables must then be broadcast before the first step. With `root_rank` all
    ranks call it, and get the file of that rank.

    Slots, iterations, loss scale and averages of weights come from the file. It has no states of seed generators, and
    of the gradients that were accumulated since the last update only those of the rank that saved it
    (`hvd_ext.callbacks.Checkpoint` saves all of them).

    Args:
        filepath: a `.keras` or `.h5` file; with root_rank, any path on ranks that do not have the file.
        custom_optimizers: classes of optimizers of your own.
        custom_objects: classes and functions of your own, by name, as `keras.models.load_model` takes them.
        compile: False gives the model without optimizer and loss; it cannot be trained before `compile`.
        safe_mode: as `keras.models.load_model` takes it.
        root_rank: the rank whose file all get; it is sent to ranks that do not have the same bytes. None: every rank
            reads its own file.
        legacy_opts: must be False with Keras 3, which has no legacy optimizers; with tf_keras it changes nothing, since
            the file says what its optimizer is.
        name: the optimizer's name in messages; None for its class's name.

    Returns:
        The model. If it was saved without an optimizer it has none: wrap the one that you give to `compile`.

    Raises:
        CheckpointError: there is no such file, or it cannot be read; with root_rank on all ranks.
        MismatchError: the ranks have different values of root_rank.
        InvalidError: there are options for an optimizer, and the file has none; or the optimizer cannot be wrapped.
    """
    if arguments.legacy_opts and _library() is keras:
        raise InvalidError(
            f"load_model: legacy_opts ({arguments.legacy_opts!r}): must be False; Keras 3 has no legacy optimizers. "
            "Set TF_USE_LEGACY_KERAS=1 to load models of tf_keras"
        )
    options, filepath, root_rank = arguments.options(), arguments.filepath, arguments.root_rank
    where = f"load_model ({os.fspath(filepath)})"
    custom = {cls.__name__: cls for cls in arguments.custom_optimizers or ()}
    objects = {**(arguments.custom_objects or {}), **custom}

    def loaded(path: Path) -> keras.Model:
        model = _loaded(path, objects, arguments.compile, arguments.safe_mode, where)
        if getattr(model, "optimizer", None) is not None:
            model.optimizer = wrap(model.optimizer, arguments.name, options)
        elif options.changed():
            given = ", ".join(options.changed())
            raise InvalidError(
                f"{where}: the model has no optimizer that {given} could be for; compile it with "
                "hvd_ext.DistributedOptimizer"
            )
        return model

    if root_rank is None:
        return loaded(Path(filepath))
    job = runtime.current()
    with tempfile.TemporaryDirectory(prefix="hvd_ext-") as folder:
        path = _shared(job, Path(filepath), Path(folder), where, root_rank)
        models: list[keras.Model] = []
        consensus.exchange(job.engine, "load_model", lambda: models.append(loaded(path)))
    if job.engine.rank == root_rank and job.engine.size > 1 and _accumulates(models[0]):
        logger.warning(
            "%s: saved in the middle of a gradient accumulation; the gradients that the other ranks had accumulated "
            "are not in this file, so all ranks continue from those of rank %d",
            where,
            root_rank,
        )
    return models[0]


def _shared(job: runtime.Runtime, path: Path, folder: Path, where: str, root: int) -> Path:
    """Give the path of a file with the bytes of the root's: this rank's own, or a copy in the folder."""

    def mine() -> dict[str, Any]:
        consensus.place_of_root(job.engine, root)
        return {"root_rank": root, "digest": _digest(path, job.engine.rank == root, where)}

    answers = consensus.exchange(job.engine, "load_model: file", mine)
    consensus.check_same("load_model", [{"root_rank": answer["root_rank"]} for answer in answers])
    seen = [answer["digest"] for answer in answers]
    lacking = [rank for rank, digest in enumerate(seen) if digest != seen[root]]
    if not lacking:
        return path
    differing = [rank for rank in lacking if seen[rank] is not None]
    if differing and job.engine.rank == root:
        logger.warning(
            "%s: rank %d has a different file of this name; all ranks use that of rank %d", where, differing[0], root
        )
    if seen[root] == _FOLDER:
        raise CheckpointError(f"{where}: it is a folder, which all ranks must have; rank {lacking[0]} does not have it")
    copy = folder / path.name
    pieces = _pieces(path) if job.engine.rank == root else iter(())
    with contextlib.ExitStack() as stack:
        failed: OSError | None = None
        target = None
        while isinstance(piece := broadcast_object(next(pieces, None), root, name="load_model: bytes"), bytes):
            if job.engine.rank in lacking and failed is None:
                try:
                    target = target or stack.enter_context(copy.open("wb", buffering=0))
                    target.write(piece)
                except OSError as error:  # the root goes on sending, and hears of it at the end
                    failed = error

    def outcome() -> None:
        if isinstance(piece, str) or failed is not None:
            raise CheckpointError(f"{where}: it could not be sent to the other ranks: {piece or failed}")

    consensus.exchange(job.engine, "load_model: sent", outcome)
    return copy if job.engine.rank in lacking else path


def _pieces(path: Path) -> Iterator[bytes | str]:
    """Yield a file's bytes in pieces; after an error, its message in place of the rest."""
    try:
        with path.open("rb") as source:
            while piece := source.read(_PIECE_NBYTES):
                yield piece
    except OSError as error:
        yield str(error)


def _digest(path: Path, must: bool, where: str) -> str | None:
    if path.is_dir():
        return _FOLDER
    try:
        return described(path).sha256
    except OSError as error:
        if must:
            raise CheckpointError(
                f"{where}: the root rank must have it, but it cannot be read: {error.strerror}"
            ) from error
        return None


def _accumulates(model: keras.Model) -> bool:
    optimizer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    passes: Any = getattr(optimizer, "gradient_accumulation_steps", None)
    return bool(passes) and int(optimizer._iterations.numpy()) % passes != 0


def _library() -> Any:
    """Give the Keras whose models are loaded: tf_keras where TF_USE_LEGACY_KERAS makes tf.keras that, else Keras 3."""
    return keras if tf.keras.Model is keras.Model else tf.keras


def _loaded(path: Path, objects: dict[str, Any], compile: bool, safe_mode: bool, where: str) -> keras.Model:
    try:
        model = _library().models.load_model(path, custom_objects=objects, compile=compile, safe_mode=safe_mode)
    except Exception as error:  # Keras, zip and HDF5 raise different ones for a file that is not theirs
        raise CheckpointError(f"{where}: Keras cannot load it: {type(error).__name__}: {error}") from error
    if (
        isinstance(model, keras.Model)
        and path.suffix in (".h5", ".hdf5")
        and getattr(model, "optimizer", None) is not None
    ):
        _mend_slots(model, path)
    return model


def _mend_slots(model: keras.Model, path: Path) -> None:
    """Give the optimizer of an HDF5 file its slots: Keras 3 writes them into the file, and does not read them."""
    import h5py

    plain = type(model.optimizer).from_config(model.optimizer.get_config())
    model.optimizer = plain
    plain.build(model.trainable_variables)
    with h5py.File(path, "r") as file:
        group = file.get("optimizer_weights")
        names = [] if group is None else list(map(tf.compat.as_str, group.attrs["weight_names"]))
        if len(names) == len(plain.variables):
            for variable, name in zip(plain.variables, names, strict=True):
                variable.assign(group[name][()])
