"""Where the probe times its plans: an engine, and what each rank has measured on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.job import consensus
from hvd_ext.planning import lower
from hvd_ext.planning.layout import BucketLayout, Layout, Selection
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.fit import rounded, typical

if TYPE_CHECKING:
    from hvd_ext.engine import engine as engines
    from hvd_ext.planning.model import LogicalPlan

TINY_NBYTES = 4
SMALL = "at a time"  # what the names of the series of small messages end with
ROUNDS = 8  # of small messages, one after the other
MANY = 8  # messages of a rank in a round
ATTEMPTS = 2
REPEATS = 3  # of each attempt
# The steps of a sample inside hosts with buffers up to SHORT_NBYTES, and with larger ones. In each step some rank waits
# for another, and over several steps these waits even out: the slowest rank of one step takes longer than steps do.
SHORT_NBYTES, SHORT_STEPS, LONG_STEPS = 1 << 20, 10, 3
DENSITY = 0.01
Times = dict[str, list[list[float]]]  # the samples of each series in each attempt


@dataclass
class Stand:
    """Where plans are timed, alike on all ranks.

    Args:
        sharing: by how many ranks a core of this rank's host is shared.
        on_gpu: whether buckets lie on GPUs, and arrays with them.
        times: this rank's samples by the name of the series.
    """

    engine: engines.Engine
    sharing: float = 1.0
    on_gpu: bool = False
    times: Times = field(default_factory=dict)

    def time(
        self,
        name: str,
        plan: LogicalPlan,
        nbytes: int,
        segment_nbytes: int = 1 << 30,
        *,
        samples: int = REPEATS,
        steps: int = 1,
        together: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        dense: LogicalPlan | None = None,
    ) -> None:
        """Time the steps of a plan, after a first one that is not counted.

        Args:
            steps: the number of steps of a sample, one after the other; the sample is their mean.
            together: whether no rank begins a sample before all others have ended the last one.
            dense: the companion of a plan that selects; None for a dense plan.
        """
        tensor = Tensor("probe", (max(nbytes // 4, 1),), "float32")
        selection = None if dense is None else Selection()
        bucket = BucketLayout("float32", (0,), 0, plan, segment_nbytes, selection=selection, dense=dense)
        handles: list[int] = []

        def handle_of(logical: LogicalPlan) -> int:
            handles.append(self.engine.add_plan(lower.rows_of(logical, self.engine.rank), logical.units))
            return handles[-1]

        channel = self.engine.open_channel("probe", Layout((tensor,), (bucket,)), handle_of, on_device=self.on_gpu)
        with self._prepared(channel, tensor) as reduce:

            def step() -> None:
                if dense is not None:
                    self.engine.begin_topk_step(channel, DENSITY)
                reduce()
                if dense is not None:
                    self.engine.end_step(channel, True)

            self.engine.exchange("probe", b"")
            step()
            series = []
            for _ in range(samples):
                if together:
                    self.engine.exchange("probe", b"")
                begin = clock()
                for _ in range(steps):
                    step()
                series.append((clock() - begin) / steps)
            step()  # no rank leaves while another one still measures
            self.engine.close_channel(channel)
        for handle in handles:
            self.engine.remove_plan(handle)
        self.times.setdefault(name, []).append(series)

    @contextlib.contextmanager
    def _prepared(self, channel: int, tensor: Tensor) -> Iterator[Callable[[], None]]:
        if self.on_gpu:
            with self.engine.prepared_on_device(channel, [4 * tensor.elements]) as reduce:
                yield reduce
        else:
            buffer = np.ones(tensor.elements, np.float32)
            yield self.engine.prepare(channel, [buffer], [np.empty_like(buffer)])

    def work_clock(self) -> float:
        """A clock for work in which ranks do not wait for each other.

        Where they share cores, some of them begin and end late, by more than short work takes. So it is the clock of
        the processor, and as many times as fast as there are ranks that share a core. A GPU works beside it.
        """
        return time.process_time() * self.sharing if self.sharing > 1 and not self.on_gpu else time.perf_counter()

    def selection_clock(self) -> float:
        """A clock for a selection, whose time prices multiply by `sharing`."""
        return time.perf_counter() / self.sharing if self.on_gpu else time.process_time()

    def gathered(self) -> list[Times]:
        """Give what each rank has measured, the same on all ranks; new series may follow."""
        times = {
            name: [[rounded(second) for second in seconds] for seconds in attempts]
            for name, attempts in self.times.items()
        }
        return consensus.exchange(self.engine, "probe", lambda: times)

    def agreed(self, value: Any) -> Any:
        """Give rank 0's value on all ranks: computers may round differently, and all must run the same plans."""
        return consensus.exchange(self.engine, "probe", lambda: value)[0]


def of(seen: Sequence[Times], name: str, kind: Callable[[list[float]], float] = typical) -> float:
    """What a series takes these ranks in the better attempt; the slowest rank counts in each sample."""
    attempts = zip(*(times[name] for times in seen), strict=True)
    slowest = [[max(values) for values in zip(*ranks, strict=True)] for ranks in attempts]
    # A disturbance is longer than a round of small messages, or a selection, so that the least disturbed sample counts.
    return min(map(min if name.endswith((SMALL, "selection")) else kind, slowest))


def steps_of(nbytes: int) -> int:
    """The number of steps of a sample inside hosts with buffers of this size."""
    return SHORT_STEPS if nbytes <= SHORT_NBYTES else LONG_STEPS
