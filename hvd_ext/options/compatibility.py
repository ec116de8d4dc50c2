"""Which features may be used together: each pair either works or is refused with an error that says why.

Tests cover each feature alone, each pair of features that act at the same place of a step, and each refused pair.
"""

from __future__ import annotations

import dataclasses
import itertools

from hvd_ext.compression import CODECS, LowRank
from hvd_ext.options.reduction import OPTIONS

# feature -> how a user asks for it
FEATURES: dict[str, str] = {
    "op=Sum": "`op=hvd.Sum`",
    "compression": "`compression=hvd.Compression.fp16` or `.bf16`",
    "top-k": "`compression=hvd.TopK(...)` or another codec",
    "top-k until": "`compression=hvd.TopK(until=...)`",
    "low rank": "`compression=hvd.LowRank(...)`",
    "predivide": "`gradient_predivide_factor`",
    "accumulation": "Keras' `gradient_accumulation_steps`",
    "backward_passes_per_step": "`backward_passes_per_step`",
    "groups": "`groups`",
    "process_set": "`process_set`",
    "sparse gradients": "embeddings, whose gradients are `tf.IndexedSlices`",
    "sparse_as_dense": "`sparse_as_dense=True`",
    "local variables": "`register_local_var`, `local_layers`, `scale_local_gradients`",
    "mixed_float16": "the policy, or a `LossScaleOptimizer`",
    "clipping": "Keras' `clipnorm` or `clipvalue`",
    "global_clipnorm": "Keras' `global_clipnorm`",
    "EMA": "Keras' `use_ema`",
    "XLA": "`tf.function(jit_compile=True)` around a step of your own",
    "Keras 2": "an optimizer of tf_keras",
    "tape": "`DistributedGradientTape` and a plain optimizer",
    "two optimizers": "two in one program, as in a GAN",
    "partial rounds": '`sync=` other than "full"',
    "delay": "`delay=1`",
    "local steps": "`local_steps=hvd.LocalSteps(...)`",
    "SyncBatchNormalization": "the layer",
    "LARS, LAMB": "`hvd.optimizers.LARS` or `LAMB`",
}

XLA = (
    "this step is compiled with XLA (jit_compile), and XLA cannot communicate; use "
    "model.compile(..., jit_compile=False) or tf.function(jit_compile=False), or let XLA compile only the function "
    "that makes the gradients"
)

_REFUSED: dict[frozenset[str], str] = {
    frozenset({"predivide", "op=Sum"}): (
        "gradient_predivide_factor: it splits the division of an average, but with op=Sum nothing is divided; leave "
        "one of them out"
    ),
    frozenset({"local variables", "global_clipnorm"}): (
        "global_clipnorm: local variables count in the norm, so that each rank would scale the reduced gradients "
        "differently, and their weights would differ; use clipnorm or clipvalue, which clip each variable separately"
    ),
    frozenset({"backward_passes_per_step", "tape"}): "must be 1, because a tape does not accumulate gradients",
    frozenset({"accumulation", "Keras 2"}): "gradient_accumulation_steps",  # tf_keras' own words: it lacks this
    frozenset({"clipping", "global_clipnorm"}): "Only one of `clipnorm`, `clipvalue`",  # Keras' own words
    frozenset({"LARS, LAMB", "Keras 2"}): "Could not interpret optimizer identifier",  # tf_keras' own words
    **{frozenset({"XLA", feature}): XLA for feature in FEATURES if feature != "XLA"},
    # codecs and the options that ask for policies say themselves what they are refused with
    **{
        frozenset({feature, other}): words
        for feature, refuses in (
            *((sent.feature, sent.refuses) for sent in (*CODECS.values(), LowRank)),
            *((field.metadata["feature"], field.metadata["refuses"]) for field in OPTIONS),
        )
        for other, words in refuses.items()
    },
}
# what is refused with top-k gradients is refused with those that end, in the same words
REFUSED = _REFUSED | {pair - {"top-k"} | {"top-k until"}: words for pair, words in _REFUSED.items() if "top-k" in pair}

