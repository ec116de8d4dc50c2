"""The planner of a step: it divides the tensors into buckets, chooses a plan for each, and says why.

With the times of the step's tensors, the lane's price decides (`lane_prices`); without them, buckets have a fixed size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from hvd_ext.compression import AnyOf, Codec
from hvd_ext.compression.momentum import Momentum
from hvd_ext.planning import buckets as bucketers, grain, lane_prices, needed, planner
from hvd_ext.planning.bucket_layout import BucketLayout, Layout, Outcome, Selection
from hvd_ext.planning.cost import lane
from hvd_ext.planning.cost.lane import Parts, Table
from hvd_ext.planning.prediction import in_lane, lane_of, of_lane, ready_of
from hvd_ext.planning.sparse_planner import sparse_plan
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import Tensor
from hvd_ext.topology.tree import Tree

__all__ = ["BucketLayout", "Groups", "Layout", "Outcome", "Selection", "layout"]

Groups = int | Sequence[Sequence[int]] | None

# Bucketers whose step is within this factor by the prices of buckets are played, as long as that takes a moment.
WORTH_PLAYING = 1.03
MOST_PLAYED = 3
MOST_BUCKETS = 100  # more are played only where no fewer are as good
PLAYED_MESSAGES = 12_000
# Steps within this factor are a tie, in which the bucketer with the fewest buckets wins, then the simplest one.
TIE = 0.005
# Up to this number of buckets, each may get a schedule that is not the fastest alone, but better in the lane.
MOST_EXCHANGED = 64
WORTH_EXCHANGING = 0.001
# The rounds in which a quick bucketer looks for the tensors that must be sparsified, each within a smaller factor.
MOST_CONFIRMED = 3


def layout(
    tree: Tree,
    tensors: Sequence[Tensor],
    op: int,
    *,
    algorithm: str = "auto",
    bucket_nbytes: int = bucketers.DEFAULT_BUCKET_NBYTES,
    wire: str | None = None,
    groups: Groups = None,
    places: Sequence[int] | None = None,
    codec: Codec | None = None,
    sparse_algorithm: str = "hitopk",
    momentum: Momentum | None = None,
    buckets: str = "auto",
    times: StepTimes | None = None,
) -> Layout:
    """Lay out a step: divide its tensors into buckets, and choose a plan for each.

    Args:
        tensors: the tensors of the step, of dtypes of `DTYPES`, in the order of the model's layers.
        op: the number of `Sum` or `Average`.
        algorithm: a schedule's name or "auto", for buckets without a selection.
        bucket_nbytes: the size that a bucket should have.
        wire: the dtype in which float32 is sent in these buckets; None for float32.
        groups: a number of groups, or lists of places of tensors that share a bucket (`planning.buckets.by_groups`),
            whatever the bucketer; None for none.
        places: the places of the tensors that are sent; None for all.
        codec: how gradients are made smaller between hosts; None to send them whole.
        sparse_algorithm: the algorithm of the buckets with top-k gradients.
        momentum: the momentum correction that top-k gradients go through; with it all float32 gradients do.
        buckets: a bucketer's name, or "auto": with times the one with the shortest predicted step, without times the
            simplest one that can do it. That one also stands in for a bucketer that needs times, as long as there are
            none.
        times: the times at which the tensors are ready; None if they are not known.

    Raises:
        PlanError: there is no such algorithm or bucketer, it cannot run on the cluster or with these arguments, or the
            times are those of another model.
    """
    sent = tuple(range(len(tensors)) if places is None else places)
    settings = (algorithm, wire, codec, sparse_algorithm, momentum, bucket_nbytes, groups, buckets, times)
    step = _Step(tree, tuple(tensors), op, sent, *settings)
    selected = frozenset(
        place for place in sent if codec is not None and codec.takes(tensors[place].shape, tensors[place].dtype)
    )
    if isinstance(codec, AnyOf):
        return _least_lossy(step, codec, selected)
    if codec is not None and codec.where == "needed" and selected and _is_precise(times):
        selected = _needed(step, selected)
    return _laid_out(step, selected)


def _least_lossy(step: _Step, codec: AnyOf, taken: frozenset[int]) -> Layout:
    """The layout of the first form with which the step is near the shortest, for as few of its tensors as that needs.

    Args:
        taken: the places of the tensors that need not be dense.
    """
    keeper = codec.keeper
    steps: dict[str, tuple[_Step, frozenset[int]]] = {}
    seconds: dict[str, float] = {}
    for form in codec.choices:
        tried = dataclasses.replace(
            step, codec=form.codec or keeper, lossy_wire=form.wire, stays=keeper is not None, known={}
        )
        lossy: frozenset[int] = frozenset() if form.is_dense else taken
        steps[form.label] = tried, lossy
        seconds[form.label] = (_alone if step.times is None else _quickest)(tried, lossy)
    label, near = _first_near(seconds)
    chosen, lossy = steps[label]
    if lossy and _is_precise(step.times):
        lossy = _needed(chosen, lossy, near)
    forms = sorted(seconds.items(), key=lambda form: form[0] != label)
    return dataclasses.replace(_laid_out(chosen, lossy), forms=tuple(forms))


def _is_precise(times: StepTimes | None) -> bool:
    """Whether predictions tell a step that is near the shortest from others; else no tensor is known to have time."""
    return times is not None and times.late <= needed.NEAR - 1


def _first_near(seconds: Mapping[str, float]) -> tuple[str, float]:
    """The first form whose step is near the shortest, and the factor by which it may still be longer."""
    limit_s = min(seconds.values()) * needed.NEAR
    label = next(label for label, of_form in seconds.items() if of_form <= limit_s)
    return label, limit_s / seconds[label]


def _needed(step: _Step, selected: frozenset[int], near: float = needed.NEAR) -> frozenset[int]:
    """The tensors that must be lossy for a step that is so near: found with a quick bucketer, confirmed by the best."""
    quick = step
    if step.buckets in ("auto", "optimal") and step.groups is None:
        quick = dataclasses.replace(step, buckets="mgwfbp")
    limit_s = _quickest(step, selected) * near
    for _ in range(MOST_CONFIRMED):
        fewest = needed.fewest(
            step.tensors, step.ready_s, selected, lambda some: _quickest(quick, frozenset(some)), near
        )
        if _quickest(step, fewest) <= limit_s:
            return fewest
        near = math.sqrt(near)
    return selected


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """A bucket that has no plan yet.

    Args:
        tensors: the places of its tensors.
        kind: their class.
        nbytes: their bytes in memory.
        ready_s: the time at which the last of them is ready, seconds; 0 if it is not known.
    """

    tensors: tuple[int, ...]
    kind: bucketers.Class
    nbytes: int
    ready_s: float


@dataclasses.dataclass(frozen=True)
class _Divided:
    """The buckets of a bucketer."""

    bucketer: str
    buckets: tuple[_Bucket, ...]


_Priced = list[tuple[float, _Divided]]  # the step of each bucketer, seconds


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is sent, and how: the arguments of layout(); `places` are those of the tensors that are sent.

    Of a form of `AnyOf`: `lossy_wire` is the wire of the tensors that are selected, if they are sent whole, and `stays`
    tells whether all float32 tensors keep residuals, because another form may follow.
    """

    tree: Tree
    tensors: tuple[Tensor, ...]
    op: int
    places: tuple[int, ...]
    algorithm: str
    wire: str | None
    codec: Codec | None
    sparse_algorithm: str
    momentum: Momentum | None
    bucket_nbytes: int
    groups: Groups
    buckets: str
    times: StepTimes | None
    lossy_wire: str | None = None
    stays: bool = False
    known: dict[tuple[frozenset[int], str], tuple[_Priced, dict[str, Outcome]]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )  # what _priced() has found, by the tensors that select and the bucketer

    @functools.cached_property
    def ready_s(self) -> tuple[float, ...]:
        """The time at which each tensor is ready, seconds."""
        assert self.times is not None
        return ready_of(self.times, self.tensors)

    @functools.cached_property
    def loads(self) -> tuple[tuple[float, Parts], ...]:
        """What travels beside the buckets: when it is ready, seconds, and its price."""
        assert self.times is not None
        return tuple((since, lane_prices.gather_parts(self.tree, nbytes)) for since, nbytes in self.times.rows)

    def keeps_residuals(self, kind: bucketers.Class) -> bool:
        """Whether the tensors of a class keep residuals or velocities.

        Tensors that are not selected do so too where they go through the momentum correction; and where they may be
        selected when the step is planned again, because a traced graph does not learn of it.
        """
        dtype, selects = kind
        if self.codec is None:
            return False
        stays = self.stays or self.codec.where == "needed"
        return selects or (dtype == "float32" and (self.momentum is not None or stays))

    def wire_of(self, kind: bucketers.Class) -> str | None:
        """The dtype in which whole gradients of a class are sent; None for their own."""
        dtype, selects = kind
        if selects:
            return self.lossy_wire
        # no wire: rounding a sum for sending would lose what error feedback must keep
        return self.wire if dtype == "float32" and not self.keeps_residuals(kind) else None

    def sparse(self, kind: bucketers.Class) -> bool:
        """Whether a class is sent by its codec."""
        return kind[1] and self.lossy_wire is None

    def sent_nbytes(self, bucket: _Bucket) -> int:
        """The bytes of a bucket as sent."""
        return bucket.nbytes if self.wire_of(bucket.kind) is None else bucket.nbytes // 2

    def price(self, kind: bucketers.Class) -> Table:
        """The price of the buckets of a class, by their bytes in memory."""
        if self.codec is not None and self.keeps_residuals(kind):
            sparsity = lane_prices.sparsity_of(self.tree, self.codec)
            height, sparse = self.codec.height, self.sparse(kind)
            prices = lane_prices.sparse_table(self.tree, self.sparse_algorithm, sparsity, height, selects=sparse)
        else:
            prices = lane_prices.dense_table(self.tree, self.algorithm)
        return prices if self.wire_of(kind) is None else dataclasses.replace(prices, nbytes=2 * prices.nbytes)

    def planned(self, bucket: _Bucket, name: str | None = None) -> BucketLayout:
        """Plans a bucket; `name` is a schedule that was chosen by the lane's price."""
        dtype = bucket.kind[0]
        members, codec = bucket.tensors, self.codec
        if codec is not None and self.keeps_residuals(bucket.kind):
            choice = sparse_plan(
                self.tree,
                self.sparse_algorithm,
                bucket.nbytes,
                codec.schedule.densities[-1],
                codec.entry_nbytes,
                rows=codec.rows,
                height=codec.height,
            )
            assert choice.dense is not None
            sparse = self.sparse(bucket.kind)
            plan = choice.plan if sparse else choice.dense
            above = choice.dense_above if sparse else 0.0
            if self.stays and above > 0:  # steps may have the density of another form's codec
                above = 1.0 if codec.schedule.densities[-1] < above else 0.0
            selection = _selection(codec, self.momentum, above)
            segment = grain.segment_nbytes(plan, bucket.nbytes, self.tree)
            wire = self.wire_of(bucket.kind)
            return BucketLayout(dtype, members, self.op, plan, segment, wire, selection, choice.dense, choice)
        sent = self.sent_nbytes(bucket)
        if self.algorithm != "auto" or self.times is None:
            choice = planner.allreduce_plan(self.tree, self.algorithm, nbytes=sent)
        else:
            among = lane_prices.candidates(self.tree, sent)
            choice = lane_prices.chosen(self.tree, name or among[0].name, sent, among)
        if self.times is None:
            segment = grain.segment_nbytes(choice.plan, sent, self.tree)
        else:
            segment = lane_prices.segment_of(self.tree, choice.algorithm, sent)
        return BucketLayout(dtype, members, self.op, choice.plan, segment, self.wire_of(bucket.kind), choice=choice)


