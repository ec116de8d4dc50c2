"""Registration: the ranks agree on a list of gradients once, and then reduce them without negotiation.

`open_channel` opens a channel on all ranks together. The ranks compare names, shapes, dtypes, options and plans at that
moment. A difference raises the same `MismatchError` on all ranks and leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_ext.compression import Codec
from hvd_ext.compression.momentum import Momentum
from hvd_ext.engine.partial import Partial
from hvd_ext.errors import InvalidError
from hvd_ext.job import consensus, runtime
from hvd_ext.options import Options, is_file
from hvd_ext.options.reduction import compared
from hvd_ext.planning.layout import Groups, Layout, layout
from hvd_ext.planning.step_times import StepTimes
from hvd_ext.planning.tensors import DTYPES, Tensor
from hvd_ext.tensorflow import ops
from hvd_ext.tensorflow.gradients import identity as identities, kinds as gradient_kinds
from hvd_ext.tensorflow.gradients.channel import Channel
from hvd_ext.tensorflow.gradients.identity import Identity
from hvd_ext.tensorflow.gradients.same_start import SameStart, Weights
from hvd_ext.topology.tree import Tree

# All channels share one name, so that ranks that open different channels meet, and learn what differs.
EXCHANGE = "agreement on gradients"

_LIST = "the list of variables"
_DENSE = gradient_kinds.DENSE


@ops.plain
def open_channel(
    name: str,
    tensors: Sequence[Tensor],
    options: Options | None = None,
    *,
    kinds: str | None = None,
    owner: runtime.Runtime | None = None,
    groups: Groups = None,
    codec: Codec | None = None,
    sparse_algorithm: str = "hitopk",
    momentum: Momentum | None = None,
    facts: Callable[[], dict[str, Any]] | None = None,
    start: SameStart | None = None,
    weights: Weights | None = None,
    partial: Partial | None = None,
    delay: int = 0,
    identity: Identity | None = None,
    device: str = ops.HOST,
) -> Channel:
    """Open a channel; all ranks call it, with equal arguments except for `kinds` and `device`.

    It runs eagerly, also while a function is traced.

    Args:
        name: the channel's name in messages, such as "Adam"; several channels may share a name.
        tensors: the gradients, in the same order on all ranks.
        options: algorithm, bucket_nbytes, op and compression; None takes the options of `owner`.
        kinds: this rank's kind of each gradient, one letter each (`gradients.kinds.kind`); None if all are dense.
        owner: the runtime of the ranks that take part; None for all ranks.
        groups: as `planning.layout.layout` takes them, with places in `tensors`.
        codec: how gradients are made smaller between hosts; None to send them whole.
        sparse_algorithm: the algorithm of the buckets with top-k gradients.
        momentum: the momentum correction that gradients go through before the selection.
        facts: returns further values that must be the same on all ranks, by name; an exception in it is raised on all
            ranks.
        start: compares the weights before the first update; None to skip this comparison.
        weights: the weights that `start` compares.
        partial: what makes its rounds partial, with the first rank's number of steps before; None if steps wait for
            all ranks.
        delay: how many steps before its own a step's results are of.
        identity: tells the optimizer or tape from others; None: the name does.
        device: TensorFlow's name of the device of its gradients and results (`devices.of_buckets`).

    Returns:
        The open channel.

    Raises:
        MismatchError: the ranks disagree; the message names the tensor or option and both ranks' values. It is
            raised on all ranks, and the next collective works.
        InvalidError: a dtype or shape on some rank cannot be reduced; raised on all ranks.
        PlanError: the algorithm cannot run on the topology.
        NotInitializedError: before `init()`.
    """
    owner = runtime.current() if owner is None else owner
    options = owner.options if options is None else options
    own = _DENSE * len(tensors) if kinds is None else kinds
    described_identity = (Identity(name) if identity is None else identity).described()
    where = f"channel {name!r}"

    def mine() -> dict[str, Any]:
        given = facts() if facts is not None else {}
        if codec is not None:
            given["momentum taken over"] = None if momentum is None else [momentum.value, momentum.nesterov]
        sums = None if start is None or weights is None else start.described(weights)
        described = _described(where, tensors, options, groups)
        before = None if partial is None else partial.before
        return {
            "identity": described_identity,
            "facts": given,
            "weights": sums,
            "before": before,
            **described,
            "kinds": own,
        }

    values = consensus.exchange(owner.engine, EXCHANGE, mine)
    check_facts(values, owner.engine.ranks)
    consensus.check_same(where, [value["options"] for value in values], owner.engine.ranks)
    consensus.check_tensors(where, [value["tensors"] for value in values], owner.engine.ranks)
    if partial is not None:
        partial = dataclasses.replace(partial, before=values[0]["before"])
    if identity is not None:
        identities.check_numbers(owner, values, owner.engine.ranks)
    if start is not None and weights is not None:
        start.registered([value["weights"] for value in values])
    agreed = gradient_kinds.joint([value["kinds"] for value in values])
    made: list[Layout] = []

    places = [place for place, kind in enumerate(agreed) if kind == _DENSE]

    def lay_out(times: StepTimes | None, whole: bool = False) -> Layout:
        forced = is_file(options.buckets) and not whole  # a file says how gradients are selected too
        made = layout(
            owner.tree,
            tensors,
            options.op,
            algorithm=options.algorithm,
            bucket_nbytes=options.bucket_nbytes,
            buckets="auto" if is_file(options.buckets) else options.buckets,
            times=times,
            wire=options.compression.value or None,
            groups=groups,
            places=places,
            codec=None if whole else codec,
            sparse_algorithm=sparse_algorithm,
            momentum=None if whole else momentum,
        )
        return _forced(options.buckets, owner.tree, made, options.op) if forced else made

    until = codec is not None and codec.until is not None
    if partial is not None or delay:  # results that a later step takes lie on the host
        device = ops.HOST

    def described() -> dict[str, Any]:
        made.append(lay_out(None))
        later = lay_out(None, whole=True).described() if until else {}
        return {**made[0].described(), **{f"{name}, whole": values for name, values in later.items()}}

    layouts = consensus.exchange(owner.engine, f"{EXCHANGE}, plans", described)
    consensus.check_same(where, layouts, owner.engine.ranks)
    kept = [values[0]["options"], str(codec), sparse_algorithm, str(momentum)]
    handle = owner.open(name, made[0], partial, on_device=device != ops.HOST)
    settings = json.dumps(kept, sort_keys=True)
    return Channel(name, agreed, made[0], owner, handle, lay_out, settings, partial, delay, device, until=until)


def check_facts(values: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Compare the facts of all ranks.

    Args:
        values: what each rank sent: the "identity" of its optimizer or tape, and its "facts".
        ranks: the numbers of these ranks in the job.

    Raises:
        MismatchError: the names or a fact differ.
    """
    identities.check_names([value["identity"] for value in values], ranks)
    consensus.check_same(values[0]["identity"]["label"], [value["facts"] for value in values], ranks)