# What users should know about pairs that work, and about combinations of three features.
REMARKS = (
    "accumulation or backward_passes_per_step with mixed_float16, and accumulation with a tape, reduce at every pass: "
    "in float16 all ranks must agree whether a pass is finite, and a tape does not know the optimizer's passes.",
    "A tape does not know its optimizer either: with local variables, use neither global_clipnorm nor a loss scale in "
    "that optimizer, or wrap the optimizer instead of the tape.",
    "top-k: sparse gradients are sent whole, as rows. Keras' clipping, global_clipnorm included, sees the reduced "
    "gradients, whose elements arrive in bursts; `TopK(clip=...)` clips each rank's gradients before the selection. "
    "With a tape, nothing skips a step whose gradients are not finite: check them yourself, they are then not finite "
    "on all ranks.",
    "top-k with accumulation and mixed_float16 is refused, because each pass would count as a step of momentum, "
    "warm-up and flush.",
    'LARS, LAMB: `parallel=True` is refused with partial rounds; with "auto" each rank then computes all norms. With a '
    "tape, too, each rank computes all of them. Norms of embeddings are those of dense gradients.",
    "top-k takes over the momentum of LARS only with `momentum_correction=True`; its trust ratios then have the norms "
    "that the gradients had in the step before.",
    "With Keras 2, backward_passes_per_step or local variables are refused in mixed_float16.",
    "`model.compile(jit_compile=True)`, which Keras chooses on a GPU, works with all options of Keras 3's optimizers "
    "where the training step is Keras' own: XLA compiles it in two halves around the reduction "
    "([gpu.md](gpu.md#training-with-xla)).",
)

# The places of a step at which features act. The code of two features that act at one place meets, so a test covers
# each such pair.
PLACES: dict[str, str] = {
    "forward": "the forward pass, before there are gradients",
    "passes": "which applies are reduced, and how the others are added up or left out",
    "form": "which gradients are dense, which are slices, and which stay on their rank",
    "factor": "the factors by which a gradient is multiplied or divided",
    "bucket": "which gradients are reduced together",
    "wire": "which elements of a gradient are sent, in which dtype and range",
    "memory": "what is kept from one step to the next",
    "update": "what Keras does with the reduced gradients",
}

# feature -> the places at which its code acts
ACTS_AT: dict[str, tuple[str, ...]] = {
    "op=Sum": ("factor",),
    "compression": ("wire",),
    "top-k": ("passes", "factor", "bucket", "wire", "memory"),
    "top-k until": ("passes", "factor", "bucket", "wire", "memory", "update"),
    "low rank": ("passes", "factor", "bucket", "wire", "memory"),
    "predivide": ("factor", "wire"),
    "accumulation": ("passes", "memory", "update"),
    "backward_passes_per_step": ("passes", "factor", "memory"),
    "groups": ("bucket",),
    "process_set": ("factor",),
    "sparse gradients": ("passes", "form", "factor", "bucket", "wire", "update"),
    "sparse_as_dense": ("form",),
    "local variables": ("form", "factor", "bucket"),
    "mixed_float16": ("passes", "factor", "wire", "memory", "update"),
    "clipping": ("update",),
    "global_clipnorm": ("update",),
    "EMA": ("memory", "update"),
    "XLA": (),  # refused with every other feature
    "Keras 2": ("passes", "form", "factor", "update"),
    "tape": ("passes", "form", "factor"),
    "two optimizers": ("memory",),
    "partial rounds": ("passes", "form", "factor", "memory"),
    "delay": ("passes", "memory", "update"),
    "local steps": ("passes", "form", "factor", "memory", "update"),
    "SyncBatchNormalization": ("forward",),
    # all places: its norms are those of the reduced gradients, whatever they went through and in whatever buckets, and
    # it knows the variables of normalisation layers by their names
    "LARS, LAMB": tuple(PLACES),
}

_TESTS = "tests/ranks/test_pairs.py"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two features together.

    Args:
        first: a feature.
        second: a later one of `FEATURES`.
        words: the error message that refuses the pair; "" for a pair that works.
        places: the keys of `PLACES` at which both act, and so might interfere.
        test: the test (file::function) that shows that the pair works or is refused; "" if the features never meet.
    """

    first: str
    second: str
    words: str
    places: tuple[str, ...]
    test: str

    @property
    def risky(self) -> bool:
        """Return whether the pair works and its features act at the same place, so that they might interfere."""
        return bool(self.places) and not self.words


def words(first: str, second: str) -> str:
    """Return the error message that refuses a pair, or words that it must contain; "" for a pair that works."""
    return REFUSED.get(frozenset({first, second}), "")


def refused(features: frozenset[str]) -> str:
    """Return the error message of the first pair of some features that is refused; "" if each pair works."""
    return next((words for pair, words in REFUSED.items() if pair <= features), "")


def pairs() -> tuple[Pair, ...]:
    """Return every pair of features, in the order of `FEATURES`."""
    return tuple(itertools.starmap(_pair, itertools.combinations(FEATURES, 2)))


def _pair(first: str, second: str) -> Pair:
    refused = words(first, second)
    places = tuple(place for place in PLACES if place in ACTS_AT[first] and place in ACTS_AT[second])
    test = "test_a_pair_that_is_refused_says_so" if refused else "test_a_risky_pair_equals_training_on_the_joined_batch"
    return Pair(first, second, refused, places, f"{_TESTS}::{test}" if refused or places else "")