def _laid_out(step: _Step, selected: frozenset[int]) -> Layout:
    if not step.places:
        return Layout(step.tensors, ())
    if step.times is None:
        request = _request(step, selected)
        name = _bucketer_name(step, request)
        return _built(step, _divided(step, request, bucketers.choose(request) if name == "auto" else name))
    priced, priced_outcomes = _priced(step, selected)
    outcomes = dict(priced_outcomes)
    worth = _worth(priced)
    if len(worth) > 1:
        lanes = [lane_of(step.tree, _built(step, divided), step.times) for _, divided in worth]
        # all are played, or none is
        if max(lane.messages_of(scheduled, step.tree) for scheduled in lanes) <= PLAYED_MESSAGES:
            steps = [in_lane(step.tree, scheduled, step.times).step_s for scheduled in lanes]
            worth = [(step_s, divided) for step_s, (_, divided) in zip(steps, worth, strict=True)]
            for step_s, divided in worth:
                outcomes[divided.bucketer] = dataclasses.replace(outcomes[divided.bucketer], step_s=step_s)
    simplest_first = bucketers.SIMPLEST_FIRST.index
    _, best = min(_tied(worth), key=lambda pair: (len(pair[1].buckets), simplest_first(pair[1].bucketer)))
    listed = sorted(
        outcomes.values(),
        key=lambda row: (row.bucketer != best.bucketer, row.step_s is None, row.step_s or 0.0, row.bucketer),
    )
    return dataclasses.replace(_built(step, best), outcomes=tuple(listed))


