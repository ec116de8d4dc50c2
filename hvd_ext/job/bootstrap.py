"""What the ranks of a job tell each other at its start: their hosts, and the options that must be equal on all."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hvd_ext import options
from hvd_ext.engine import engine
from hvd_ext.errors import InvalidError, TopologyError
from hvd_ext.job import consensus, membership, rank_lists, runtime

if TYPE_CHECKING:
    from hvd_ext.topology.tree import Tree


def joined(running: engine.Engine, settings: options.Options, comm: Any) -> runtime.Runtime:
    """Compare the options of all ranks, and find the hosts; raises what `hvd_ext.job.process.init` raises."""
    tree: Tree | None = None

    def about() -> dict[str, Any]:
        nonlocal tree
        _check_all_ranks(comm, running)
        tree = _given_tree(settings, running.size)
        return {
            "host": platform.node(),
            "options": {
                "algorithm": settings.algorithm,
                "bucket_nbytes": settings.bucket_nbytes,
                "buckets": settings.buckets,
                "replan_every": settings.replan_every,
                "op": settings.op.name,
                "compression": settings.compression.name,
                "window": settings.window,
                "transport": settings.transport,
                "topology": "found by itself" if tree is None else repr(tree),
                "probe": settings.probe,
                "gpu_buckets": settings.gpu_buckets,
                "trace": "none" if settings.trace is None else "recorded",
            },
        }

    answers = consensus.exchange(running, "init", about)
    consensus.check_same("init", [answer["options"] for answer in answers])
    hosts = tuple(answer["host"] for answer in answers)
    if tree is None:
        from hvd_ext.job import network

        settings = settings.replace(topology=None)  # that it was given may be of another world
        network_of_job = network.of_job(running, hosts, settings)
        return runtime.Runtime(running, network_of_job.tree, settings, hosts, network_of_job)
    if membership.session() is not None:
        from hvd_ext.job import network

        network.remember(hosts, tree)
    return runtime.Runtime(running, tree, settings, hosts)


def _check_all_ranks(comm: Any, running: engine.Engine) -> None:
    """Refuse a `comm` that would leave ranks out or renumber them."""
    if rank_lists.is_communicator(comm):
        if (comm.Get_size(), comm.Get_rank()) == (running.size, running.rank):
            return
        seen = f"a communicator in which this rank is {comm.Get_rank()} of {comm.Get_size()}"
    else:
        ranks = list(comm) if isinstance(comm, Iterable) and not isinstance(comm, str) else [comm]
        if comm is None or not ranks or ranks == list(running.ranks):
            return
        seen = f"{comm!r}"
    raise InvalidError(
        f"init (comm={seen}): it must have all {running.size} ranks of the job in their order, this rank is "
        f"{running.rank}; run collectives among some of them in a process set: hvd.add_process_set(ranks)"
    )


def _given_tree(settings: options.Options, size: int) -> Tree | None:
    """Return the topology that was given; None without one, or where a later world has another number of ranks."""
    session = membership.session()
    try:
        return _read_tree(settings, size)
    except TopologyError:
        if session is None or (session.world <= 0 and not session.waits):
            raise
        return None


def _read_tree(settings: options.Options, size: int) -> Tree | None:
    if settings.topology is None:
        return None
    if isinstance(settings.topology, (str, os.PathLike)):
        from hvd_ext.topology import read

        return read.read(os.fspath(settings.topology), size)
    if settings.topology.size != size:
        raise TopologyError(
            f"topology: it must have one leaf per rank; it has {settings.topology.size} ranks and the job has {size}"
        )
    return settings.topology
