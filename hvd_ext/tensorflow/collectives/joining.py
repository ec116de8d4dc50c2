"""`join`: a rank that has no more data gives zeros to the steps of the others."""

from __future__ import annotations

import json

import tensorflow as tf

from hvd_ext.errors import InvalidError
from hvd_ext.job import process_sets, runtime
from hvd_ext.job.process_sets import ProcessSet
from hvd_ext.options.compatibility import FEATURES
from hvd_ext.tensorflow.ops import plain


@plain
def join(*, process_set: ProcessSet | None = None) -> int:
    """Give zeros to the other ranks' reductions until all ranks have joined.

    A rank calls it when it has no more data, at the end of each epoch of uneven length. Until all ranks have joined,
    the ranks that have not can train steps, and call `allreduce` and `grouped_allreduce` with op `Sum` or `Average` and
    `barrier`; other collectives raise an `InvalidError`. As in Horovod, an average divides by the number of all ranks.

    A rank that has joined does not change its weights. Broadcast weights and the optimizer's variables from the rank
    that has joined last: it has trained all steps.

    Args:
        process_set: the ranks that take part; None for all.

    Returns:
        The rank in the job that has joined last, the same on all ranks.

    Raises:
        InvalidError: it is called in a function that TensorFlow traces, or an optimizer cannot be joined because it
            has partial rounds, a delay, local steps or low-rank gradients.
        CommunicationError: a peer is gone.
    """
    if not tf.executing_eagerly():
        raise InvalidError("join: it waits for all ranks, and no graph can; call it outside of tf.function")
    job = process_sets.member(process_set, "join")
    sets = {}
    for each in runtime.current().gradient_sets:
        if not each.is_open:
            continue
        if not each.policy.joins:
            raise InvalidError(
                f"join: {each.label} was made with {FEATURES[each.policy.feature].replace('`', '')}, for which zeros "
                "in place of a rank's gradients are wrong; give all ranks as many steps with hvd_ext.shard"
            )
        if each.job is job:
            sets[each.name] = each
        elif process_set is None:
            raise InvalidError(
                f"join: {each.label} reduces its gradients in a process set; join its ranks: join(process_set=...)"
            )
    mine = {"counts": job.counts, "sets": {name: each.progress() for name, each in sets.items()}}
    last, payloads = job.engine.join(job.plans_of_sums(), json.dumps(mine).encode())
    for payload in payloads:
        job.count_up_to(json.loads(payload)["counts"])
    of_last = json.loads(payloads[last])["sets"]
    for name in sorted(sets):
        if name in of_last:
            sets[name].catch_up(of_last[name])
    return job.engine.ranks[last]