def _tied(priced: _Priced) -> _Priced:
    least_s = min(step_s for step_s, _ in priced)
    return [(step_s, divided) for step_s, divided in priced if step_s <= least_s * (1 + TIE)]


def _worth(priced: _Priced) -> _Priced:
    """The bucketers that may be the best when they are played."""
    near = [(step_s, divided) for step_s, divided in priced if step_s <= priced[0][0] * WORTH_PLAYING]
    if any(len(divided.buckets) <= MOST_BUCKETS for _, divided in _tied(near)):
        near = [(step_s, divided) for step_s, divided in near if len(divided.buckets) <= MOST_BUCKETS]
    return near[:MOST_PLAYED]


def _alone(step: _Step, selected: frozenset[int]) -> float:
    """The time of all bytes, those of each class in one bucket, where nothing is known of the step, seconds."""
    nbytes: dict[bucketers.Class, int] = {}
    for place in step.places:
        kind = (step.tensors[place].dtype, place in selected)
        nbytes[kind] = nbytes.get(kind, 0) + step.tensors[place].nbytes
    return sum(step.price(kind).parts([size])[0].seconds for kind, size in nbytes.items())


def _quickest(step: _Step, selected: frozenset[int]) -> float:
    """The shortest step of all bucketers by the prices of buckets, seconds."""
    (step_s, _), *_ = _priced(step, selected)[0]
    return step_s


