"""One rank that measures sparse and dense sums: `LAUNCHER python -m benchmarks.studies.hitopk.worker FOLDER TASK`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.hitopk.names import Name
from benchmarks.studies.hitopk.sampling import Gradient, Mass, MassSampler, Watched, shares_of
from hvd_ext.bench.sampling import Contestant, Ranks, serve

if TYPE_CHECKING:
    from hvd_ext.planning.layout import BucketLayout
    from hvd_ext.planning.tensors import Tensor

# The most records of a step's trace: a sparse plan is one segment of some 20 rounds.
RECORDS = 1 << 12
# No density reaches this, so the sparse plan is never replaced by the dense one.
NEVER_DENSE = 2.0
# Two steps beside the plan's four: the gradient is copied into the engine's buffer, and the result out of it.
COPY_IN, COPY_OUT = "copy in", "copy out"


class Sums:
    """The ways to sum one float32 gradient, and the channels that they have opened; all ranks use it alike."""

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._close: list[Callable[[], Any]] = []

    def contestants(self, elements: int, names: Sequence[str]) -> list[Contestant]:
        """Prepare a contestant for each name, see `names.Name`, for gradients of so many elements."""
        from hvd_ext.job import process

        gradient = Gradient(process.rank(), elements)
        result = np.empty_like(gradient.values)  # shared by all contestants, because memory may not hold ten large ones
        makers = {True: _mpi, False: self._ours}
        names_read = [Name.read(text) for text in names]
        return [makers[name.algorithm == "mpi"](name, gradient, result) for name in names_read]

    def release(self) -> None:
        """Close the channels that were opened."""
        while self._close:
            self._close.pop()()

    def _ours(self, name: Name, gradient: Gradient, result: NDArray[np.float32]) -> Watched:
        make = self._dense if name.density is None else self._sparse
        call, mass = make(name, gradient, result)
        facts = mass.facts
        reset = lambda: result.fill(np.nan)  # noqa: E731 - as short as its meaning
        return Watched(name.text, "engine", call, facts["plan"], facts["segment_bytes"], reset=reset, mass=mass)

    def _dense(self, name: Name, gradient: Gradient, result: NDArray[np.float32]) -> tuple[Callable[[], Any], Mass]:
        from hvd_ext.job import runtime
        from hvd_ext.options import Sum
        from hvd_ext.planning.layout import layout

        job = runtime.current()
        laid_out = layout(job.tree, [_tensor(result)], Sum, algorithm=name.algorithm, wire=name.wire_dtype)
        (bucket,) = laid_out.buckets
        channel = job.open(f"bench {name.text}", laid_out)
        self._close.append(lambda: job.engine.close_channel(channel))

        def call() -> NDArray[np.float32]:
            job.engine.reduce(channel, [gradient.values], [result])
            return result

        facts = {"plan": bucket.plan.algorithm, "segment_bytes": bucket.segment_nbytes}
        return call, Mass(gradient, exact=name.wire_dtype is None, facts=facts)

    def _sparse(self, name: Name, gradient: Gradient, result: NDArray[np.float32]) -> tuple[Callable[[], Any], Mass]:
        from hvd_ext.job import runtime
        from hvd_ext.options import Sum
        from hvd_ext.planning import grain, sparse_planner
        from hvd_ext.planning.layout import BucketLayout, Layout, Selection
        from hvd_ext.trace.events import levels_of

        job, density = runtime.current(), name.density
        assert density is not None
        engine, size = job.engine, result.size
        choice = sparse_planner.sparse_plan(job.tree, name.algorithm, result.nbytes, density, 4)
        segment_nbytes = grain.segment_nbytes(choice.plan, result.nbytes, job.tree)
        selection = Selection(dense_above=NEVER_DENSE, value_wire=name.wire_dtype or "float32")
        bucket = BucketLayout(
            "float32", (0,), Sum, choice.plan, segment_nbytes, selection=selection, dense=choice.dense, choice=choice
        )
        channel = job.open(f"bench {name.text}", Layout((_tensor(result),), (bucket,)))
        self._close.append(lambda: engine.close_channel(channel))
        levels = levels_of(choice.plan)

        def call() -> NDArray[np.float32]:
            engine.begin_topk_step(channel, density)
            engine.reduce(channel, [gradient.values], [result])
            engine.end_step(channel, True)
            return result

        def trace(meet: Callable[[], None]) -> tuple[dict[str, float], NDArray[np.float32]]:
            from hvd_ext.trace import records

            records.start(RECORDS)
            call()
            meet()
            records.stop()
            lane = 1 + (channel & 0xFFFFFFFF)
            seen = [record for record in records.decoded(records.read(RECORDS)) if record.lane == lane]
            of = {kind: [record for record in seen if record.kind == kind] for kind in records.Kind}
            copies = {
                name: sum(record.end_ns - record.begin_ns for record in of[kind]) / 1e9
                for name, kind in ((COPY_IN, records.Kind.FILL), (COPY_OUT, records.Kind.DELIVER))
            }
            shares = shares_of(of[records.Kind.ROUND], levels)
            return {COPY_IN: copies[COPY_IN], **shares, COPY_OUT: copies[COPY_OUT]}, result

        def sent() -> tuple[int, int]:
            seen = engine.topk_statistics(channel)
            return seen.entries, seen.value_bytes + seen.index_bytes + seen.head_bytes

        def residual() -> float:
            return float(np.sum(engine.read_state(channel, 0), dtype=np.float64))

        facts = {"plan": choice.plan.algorithm, "segment_bytes": segment_nbytes, "dense_above": choice.dense_above}
        if name.algorithm == "hitopk":
            facts["entry_bytes"] = _entry_nbytes(name, bucket, gradient, result)
        hosts = len(job.tree.hosts())
        picks = {"hitopk": size if hosts == 1 else hosts * (int(density * size) + 1)}
        most = picks.get(name.algorithm, engine.size * (int(density * size) + 1))
        return call, Mass(gradient, most=most, residual=residual, sent=sent, trace=trace, facts=facts)


def _entry_nbytes(name: Name, bucket: BucketLayout, gradient: Gradient, result: NDArray[np.float32]) -> float | None:
    """Do one step in which only selected elements are sent as entries, and give the bytes of an entry.

    In the last step of hitopk a rank may send sums as entries too, and the counters do not tell the two kinds apart.
    """
    from hvd_ext.job import runtime
    from hvd_ext.planning.layout import Layout
    from hvd_ext.planning.schedules import hitopk

    job = runtime.current()
    engine, density = job.engine, name.density
    assert density is not None
    plan = hitopk.build(job.tree, gather="dense")
    alone = dataclasses.replace(bucket, plan=plan, segment_nbytes=max(result.nbytes, 1))
    channel = job.open(f"bench {name.text}, bytes", Layout((_tensor(result),), (alone,)))
    engine.begin_topk_step(channel, density)
    engine.reduce(channel, [gradient.values], [result])
    engine.end_step(channel, True)
    sent = engine.topk_statistics(channel)
    engine.close_channel(channel)
    counts = (sent.entries, sent.value_bytes + sent.index_bytes + sent.head_bytes)
    entries, nbytes = np.sum(Ranks().gather(counts), axis=0).tolist()
    return nbytes / entries if entries else None


def _tensor(result: NDArray[np.float32]) -> Tensor:
    from hvd_ext.planning.tensors import Tensor

    return Tensor("gradient", (result.size,), "float32")


def _mpi(name: Name, gradient: Gradient, result: NDArray[np.float32]) -> Watched:
    from mpi4py import MPI

    def call() -> NDArray[np.float32]:
        MPI.COMM_WORLD.Allreduce(gradient.values, result, op=MPI.SUM)
        return result

    return Watched(name.text, "engine", call, reset=lambda: result.fill(np.nan), mass=Mass(gradient))


def main(folder: str, _: str) -> None:
    """Serve the parent, which has written the task."""
    from hvd_ext.job import process

    process.init()
    sums = Sums()
    serve(sums.contestants, folder, release=sums.release, kind=MassSampler)
    process.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
