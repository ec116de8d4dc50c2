"""The options of a reduction of gradients: the one list of their names, types, defaults and meanings.

What takes options reads this list: the arguments of optimizers, tapes and `load_model` with their docstrings
(`faces.py`), the checked value (`gradients.py`), the ranks' comparison of their options, and the engine's structs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hvd_ext.compression import Codec, LowRank
from hvd_ext.options import Algorithm, Average, Compression, ReduceOp, SparseAlgorithm, Sync
from hvd_ext.options.local_steps import LocalSteps

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet

T = TypeVar("T")
Compared = Literal["value", "channel", "otherwise"]

_NOT_WITH_KERAS2 = (
    "sync and delay: only optimizers of Keras 3 and tapes have them; use keras.optimizers, or a "
    "hvd_ext.DistributedGradientTape with the plain optimizer of tf_keras"
)


def option(
    default: T,
    text: str,
    *,
    compared: Compared = "value",
    feature: str = "",
    refuses: Mapping[str, str] | None = None,
    engine: str = "",
) -> T:
    """Describe an option; a field of a dataclass.

    Args:
        default: its default.
        text: its paragraph in docstrings.
        compared: what the ranks compare: its "value", or that of the "channel", which is the value of `init` where the
            option is None; "otherwise": something else.
        feature: the key of `compatibility.FEATURES` that another value than the default asks for.
        refuses: the error message that refuses this feature together with another one, by the other one's key. It
            stands here, and not in the policy that serves the feature, because options are checked without TensorFlow.
        engine: its type in C, if the engine gets it with partial rounds: HvdExtPartial of tf_ops/engine/spec.def has a
            field of its name.
    """
    about = {"text": text, "compared": compared, "feature": feature, "refuses": refuses or {}, "engine": engine}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReductionOptions:
    """The options of a reduction, unchecked; `hvd_ext.options.gradients.GradientOptions` checks them."""

    op: ReduceOp = option(
        Average,
        "`hvd_ext.Average` or `hvd_ext.Sum` of the ranks' gradients.",
        compared="channel",
        feature="op=Sum",
    )
    algorithm: Algorithm | SparseAlgorithm | None = option(
        None,
        '"auto" or an allreduce algorithm; None: that of `init`. With `TopK` or another codec an algorithm for what '
        'they send ("hitopk", "naive_allgather", and with `TopK` "gtopk"); None: "hitopk".',
        compared="channel",
    )
    bucket_nbytes: int | None = option(
        None,
        "the approximate size in bytes of the buckets in which gradients are sent together; None: that of `init`.",
        compared="channel",
    )
    buckets: str | Path | None = option(
        None,
        '"auto", a way to divide gradients into buckets, or a file of `hvd_ext.explain` (docs/buckets.md); None: that '
        "of `init`. Groups take precedence.",
        compared="channel",
    )
    compression: Compression | Codec | LowRank | Literal["auto"] | None = option(
        None,
        "how float32 gradients are sent: `hvd_ext.Compression.fp16` or `.bf16`; `hvd_ext.TopK`, the largest elements "
        "only, `hvd_ext.Quantized`, numbers of few bits, `hvd_ext.Sign`, or `hvd_ext.LowRank`, products of thin "
        "matrices (docs/compression.md); `hvd_ext.AnyOf`, what is fast enough of several forms, or "
        '"auto", its default. None: that of `init`.',
        compared="channel",
        feature="compression",
    )
    sparse_as_dense: bool = option(
        False, "make `tf.IndexedSlices` dense before they are sent.", feature="sparse_as_dense"
    )
    gradient_predivide_factor: float = option(
        1.0,
        "f: gradients are divided by f before the sum, and the sum by size/f; with `Average`.",
        feature="predivide",
    )
    backward_passes_per_step: int = option(
        1,
        "the number of passes whose gradients each rank adds up before one reduction and one update.",
        feature="backward_passes_per_step",
    )
    average_aggregated_gradients: bool = option(False, "divide these sums by backward_passes_per_step.")
    groups: int | Sequence[Sequence[Any]] | None = option(
        None,
        "a number of buckets, or lists of variables, one for each bucket; None or 0: buckets of bucket_nbytes.",
        compared="otherwise",  # as places in the list of variables
        feature="groups",
    )
    process_set: ProcessSet | None = option(
        None,
        "the ranks that reduce among themselves; None: all.",
        compared="otherwise",  # only its ranks compare anything
        feature="process_set",
    )
    scale_local_gradients: bool = option(
        True, "divide the gradients of local variables, which are not reduced, by the number of ranks."
    )
    check_every: int = option(
        0, "the number of steps after which the ranks compare a checksum of their weights again; 0: never."
    )
    check_start: bool = option(
        True, "compare the ranks' weights before the first update, or the second of a tape (docs/training.md)."
    )
    sync: Sync = option(
        "full",
        'whose gradients a step waits for (docs/stragglers.md): "full", those of all ranks; "solo", the first; '
        '"majority", those of a rank drawn for each step; "quorum", the first `quorum` of them; "auto", a quorum that '
        "the job chooses. Gradients that come late enter a later step.",
        feature="partial rounds",
        refuses={
            "Keras 2": _NOT_WITH_KERAS2,
            "SyncBatchNormalization": (
                "sync: the model has a hvd_ext.SyncBatchNormalization, which waits for all ranks in each forward pass, "
                "so that steps would wait for all ranks too; use keras.layers.BatchNormalization, or sync='full'"
            ),
        },
    )
    quorum: int | None = option(
        None,
        'with sync="quorum", how many gradients a step waits for, from 1 to the number of ranks.',
        engine="int64_t",
    )
    staleness: int = option(4, "the largest number of steps by which a gradient may come late.", engine="int64_t")
    delay: int = option(
        0,
        "1: a step has the gradients of the step before it, so that computation hides communication; only with "
        'sync="full". The first step has none.',
        feature="delay",
        refuses={
            "partial rounds": (
                "delay (1): only with sync='full'; other steps return at once where a rank is late, and need no delay"
            ),
            "Keras 2": _NOT_WITH_KERAS2,
        },
    )
    local_steps: LocalSteps | None = option(
        None,
        "`hvd_ext.LocalSteps`: hosts reduce by themselves, and all ranks exchange the change of the weights every so "
        "many steps, sent as `compression` says (docs/local_steps.md).",
        compared="otherwise",  # by its values
        feature=LocalSteps.feature,
        refuses=LocalSteps.refuses,
    )


OPTIONS = dataclasses.fields(ReductionOptions)
# the types in C of the options that the engine gets, by name
ENGINE_TYPES: dict[str, str] = {field.name: field.metadata["engine"] for field in OPTIONS if field.metadata["engine"]}


def compared(what: Compared) -> tuple[str, ...]:
    """Return the names of the options of which the ranks compare this; see `option`."""
    return tuple(field.name for field in OPTIONS if field.metadata["compared"] == what)