def _priced(step: _Step, selected: frozenset[int]) -> tuple[_Priced, dict[str, Outcome]]:
    """Predicts the step of each bucketer by the prices of buckets: those that apply, the shortest step first."""
    if (selected, step.buckets) in step.known:
        return step.known[selected, step.buckets]
    assert step.times is not None
    request = _request(step, selected)
    named = _bucketer_name(step, request)
    names: Sequence[str] = (named,)
    if named == "auto":  # of those that do without times only the simplest
        timeless, simplest = ("by_size", "by_groups"), bucketers.choose(request)
        names = [name for name in bucketers.SIMPLEST_FIRST if name == simplest or name not in timeless]
    priced: _Priced = []
    outcomes: dict[str, Outcome] = {}
    for name in names:
        reason = bucketers.supports(bucketers.get(name), request)
        if reason is not None and named == "auto":
            outcomes[name] = Outcome(name, None, reason=reason)
            continue
        divided = _divided(step, request, name)
        ready_s, prices = _scheduled(step, divided, _parts(step, divided))
        step_s = of_lane(step.times, ready_s, functools.partial(lane.recursion, parts=prices)).step_s
        outcomes[name] = Outcome(name, step_s, len(divided.buckets))
        priced.append((step_s, divided))
    step.known[selected, step.buckets] = sorted(priced, key=lambda pair: pair[0]), outcomes
    return step.known[selected, step.buckets]


def _scheduled(step: _Step, divided: _Divided, parts: Sequence[Parts]) -> tuple[list[float], list[Parts]]:
    """When buckets of these prices, and what travels beside them, are ready; and all their prices."""
    both = lane.in_turn(zip((bucket.ready_s for bucket in divided.buckets), parts, strict=True), step.loads)
    return [ready for ready, _ in both], [price for _, price in both]


def _latest_s(step: _Step, divided: _Divided, parts: Sequence[Parts]) -> float:
    """The end of the last bucket, if nothing delays the computing."""
    _, ends_s = lane.recursion(*_scheduled(step, divided, parts))
    return max(ends_s)


