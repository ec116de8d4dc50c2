"""Machines with GPUs: each rank of a host gets a GPU."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.job.log import logger
from hvd_ext.tensorflow import ops

VISIBLE = "CUDA_VISIBLE_DEVICES"
_logged: set[str] = set()  # the warnings that this process has logged


@dataclasses.dataclass(frozen=True)
class Seen:
    """A rank's report about its GPUs.

    Attributes:
        gpus: the number of GPUs that TensorFlow lists.
        visible: the rank's CUDA_VISIBLE_DEVICES, or None.
        initialized: whether TensorFlow already uses several of the GPUs.
    """

    host: str
    gpus: int
    visible: str | None
    initialized: bool


def pin_gpu(*, memory_growth: bool = True) -> Any:
    """Give this rank the GPU of its host whose number is `local_rank()`; all ranks call it, right after `init()`.

    If the launcher has given each rank a GPU of its own (CUDA_VISIBLE_DEVICES, as SLURM does with --gpus-per-task),
    the rank takes this one. On a host without GPUs nothing happens.

    Args:
        memory_growth: let TensorFlow take the GPU's memory as it needs it, instead of all memory at once.

    Returns:
        The `tf.config.PhysicalDevice`, or None if the host has no GPU.

    Raises:
        InvalidError: a host has fewer GPUs than ranks, ranks would share a GPU, or TensorFlow has used its GPUs
            already; raised on all ranks, with the message about the first such rank.
        NotInitializedError: before `init()`.
    """
    job = runtime.current()
    gpus = tf.config.list_physical_devices("GPU")

    def about() -> dict[str, Any]:
        used = len(gpus) > 1 and _initialized() and len(tf.config.get_visible_devices("GPU")) > 1
        return dataclasses.asdict(Seen(platform.node(), len(gpus), os.environ.get(VISIBLE), used))

    answers = [Seen(**answer) for answer in consensus.exchange(job.engine, "pin_gpu", about)]
    index = choose(answers)[job.engine.rank]
    if index is None:
        return None
    # once TensorFlow has used its GPUs, it refuses every call of set_visible_devices that changes something
    if [gpus[index]] != tf.config.get_visible_devices("GPU"):
        tf.config.set_visible_devices(gpus[index], "GPU")
    if memory_growth and not _initialized():
        tf.config.experimental.set_memory_growth(gpus[index], True)
    return gpus[index]


def on_gpu(variables: Iterable[Any]) -> bool:
    """Tell whether variables, of Keras or of TensorFlow, are all on GPUs; what has no device is not."""
    return all(":GPU:" in device_of(variable) for variable in variables)


def device_of(variable: Any) -> str:
    """Return TensorFlow's name of the device of a variable, of Keras or of TensorFlow; "" if it has none."""
    tensor = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
    return getattr(tensor, "device", None) or ""


def of_buckets(variables: Sequence[Any], job: runtime.Runtime) -> str:
    """Return the GPU of all variables, if the job keeps buckets there, else the host; the names are TensorFlow's."""
    names = {device_of(variable) for variable in variables} if job.options.gpu_buckets else set()
    return names.pop() if len(names) == 1 and on_gpu(variables) else ops.HOST


def choose(answers: Sequence[Seen]) -> list[int | None]:
    """Give each rank its GPU's place in TensorFlow's list, or None; `InvalidError` as `pin_gpu`."""
    chosen: list[int | None] = []
    for rank, seen in enumerate(answers):
        on_host = [other for other, answer in enumerate(answers) if answer.host == seen.host]
        place = on_host.index(rank)
        if seen.initialized:
            raise InvalidError(
                f"pin_gpu: rank {rank} of host {seen.host} uses its {seen.gpus} GPUs already, and TensorFlow cannot "
                "give them back; call pin_gpu() right after init(), before the first tensor"
            )
        if not seen.gpus:
            chosen.append(None)
        elif seen.gpus == 1 and seen.visible and len(on_host) > 1:
            twins = [other for other in on_host if answers[other].visible == seen.visible]
            if len(twins) > 1:
                raise InvalidError(
                    f"pin_gpu: ranks {', '.join(map(str, twins))} of host {seen.host} share one GPU "
                    f"({VISIBLE}={seen.visible}); unset it, or let the launcher give each rank its own"
                )
            chosen.append(0)
        elif place >= seen.gpus:
            raise InvalidError(
                f"pin_gpu: host {seen.host} has {seen.gpus} GPUs for {len(on_host)} ranks, none for rank {rank} (local "
                f"rank {place}); start as many ranks on each host as it has GPUs, or hide the GPUs: {VISIBLE}=-1"
            )
        else:
            chosen.append(place)
    return chosen


def warn_of_shared() -> None:
    """Warn once if several ranks of a host see several GPUs: each rank would take memory of all of them."""
    job = runtime.current_or_none()
    if job is None or job.hosts.count(job.hosts[job.engine.rank]) < 2:
        return
    seen = len(tf.config.get_visible_devices("GPU"))
    if seen > 1 and "shared" not in _logged:
        _logged.add("shared")
        logger.warning(
            "rank %d sees %d GPUs, and so do the other ranks of host %s: TensorFlow takes memory of all of them in "
            "every rank; call hvd_ext.pin_gpu() right after init()",
            job.engine.rank,
            seen,
            job.hosts[job.engine.rank],
        )


def _initialized() -> bool:
    from tensorflow.python.eager import context

    return bool(context.context()._initialized)