def _forced(path: str, tree: Tree, usual: Layout, op: int) -> Layout:
    """Read a layout from a file; `usual` is the one that the options ask for otherwise."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(f"buckets ({path}): must be a layout's file: {error}") from error
    tensors, source = usual.tensors, f"buckets ({path})"
    found = Layout.from_json(_renamed(values, tensors), tree, tensors, op, places=usual.sent_tensors, source=source)
    there, here = found.form_of, usual.form_of
    for place in usual.sent_tensors:
        if there[place] != here[place]:
            raise InvalidError(
                f"{source}: {tensors[place].name!r} is sent in another form than the options ask for; give the "
                "compression and the momentum_correction with which the file was written, or write it again"
            )
    return found


def _renamed(values: Any, tensors: Sequence[Tensor]) -> Any:
    """Give the tensors of a layout's file the names that they have here, if they are the same tensors."""
    try:
        there = list(values["tensors"])
        if len(there) != len(tensors) or not all(map(consensus.alike, there, [tensor.name for tensor in tensors])):
            return values
        name_of = {name: tensor.name for name, tensor in zip(there, tensors, strict=True)}
        buckets = [{**one, "tensors": [name_of[name] for name in one["tensors"]]} for one in values["buckets"]]
        return {**values, "tensors": {name_of[name]: values["tensors"][name] for name in there}, "buckets": buckets}
    except (KeyError, TypeError, AttributeError):
        return values  # whoever reads it says what is wrong


def _described(where: str, tensors: Sequence[Tensor], options: Options, groups: Groups) -> dict[str, Any]:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise InvalidError(
                f"{where}, {tensor.name!r}: gradients of dtype {tensor.dtype} cannot be reduced; "
                f"the dtypes are {', '.join(DTYPES)}"
            )
        if not all(isinstance(dimension, int) and dimension >= 0 for dimension in tensor.shape):
            raise InvalidError(f"{where}, {tensor.name!r}: the shape {tensor.shape} must be known")
    of_channel = {name: getattr(options, name) for name in compared("channel")}
    return {
        "options": {
            **{name: value.name if isinstance(value, enum.Enum) else value for name, value in of_channel.items()},
            "groups": groups if isinstance(groups, int) or groups is None else [list(group) for group in groups],
        },
        "tensors": [[tensor.name, tensor.text] for tensor in tensors],
    }