def _parts(step: _Step, divided: _Divided) -> list[Parts]:
    """The prices of buckets, class by class."""
    kinds = [bucket.kind for bucket in divided.buckets]
    prices: dict[int, Parts] = {}
    for kind in dict.fromkeys(kinds):
        of_kind = [number for number, other in enumerate(kinds) if other == kind]
        sizes = [divided.buckets[number].nbytes for number in of_kind]
        prices.update(zip(of_kind, step.price(kind).parts(sizes), strict=True))
    return [prices[number] for number in range(len(kinds))]


def _request(step: _Step, selected: frozenset[int]) -> bucketers.Request:
    number = {place: index for index, place in enumerate(step.places)}
    groups = step.groups
    if groups is not None and not isinstance(groups, int):
        groups = [[number[place] for place in group if place in number] for group in groups]
    sparse = frozenset(number[place] for place in selected)
    ready_s = None if step.times is None else [step.ready_s[place] for place in step.places]
    some = [step.tensors[place] for place in step.places]
    return bucketers.Request(
        some, step.bucket_nbytes, groups, sparse, ready_s, None if step.times is None else step.price
    )


def _bucketer_name(step: _Step, request: bucketers.Request) -> str:
    """The bucketer that is asked for, or "auto"."""
    if step.buckets == "auto":
        return "auto"
    bucketer = bucketers.get(step.buckets)
    if step.groups is not None:  # they go before any name
        return bucketers.choose(request)
    if step.times is None:
        timed = dataclasses.replace(request, ready_s=[0.0] * len(request.tensors), price=step.price)
        reasons = [bucketers.supports(bucketer, tried) for tried in (request, timed)]
        if reasons[0] is not None and reasons[1] is None:  # it only waits for times
            return bucketers.choose(request)
    return step.buckets


def _divided(step: _Step, request: bucketers.Request, name: str) -> _Divided:
    buckets = []
    for made in bucketers.plan(request, name):
        members = tuple(step.places[index] for index in made.tensors)
        ready_s = 0.0 if request.ready_s is None else max(request.ready_s[index] for index in made.tensors)
        buckets.append(_Bucket(members, request.class_of(made.tensors[0]), made.nbytes, ready_s))
    return _Divided(name, tuple(buckets))


def _built(step: _Step, divided: _Divided) -> Layout:
    names = _exchanged(step, divided)
    planned = [step.planned(bucket, name) for bucket, name in zip(divided.buckets, names, strict=True)]
    return Layout(step.tensors, tuple(planned), divided.bucketer)


def _exchanged(step: _Step, divided: _Divided) -> list[str | None]:
    """The schedules of the buckets in the lane: the fastest ones, exchanged where the lane then ends earlier."""
    names: list[str | None] = [None] * len(divided.buckets)
    if step.times is None or step.algorithm != "auto" or len(names) > MOST_EXCHANGED:
        return names
    parts, options = _parts(step, divided), {}
    for number, bucket in enumerate(divided.buckets):
        if not step.keeps_residuals(bucket.kind):
            options[number] = lane_prices.candidates(step.tree, step.sent_nbytes(bucket))
            parts[number] = options[number][0].parts
    latest_s = _latest_s(step, divided, parts)
    for number in sorted(options, reverse=True):
        for other in options[number][1:]:
            tried = [*parts[:number], other.parts, *parts[number + 1 :]]
            tried_s = _latest_s(step, divided, tried)
            if tried_s < latest_s * (1 - WORTH_EXCHANGING):
                parts, latest_s, names[number] = tried, tried_s, other.name
    return names


def _selection(codec: Codec, momentum: Momentum | None, dense_above: float) -> Selection:
    """Convert the user's options to the engine's."""
    named = {field.name for field in dataclasses.fields(Selection)} & codec.described().keys()
    values = {name: getattr(codec, name) for name in named} | {
        "dense_above": dense_above,
        "momentum": None if momentum is None else momentum.value,
        "nesterov": momentum is not None and momentum.nesterov,
        "density": codec.schedule.densities[-1],
        "codec": codec.name,
        "entry_nbytes": codec.entry_nbytes,
    }
    return Selection(**(values | codec.selection()))
