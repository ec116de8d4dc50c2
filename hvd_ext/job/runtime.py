"""The running job as the rest of the package sees it: its engine, its topology, its options and the plans in use."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvd_ext.errors import NotInitializedError

if TYPE_CHECKING:
    from hvd_ext.engine.engine import Engine
    from hvd_ext.engine.partial import Partial
    from hvd_ext.job.network import Network
    from hvd_ext.options import Options
    from hvd_ext.planning.layout import Layout
    from hvd_ext.planning.model import LogicalPlan
    from hvd_ext.topology.tree import Tree

KIB = 1 << 10

# A call's plan and grain depend on the size of its buffer, which may be unknown when a graph is traced. So the op holds
# one row for each class of sizes, and looks up its class when it runs. A class covers the sizes up to its limit and is
# planned for that limit; one more class has no limit.
SIZE_CLASSES: tuple[int, ...] = (4 * KIB, 64 * KIB, 1024 * KIB, 16 * 1024 * KIB, 256 * 1024 * KIB)

TABLE_NBYTES = 8  # of a rank in the table of who takes part in a round (PartialGate::TableElements)


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
        self.running = True  # until the job shuts down, or the process set is removed
        self.network = network
        self.process = os.getpid()  # a forked child has another number
        self.engine = engine
        self.tree = tree
        self.options = options
        self.hosts = hosts
        self.plans: dict[int, LogicalPlan] = {}  # by handle
        self.subsets: dict[int, Runtime] = {}  # of a job: those of the process sets that this rank is in, by number
        self.groups: dict[str, Any] = {}  # the process sets of `process_sets.group`, by `within`
        # what may have outer steps of local steps under way, in threads (`policies.local_steps`)
        self.outer_steps: weakref.WeakSet[Any] = weakref.WeakSet()
        # of a job: the lists of gradients that are reduced in it or in its process sets (`gradients.reducer`)
        self.gradient_sets: weakref.WeakSet[Any] = weakref.WeakSet()
        self.last_process_set = 0  # the number of the newest set
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
            self._counts[kind] = self._counts.get(kind, 0) + 1
            return self._counts[kind] - 1

    @property
    def counts(self) -> dict[str, int]:
        """How many calls of each kind this rank has counted."""
        with self._lock:
            return dict(self._counts)

    def count_up_to(self, counts: dict[str, int]) -> None:
        """Count the calls that other ranks have made while this one had joined; `counts` are those of a rank."""
        with self._lock:
            self._counts |= {kind: max(count, self._counts.get(kind, 0)) for kind, count in counts.items()}

    def plans_of_sums(self) -> dict[int, int]:
        """Return the plans of the allreduces that this rank knows, by digest; those of the options are planned."""
        for limit in SIZE_CLASSES:
            self.allreduce(limit)
        with self._lock:
            return {found.digest: found.plan for key, found in self._prepared.items() if key[0] == "allreduce"}

    def agreement(self, kind: str) -> threading.RLock:
        """Return the lock that a thread holds while the ranks agree on something in several exchanges.

        Agreements of one kind begin with an exchange of one name, so that ranks whose threads begin different ones meet
        there. Kinds with a common lock would wait for each other.
        """
        with self._lock:
            return self._agreements.setdefault(kind, threading.RLock())

    def prepare(self, plan: LogicalPlan) -> int:
        """Give the engine this rank's rows of a plan once, and return the handle; `PlanError` if the proof fails."""
        from hvd_ext.planning import ir, lower, planner

        digest = ir.digest(plan)
        with self._lock:
            if digest not in self._handles:
                planner.prove(plan)
                handle = self.engine.add_plan(lower.rows_of(plan, self.engine.rank), plan.units)
                self._handles[digest] = handle
                self.plans[handle] = plan
            return self._handles[digest]

    def open(self, name: str, layout: Layout, partial: Partial | None = None, *, on_device: bool = False) -> int:
        """Open a channel of the engine; all ranks call it in the same order, with equal layouts.

        Args:
            partial: what makes its rounds partial; None if steps wait for all ranks.
            on_device: whether its tensors are given and taken in the memory of this rank's GPU.

        Raises:
            PlanError: a plan does not compute its collective.
            InvalidError: the engine refused the layout.
        """
        if partial is None:
            return self.engine.open_channel(name, layout, self.prepare, on_device=on_device)
        hosts = {rank: host for host, ranks in enumerate(self.tree.hosts()) for rank in ranks}
        table = self.allreduce(TABLE_NBYTES * self.engine.size)
        described = partial.described(
            [hosts[rank] for rank in range(self.engine.size)], table.plan, table.segment_nbytes
        )
        return self.engine.open_channel(name, layout, self.prepare, described)

    def allreduce(self, nbytes: int, algorithm: str | None = None) -> Prepared:
        """Prepare an allreduce of a buffer of this size.

        Args:
            algorithm: a name or "auto"; None for the algorithm of the options.

        Raises:
            PlanError: the algorithm is unknown, or cannot run on the topology.
        """
        chosen = self.options.algorithm if algorithm is None else algorithm
        return self._once(
            "allreduce", nbytes, lambda plans: plans.allreduce_plan(self.tree, chosen, nbytes=nbytes).plan, chosen
        )

    def all_gather(self, nbytes: int) -> Prepared:
        """Prepare an all-gather with a result of this size."""
        return self._once("all_gather", nbytes, lambda plans: plans.all_gather_plan(self.tree))

    def broadcast(self, nbytes: int, root: int) -> Prepared:
        """Prepare a broadcast of a buffer of this size; `PlanError` if the root is not a rank."""
        return self._once("broadcast", nbytes, lambda plans: plans.broadcast_plan(self.tree, root), root)

    def reduce_scatter(self, nbytes: int) -> Prepared:
        """Prepare a reduce-scatter of a buffer of this size."""
        return self._once("reduce_scatter", nbytes, lambda plans: plans.reduce_scatter_plan(self.tree))

    def all_to_all(self, nbytes: int) -> Prepared:
        """Prepare an all-to-all of a rank's buffer of this size."""
        return self._once("all_to_all", nbytes, lambda plans: plans.all_to_all_plan(self.tree))

    def _once(self, kind: str, nbytes: int, plan_of: Callable[[Any], LogicalPlan], variant: str | int = "") -> Prepared:
        """Plan a collective at its first use, for the grain of pipelining of this size."""
        from hvd_ext.planning import grain, ir, planner

        with self._lock:
            key = (kind, variant, nbytes)
            if key not in self._prepared:
                plan = plan_of(planner)
                segment_nbytes = grain.segment_nbytes(plan, nbytes, self.tree)
                self._prepared[key] = Prepared(self.prepare(plan), ir.digest(plan), segment_nbytes, plan.algorithm)
            return self._prepared[key]


_current: Runtime | None = None


def current() -> Runtime:
    """Return the runtime of the running job; `NotInitializedError` before `init()` and after `shutdown()`."""
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
