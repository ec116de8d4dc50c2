"""Buckets of which only a part is sent: which tensors may be in one, its two plans, what the engine is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvd_ext.compression import density, selectors
from hvd_ext.compression.topk import INDICES, WIRES, TopK
from hvd_ext.engine import specs
from hvd_ext.job.prepared import Prepared, PreparedSparse
from hvd_ext.planning.buckets import Bucket

if TYPE_CHECKING:
    from hvd_ext.job import runtime

# of a place on the way, in the mean: two bytes of a delta at densities around 0.001, less above
_INDEX_NBYTES = 2.0


@dataclasses.dataclass(frozen=True)
class Momentum:
    """The momentum that is taken over from an optimizer.

    Args:
        value: of the optimizer, above 0.
        nesterov: the optimizer's.
        rate: gives the learning rate of the step under way. Gradients are multiplied by it before they go through the
            momentum, as Keras does; what waits keeps the rate of its own step (Karimireddy et al., 2019, algorithm 2).
    """

    value: float
    nesterov: bool
    rate: Callable[[], Any] = dataclasses.field(default=lambda: 1.0, compare=False)


@dataclasses.dataclass(frozen=True)
class InPart:
    """How a channel's gradients are sent in part; the same on all ranks.

    Args:
        options: the user's.
        algorithm: for the sparse buckets.
        momentum: what gradients go through first; None for nothing.
    """

    options: TopK
    algorithm: str
    momentum: Momentum | None = None

    def described(self) -> dict[str, Any]:
        """Give what must be the same on all ranks besides the options."""
        momentum = None if self.momentum is None else [self.momentum.value, self.momentum.nesterov]
        return {"momentum taken over": momentum}

    def planned(self, owner: runtime.Runtime, bucket: Bucket, sparse: bool) -> Planned | None:
        """Plan a bucket.

        Args:
            owner: the runtime of the ranks that take part.
            bucket: of one dtype, and of one kind.
            sparse: whether its tensors may be sent in part.

        Returns:
            Its plans; None for an ordinary bucket. With momentum every bucket of float32 goes through it.

        Raises:
            PlanError: the algorithm cannot run on the topology.
        """
        if bucket.dtype != "float32" or (not sparse and self.momentum is None):
            return None
        density_of_plan = density.schedule(self.options).densities[-1]
        options, momentum = self.options, self.momentum
        wire = WIRES[options.wire]
        entry_nbytes = specs.DTYPES[wire].nbytes + _INDEX_NBYTES
        prepared = owner.sparse_allreduce(
            bucket.nbytes, self.algorithm, density_of_plan, entry_nbytes, height=options.height
        )
        spec = specs.SparseBucket(
            selector=selectors.find(options.selector).number,
            samplings=options.samplings,
            seed=options.seed,
            threshold=options.threshold,
            dense_plan=prepared.dense.plan,
            dense_above=prepared.dense_above if sparse else 0.0,
            momentum=None if momentum is None else momentum.value,
            nesterov=momentum is not None and momentum.nesterov,
            masks=options.masks,
            value_wire=None if wire == "float32" else wire,
            indices=INDICES.index(options.indices),
            per_tensor=options.per_tensor,
        )
        return Planned(prepared.sparse if sparse else prepared.dense, prepared, spec)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A bucket's plans.

    Args:
        plan: of its ordinary steps.
        prepared: both plans, and the choice.
        spec: for the engine.
    """

    plan: Prepared
    prepared: PreparedSparse
    spec: specs.SparseBucket

    def described(self) -> list[Any]:
        """Give what must be the same on all ranks."""
        return [f"dense plan {self.prepared.dense.digest:016x}", f"dense from {self.spec.dense_above!r}"]
