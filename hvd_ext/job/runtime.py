"""The running job as the rest of the package sees it: its engine, its topology, its options and the plans in use."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING

from hvd_ext.errors import NotInitializedError

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.engine.partial import Partial
    from hvd_ext.job.network import Network
    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.options import Options
    from hvd_ext.planning.layout import Layout
    from hvd_ext.planning.model import LogicalPlan
    from hvd_ext.topology.tree import Tree

KIB = 1 << 10

# A call's plan and grain depend on the size of its buffer, which may be unknown when a graph is traced. So the op holds
# one row for each class of sizes, and looks up its class when it runs. A class covers the sizes up to its limit and is
# planned for that limit; one more class has no limit.
SIZE_CLASSES: tuple[int, ...] = (4 * KIB, 64 * KIB, 1024 * KIB, 16 * 1024 * KIB, 256 * 1024 * KIB)


TABLE_NBYTES = 8  # of a rank in the table of who takes part in a round (PartialSteps::TableElements)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A plan that the engine holds.

    Args:
        plan: the engine's handle.
        digest: the plan's digest, equal on all ranks.
        segment_nbytes: the grain of pipelining for the size that the plan was prepared for.
    """

    plan: int
    digest: int
    segment_nbytes: int
    algorithm: str


class Runtime:
    """The state from `init` to `shutdown`, or of one process set: engine, topology, options, hosts and plans."""

    def __init__(
        self, engine: Engine, tree: Tree, options: Options, hosts: tuple[str, ...], network: Network | None = None
    ) -> None:
        """Store what `hvd_ext.job.process.init` or `hvd_ext.job.process_sets` has found.

        Args:
            tree: the topology, with one leaf per rank.
            network: where the links of the tree come from; None if the user has given them.
        """
        self.network = network
        self.process = os.getpid()  # a forked child has another number
        self.engine = engine
        self.tree = tree
        self.options = options
        self.hosts = hosts
        self.plans: dict[int, LogicalPlan] = {}  # by handle
        self.process_sets: dict[int, ProcessSet] = {}  # only in the job's runtime: the sets that were added, by id
        self.last_process_set = 0  # the id of the newest set
        self._agreements: dict[str, threading.RLock] = {}
        self._handles: dict[int, int] = {}
        self._prepared: dict[tuple[str, str | int, int], Prepared] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()

    def subset(self, engine: Engine) -> Runtime:
        """Make the runtime of a process set of this job."""
        return Runtime(
            engine, self.tree.subset(engine.ranks), self.options, tuple(self.hosts[rank] for rank in engine.ranks)
        )

    def count(self, kind: str) -> int:
        """Return the next number for an eager call of a kind; default names contain it."""
        with self._lock:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
            return number

    def agreement(self, kind: str) -> threading.RLock:
        """Return the lock that a thread holds while the ranks agree on something in several exchanges.

        Agreements of one kind begin with an exchange of one name, so that ranks whose threads begin different ones meet
        there. Kinds with a common lock would wait for each other.
        """
        with self._lock:
            return self._agreements.setdefault(kind, threading.RLock())

    def prepare(self, plan: LogicalPlan) -> int:
        """Hand this rank's rows of a plan to the engine once, after its proof (`planner.prove`).

        Returns:
            The engine's handle.

        Raises:
            PlanError: the plan does not compute its collective.
        """
        from hvd_ext.planning import ir, lower, planner

        digest = ir.digest(plan)
        with self._lock:
            if digest not in self._handles:
                planner.prove(plan)
                handle = self.engine.add_plan(lower.rows_of(plan, self.engine.rank), plan.units)
                self._handles[digest] = handle
                self.plans[handle] = plan
            return self._handles[digest]

    def open(self, name: str, layout: Layout, partial: Partial | None = None) -> int:
        """Open a channel of the engine; all ranks call it in the same order, with equal layouts.

        Args:
            partial: what makes its rounds partial; None if steps wait for all ranks.

        Raises:
            PlanError: a plan does not compute its collective.
            InvalidError: the engine refused the layout.
        """
        if partial is None:
            return self.engine.open_channel(name, layout, self.prepare)
        hosts = {rank: host for host, ranks in enumerate(self.tree.hosts()) for rank in ranks}
        table = self.allreduce(TABLE_NBYTES * self.engine.size)
        described = partial.described(
            [hosts[rank] for rank in range(self.engine.size)], table.plan, table.segment_nbytes
        )
        return self.engine.open_channel(name, layout, self.prepare, described)

    def allreduce(self, nbytes: int, algorithm: str | None = None) -> Prepared:
        """Prepare an allreduce.

        Args:
            nbytes: the size of the buffer.
            algorithm: a name or "auto"; None for the algorithm of the options.

        Returns:
            The prepared plan.

        Raises:
            PlanError: the algorithm is unknown, or cannot run on the topology.
        """
        from hvd_ext.planning import planner

        algorithm = self.options.algorithm if algorithm is None else algorithm
        with self._lock:
            key = ("allreduce", algorithm, nbytes)
            if key not in self._prepared:
                chosen = planner.allreduce_plan(self.tree, algorithm, nbytes=nbytes)
                self._prepared[key] = self._made(chosen.plan, nbytes)
            return self._prepared[key]

    def all_gather(self, nbytes: int) -> Prepared:
        """Prepare an all-gather.

        Args:
            nbytes: the size of the result.

        Returns:
            The prepared plan.
        """
        from hvd_ext.planning import planner

        with self._lock:
            key = ("all_gather", "", nbytes)
            if key not in self._prepared:
                self._prepared[key] = self._made(planner.all_gather_plan(self.tree), nbytes)
            return self._prepared[key]

    def broadcast(self, nbytes: int, root: int) -> Prepared:
        """Prepare a broadcast.

        Args:
            nbytes: the size of the buffer.
            root: the rank whose buffer all ranks receive.

        Returns:
            The prepared plan.

        Raises:
            PlanError: the root is not a rank.
        """
        from hvd_ext.planning import planner

        with self._lock:
            key = ("broadcast", root, nbytes)
            if key not in self._prepared:
                self._prepared[key] = self._made(planner.broadcast_plan(self.tree, root), nbytes)
            return self._prepared[key]

    def reduce_scatter(self, nbytes: int) -> Prepared:
        """Prepare a reduce-scatter.

        Args:
            nbytes: the size of the buffer.

        Returns:
            The prepared plan.
        """
        from hvd_ext.planning import planner

        with self._lock:
            key = ("reduce_scatter", "", nbytes)
            if key not in self._prepared:
                self._prepared[key] = self._made(planner.reduce_scatter_plan(self.tree), nbytes)
            return self._prepared[key]

    def all_to_all(self, nbytes: int) -> Prepared:
        """Prepare an all-to-all.

        Args:
            nbytes: the size of a rank's buffer.

        Returns:
            The prepared plan.
        """
        from hvd_ext.planning import planner

        with self._lock:
            key = ("all_to_all", "", nbytes)
            if key not in self._prepared:
                self._prepared[key] = self._made(planner.all_to_all_plan(self.tree), nbytes)
            return self._prepared[key]

    def _made(self, plan: LogicalPlan, nbytes: int) -> Prepared:
        from hvd_ext.planning import grain, ir

        segment_nbytes = grain.segment_nbytes(plan, nbytes, self.tree)
        return Prepared(self.prepare(plan), ir.digest(plan), segment_nbytes, plan.algorithm)


_current: Runtime | None = None


def current() -> Runtime:
    """Return the runtime of the running job.

    Raises:
        NotInitializedError: before `init()` or after `shutdown()`.
    """
    if _current is None:
        raise NotInitializedError("hvd_ext is not running: call hvd_ext.init() first, and again after each shutdown()")
    return _current


def current_or_none() -> Runtime | None:
    """Return the runtime of the running job, or None if there is none."""
    return _current


def set_current(runtime: Runtime | None) -> None:
    """Replace the runtime of the running job; only `hvd_ext.job.process` and tests call this."""
    global _current
    _current = runtime
