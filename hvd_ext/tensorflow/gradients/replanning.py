"""Planning a step again: at some steps ranks exchange the times of their gradients, plan alike, and switch together.

It happens in the beginning of a step, in the op that begins it. So a traced graph, which knows channels and tensors
and no buckets, stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np

from hvd_ext.errors import HvdExtError, PlanError
from hvd_ext.job import banner, consensus, network
from hvd_ext.job.log import logger
from hvd_ext.planning import contention
from hvd_ext.planning.layout import Layout
from hvd_ext.planning.needed import NEAR
from hvd_ext.planning.prediction import predict
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.state import Arrays
from hvd_ext.tensorflow.gradients import explanation
from hvd_ext.tensorflow.topk import residuals
from hvd_ext.trace import step_times

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet
    from hvd_ext.job.runtime import Runtime
    from hvd_ext.tensorflow.gradients.channel import Channel
    from hvd_ext.topology.tree import Tree

# the names of what is saved
_LAYOUT, _UPDATES, _SETTINGS = "layout", "updates", "settings"

FIRST_STEPS = (20, 200)
# So many steps after a switch its layout is reviewed: the ranks go back if steps take longer than before by this share.
TRIAL_STEPS = 20
WORSE = 0.05
WORTH_SWITCHING = 0.02  # the ranks switch if the predicted step gets shorter by this share,
TOO_SLOW = 0.10  # or if steps took longer than predicted by this one
# The network is measured again if that takes at most this share of the time since the last plan.
WORTH_MEASURING = 0.05
LONGEST_PROBE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Review:
    """What the ranks found when they planned a channel again.

    Args:
        step: the number of update steps before it.
        times: the times of the gradients, of the latest rank, as they would be without communication.
        overlap: the measured end of the backward pass, and the communication that was hidden before it.
        measured_s: the time of a step, the median of up to 100 steps on the slowest rank; None if it is not known.
        expected_s: the time of a step as it was predicted when the layout was planned; None if it was not.
        before_s: the predicted time of a step with the layout until then.
        after_s: the predicted time of a step with the new layout.
        switched: whether it is another one than before.
        returned: whether it is the one before the last switch, because steps were shorter with it.
    """

    step: int
    times: StepTimes
    overlap: contention.Overlap
    measured_s: float | None
    expected_s: float | None
    before_s: float
    after_s: float
    layout: Layout
    switched: bool
    returned: bool = False

    def __str__(self) -> str:
        took = "" if self.measured_s is None else f"steps took {self.measured_s * 1e3:.3g} ms; "
        if not self.switched:
            return f"after step {self.step}: {took}the buckets stay (predicted {self.before_s * 1e3:.3g} ms)"
        buckets = f"{len(self.layout.buckets)} buckets by {self.layout.bucketer}"
        if self.returned:
            return f"after step {self.step}: {took}back to {buckets}, with which they were shorter"
        return (
            f"after step {self.step}: {took}{buckets}, predicted {self.after_s * 1e3:.3g} ms instead of "
            f"{self.before_s * 1e3:.3g} ms"
        )


def following(step: int, interval: int) -> int | None:
    """Return the first of 20, 200 and the multiples of `interval` above `step`; None if `interval` is 0."""
    if not interval:
        return None
    return min([first for first in FIRST_STEPS if first > step] + [(step // interval + 1) * interval])


@dataclasses.dataclass(frozen=True)
class Trial:
    """The first steps with a layout, after which the ranks may go back.

    Args:
        before: the layout before it.
        step_s: the measured time of a step with that one.
    """

    before: Layout
    step_s: float


def _undelayed(
    tree: Tree, layout: Layout, measured: StepTimes, last: Review | None
) -> tuple[StepTimes, contention.Overlap]:
    """Take the delays by hidden communication out of measured times, by the contention that two layouts show."""
    predicted = predict(tree, layout, measured)
    spans = contention.busy(predicted.begins_s, predicted.ends_s)
    overlap = contention.Overlap(measured.computed_s, contention.hidden_s(spans, measured.computed_s))
    if last is None:
        return measured, overlap
    share = contention.between(last.overlap, overlap, last.times.contention)
    alone = dataclasses.replace(
        measured,
        ready_s=tuple(contention.undelayed(seconds, spans, share) for seconds in measured.ready_s),
        forward_s=contention.undelayed(measured.forward_s, spans, share),
        rows=tuple((contention.undelayed(since, spans, share), nbytes) for since, nbytes in measured.rows),
        contention=share,
    )
    return alone, overlap


class Replanning:
    """The planning of one channel during the training.

    Attributes:
        reviews: what was found each time, the newest last; the same on all ranks.

    Args:
        name: the name of the exchanges, the same on all ranks and unique in the job.
        done: the number of update steps before the channel's first.
    """

    def __init__(
        self,
        channel: Channel,
        job: Runtime,
        *,
        name: str,
        process_set: ProcessSet | None = None,
        done: int = 0,
    ) -> None:
        self.reviews: list[Review] = []
        self._channel, self._job, self._name = channel, job, name
        self._process_set, self._done = process_set, done
        self._late = 0.0  # `StepTimes.late`
        self._trial: Trial | None = None
        self._worse: set[int] = set()  # the digests of layouts that were given up
        self._wait(done)

    @property
    def steps(self) -> int:
        """The number of update steps so far, with those before the channel's first; to be read between two steps."""
        return self._done + self._channel.steps

    def save(self) -> Arrays:
        """Copy the layout and the number of steps, between two steps, so that a resumed job reduces alike."""
        values = dataclasses.replace(self._channel.layout, tensors=self._numbered).to_json()
        return {
            _LAYOUT: np.frombuffer(json.dumps(values).encode(), np.uint8),
            _UPDATES: np.array(self.steps),
            _SETTINGS: np.frombuffer(self._channel.settings.encode(), np.uint8),
        }

    def load(self, local: Arrays) -> None:
        """Go on with the layout and the number of steps that `save` returned; all ranks call it, between two steps.

        A job with other options, or for which the layout does not fit, plans its own and goes on counting.

        Args:
            local: what this rank has saved in a job of as many ranks.
        """
        job, channel = self._job, self._channel

        def saved() -> list[object]:
            settings, layout = (local[name].tobytes().decode() for name in (_SETTINGS, _LAYOUT))
            return [settings == channel.settings, layout, int(local[_UPDATES])]

        answers = consensus.exchange(job.engine, f"{self._name}: saved layout", saved)
        same, text, updates = answers[0]
        steps, now, why = channel.steps, channel.layout, ""
        try:
            if any(answer != answers[0] for answer in answers):
                why = "the ranks have saved different ones"
            elif same:
                op = now.buckets[0].op
                layout = Layout.from_json(json.loads(text), job.tree, self._numbered, op, places=now.sent_tensors)
                channel.switch(dataclasses.replace(layout, tensors=now.tensors), steps + 1)
        except PlanError as error:  # alike on all ranks
            why = str(error)
        if why and job.engine.rank == 0:
            logger.warning("%s: its saved buckets cannot be used, and are planned again: %s", self._name, why)
        self._done = updates - steps
        self._wait(updates)

    @property
    def _numbered(self) -> tuple[Tensor, ...]:
        """The tensors with their places as names, because Keras gives a layer another name when it is made again."""
        tensors = self._channel.layout.tensors
        return tuple(dataclasses.replace(tensor, name=str(place)) for place, tensor in enumerate(tensors))

    def resume(self) -> None:
        """Continue after all ranks have joined, between two steps; all ranks call it."""
        self._wait(self.steps)

    def _wait(self, step: int) -> None:
        due = following(step, self._job.options.replan_every)
        if due is not None:
            due = due if self._trial is None else min(due, step + TRIAL_STEPS)
            self._job.engine.at_step(self._channel.handle, due - self._done + 1, self._begin, "buckets")

    def _begin(self, number: int) -> None:
        """Plan again before a step of the channel begins; the training goes on whatever happens."""
        step = self._done + number - 1
        try:
            review = self._review(step, number)
            if review is not None:
                self.reviews.append(review)
                banner.say(self._job, f"{self._channel.name}: {review}")
                explanation.say(self._job, self._channel.name, review.layout, review)
        except Exception as error:
            logger.warning("%s: its buckets could not be planned again after step %d: %s", self._name, step, error)
        if self._channel.is_open:
            self._wait(step)

    def _measured(self) -> tuple[StepTimes, float | None] | None:
        """Exchange the times of the newest steps.

        Returns:
            The times of the gradients and of a step, on the latest rank; None after too few steps, or if a rank could
            not change its plan.
        """
        job, channel, now = self._job, self._channel, self._channel.layout
        first_step = job.engine.open_channels()[channel.handle].layouts[-1][0]
        local = step_times.measured(job.engine.times(channel.handle), first_step)
        answers, joined = consensus.exchange_in_step(
            job.engine,
            f"{self._name}: times",
            lambda: None if local is None else {**dataclasses.asdict(local), "rows_nbytes": channel.rows_nbytes},
        )
        if joined or any(answer is None for answer in answers):
            return None
        latest = step_times.latest([step_times.Measured.from_json(answer) for answer in answers])
        times = step_times.model(now.tensors, now.sent_tensors, latest)
        rows = max(answer["rows_nbytes"] for answer in answers)
        if rows:  # embeddings are the first layers, whose gradients come last
            times = dataclasses.replace(times, rows=((times.computed_s, rows),))
        return times, latest.step_s

    def _review(self, step: int, number: int) -> Review | None:
        job, channel, now = self._job, self._channel, self._channel.layout
        exchanged = self._measured()
        if exchanged is None:
            return None
        measured, step_s = exchanged
        last = self.reviews[-1] if self.reviews else None
        times, overlap = _undelayed(job.tree, now, measured, last)
        expected_s, trial, self._trial = None, self._trial, None
        if last is None or last.layout is not now:  # it was switched by others meanwhile
            trial = None
        else:
            expected_s = last.after_s if last.switched else last.before_s
        late = False
        if step_s is not None and expected_s:
            self._late = max(self._late, step_s / expected_s - 1)
            late = step_s > expected_s * (1 + TOO_SLOW)
        times = dataclasses.replace(times, late=self._late)
        if late and last is not None and step_s is not None:
            self._measure_network((step - last.step) * step_s)
        planned: list[Review] = []
        kept: Arrays = {}
        back = None  # the layout to which the ranks go back
        if trial is not None and step_s is not None and step_s > trial.step_s * (1 + WORSE):
            back = trial.before
            self._worse.add(now.digest)

        def plan() -> list[object]:
            new = back or channel.lay_out(times)
            before_s = predict(job.tree, now, times).step_s
            after_s = predict(job.tree, new, times).step_s
            worth = after_s < before_s if late else after_s <= before_s * (1 - WORTH_SWITCHING)
            # or if less is lost in a step that is as short as it must be
            worth |= new.lossy_elements < now.lossy_elements and after_s <= before_s * NEAR
            worth &= new.digest not in self._worse
            switches = (worth or back is not None) and (new.digest != now.digest or new.form_of != now.form_of)
            layout = new if switches else now
            predicted = (expected_s, before_s, after_s)
            returned = switches and back is not None
            planned.append(
                Review(step, times, overlap, step_s, *predicted, layout, switched=switches, returned=returned)
            )
            if switches and now.selected:
                kept.update(residuals.read(channel, job.engine))
            return [f"{layout.digest:016x}", before_s, after_s]

        plans = consensus.exchange(job.engine, f"{self._name}: plans", plan)
        if any(other != plans[0] for other in plans):
            raise HvdExtError("the ranks came to different plans, and keep the one that they have")
        (review,) = planned
        if review.switched:
            if step_s is not None and back is None:
                self._trial = Trial(now, step_s)
            self._switch(review.layout, number, kept)
        return review

    def _measure_network(self, since_s: float) -> None:
        """Measure the network again, if it was measured before and `since_s` of training are worth the time."""
        job = self._job
        if job.network is None or job.network.source == network.ASSUMED:
            return
        if (job.network.seconds or LONGEST_PROBE_S) > WORTH_MEASURING * since_s:
            return
        measured = network.of_job(job.engine, job.hosts, job.options.replace(probe="refresh"))
        if measured.source == network.MEASURED:  # else rank 0 has said why not, and the old links are the better guess
            job.network, job.tree = measured, measured.tree
            banner.say(job, f"{self._channel.name}: steps take longer than predicted; {measured.line}")

    def _switch(self, layout: Layout, number: int, kept: Arrays) -> None:
        """Switch on all ranks; if that fails on one of them, its training ends, because the ranks no longer agree."""
        channel, job = self._channel, self._job
        try:
            channel.switch(layout, number)
            if layout.selected:
                wanted = residuals.pieces(channel, job.engine)
                moved = residuals.redistributed(job, f"{self._name}: residuals", kept, wanted, self._process_set)
                residuals.write(channel, job.engine, moved)
        except Exception:
            channel.close()
            raise
