"""Which features may be used together: every pair works, and a test shows it, or it is refused in words."""

from __future__ import annotations

import dataclasses
import itertools

# feature -> how it is asked for
FEATURES: dict[str, str] = {
    "op=Sum": "`op=hvd.Sum`",
    "compression": "`compression=hvd.Compression.fp16` or `.bf16`",
    "top-k": "`compression=hvd.TopK(...)`",
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
    "XLA": "`jit_compile=True`",
    "Keras 2": "an optimizer of tf_keras",
    "tape": "`DistributedGradientTape` and a plain optimizer",
    "two optimizers": "two in one program, as in a GAN",
}

XLA = (
    "the training step is compiled with XLA (jit_compile), and XLA cannot communicate; use "
    "model.compile(..., jit_compile=False) or tf.function(jit_compile=False)"
)

REFUSED: dict[frozenset[str], str] = {
    frozenset({"predivide", "op=Sum"}): (
        "gradient_predivide_factor: it splits the division of an average, and with op=Sum nothing is divided; leave "
        "one of them out"
    ),
    frozenset({"compression", "top-k"}): (
        "must be one of Compression.none, Compression.fp16, Compression.bf16; there are no others, but hvd_ext.TopK"
    ),
    frozenset({"top-k", "Keras 2"}): (
        "compression=hvd_ext.TopK(...) works with optimizers of Keras 3, and with a tape; take "
        "keras.optimizers, or a hvd_ext.DistributedGradientTape with the plain optimizer of tf_keras"
    ),
    frozenset({"local variables", "global_clipnorm"}): (
        "global_clipnorm: local variables count in the norm, so that each rank would scale the reduced gradients "
        "differently and the ranks would part; use clipnorm or clipvalue, which look at one variable at a time"
    ),
    frozenset({"backward_passes_per_step", "tape"}): "a tape adds nothing up",
    frozenset({"accumulation", "Keras 2"}): "gradient_accumulation_steps",  # tf_keras' own words: it has none
    frozenset({"clipping", "global_clipnorm"}): "Only one of `clipnorm`, `clipvalue`",  # Keras' own words
    **{frozenset({"XLA", feature}): XLA for feature in FEATURES if feature != "XLA"},
}

# What a reader should know about pairs that work, and of three features together.
REMARKS = (
    "accumulation or backward_passes_per_step with mixed_float16, and accumulation with a tape, reduce at every pass: "
    "in float16 all ranks must see alike whether a pass is finite, and a tape does not know of the optimizer's passes.",
    "A tape does not know of its optimizer either: with local variables give that neither global_clipnorm nor a loss "
    "scale, or wrap the optimizer instead of the tape.",
    "top-k: sparse gradients travel whole, as rows. A clip of Keras and a global_clipnorm look at what has been sent, "
    "which comes in bursts; `TopK(clip=...)` looks at each rank's gradients before. With a tape, nothing leaves out a "
    "step that is not finite: look at the gradients, which are not finite on all ranks then.",
    "top-k with accumulation and mixed_float16 is refused: each pass would be a step of momentum, warm-up and flush.",
    "With Keras 2, backward_passes_per_step or local variables are refused in mixed_float16.",
)

_TEST = "tests/ranks/test_pairs.py::test_a_pair_that_works_equals_training_on_the_joined_batch"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two features together.

    Args:
        first: a feature.
        second: a later one of `FEATURES`.
        words: that refuse them; "" where they work.
        test: that shows that they work, or that they are refused: file::function.
    """

    first: str
    second: str
    words: str
    test: str


def words(first: str, second: str) -> str:
    """Give the words that refuse a pair.

    Args:
        first: a feature.
        second: another.

    Returns:
        The error's message, or what it must contain; "" for a pair that works.
    """
    return REFUSED.get(frozenset({first, second}), "")


def pairs() -> tuple[Pair, ...]:
    """Give every pair of features.

    Returns:
        In the order of `FEATURES`.
    """
    refused = _TEST.replace("that_works_equals_training_on_the_joined_batch", "that_is_refused_says_so")
    return tuple(
        Pair(first, second, words(first, second), refused if words(first, second) else _TEST)
        for first, second in itertools.combinations(FEATURES, 2)
    )
