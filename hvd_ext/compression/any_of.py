"""One choice of several forms in which gradients are sent: for each bucket the least lossy one that is fast enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hvd_ext.compression.codec import DenseFirst
from hvd_ext.compression.quantized import Quantized
from hvd_ext.errors import InvalidError

# forms without error feedback -> the dtype in which float32 is sent; None for float32
WHOLE: dict[str, str | None] = {"dense": None, "fp16": "float16", "bf16": "bfloat16"}
Whole = Literal["dense", "fp16", "bf16"]
_COMMON = ("dense_steps", "height", "min_elements", "vectors", "clip")


@dataclasses.dataclass(frozen=True)
class Form:
    """One of the forms.

    Attributes:
        label: its name in messages.
        wire: the dtype in which whole float32 gradients are sent; None for float32.
        codec: the codec; None for whole gradients.
    """

    label: str
    wire: str | None = None
    codec: DenseFirst | None = None

    @property
    def is_dense(self) -> bool:
        """Whether nothing is lost."""
        return self.wire is None and self.codec is None


@dataclasses.dataclass(frozen=True)
class AnyOf(DenseFirst):
    """Let the planner choose in which form each bucket is sent; `compression="auto"` is `AnyOf()`.

    Pass it to `hvd_ext.DistributedOptimizer` or a tape as `compression`. The first form is chosen with which the
    predicted step is within 5 % of the shortest that any of them gives. Of the tensors, those stay dense that have time
    enough. The choice is made again whenever buckets are planned again, with the measured times of the step;
    `hvd_ext.explain` shows the predicted step of each form. Residuals stay whatever the form is: a dense bucket sends
    them whole.

    Args:
        forms: what you accept, the least lossy first: "dense", "fp16", "bf16", `Quantized` and `Sign`. The options
            below hold for all of them. `TopK` cannot be one of them: it takes over the optimizer's momentum, which
            cannot change between two steps.
        dense_steps: the number of first update steps that send whole gradients.
        height: the levels of the topology in which whole gradients are added up first: 1 for hosts, 2 for racks of
            hosts, and so on; None for the fastest by the cost model.
        min_elements: tensors with fewer elements stay dense.
        vectors: also compress the gradients of tensors of rank 1 and 0 (biases, scales).
        clip: before anything else, scale a rank's gradients down to a norm of clip / sqrt(number of ranks); None for no
            clipping.

    Raises:
        InvalidError: a value breaks its rule.
    """

    name: ClassVar[str] = "auto"

    forms: tuple[Whole | DenseFirst, ...] = ("dense", "fp16", Quantized(bits=8))
    dense_steps: int = 0
    height: int | None = 1
    min_elements: int = 4096
    vectors: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.forms, (list, tuple)) or not self.forms:
            raise InvalidError(f"AnyOf, forms ({self.forms!r}): must be a list of at least one form")
        object.__setattr__(self, "forms", tuple(self.forms))
        for form in self.forms:
            if isinstance(form, DenseFirst) and not isinstance(form, AnyOf):
                changed = [field for field in _COMMON if getattr(form, field) != getattr(type(form), field)]
                if changed:
                    raise InvalidError(f"AnyOf, forms ({form.label}): give {changed[0]} to AnyOf, for all of its forms")
            elif not isinstance(form, str) or form not in WHOLE:
                raise InvalidError(
                    f"AnyOf, forms ({form!r}): each must be one of {', '.join(map(repr, WHOLE))}, a hvd_ext.Quantized "
                    "or a hvd_ext.Sign"
                )
        labels = [form if isinstance(form, str) else form.label for form in self.forms]
        if len(set(labels)) < len(labels):
            raise InvalidError(f"AnyOf, forms ({', '.join(labels)}): each may be given once")
        super().__post_init__()

    @property
    def label(self) -> str:
        """The forms, for messages."""
        return f"AnyOf({', '.join(form.label for form in self.choices)})"

    @property
    def choices(self) -> tuple[Form, ...]:
        """The forms, with the options that hold for all."""
        common = {field: getattr(self, field) for field in _COMMON}
        return tuple(
            Form(form, WHOLE[form])
            if isinstance(form, str)
            else Form(form.label, codec=dataclasses.replace(form, **common))
            for form in self.forms
        )

    @property
    def keeper(self) -> DenseFirst | None:
        """The codec in whose ranges residuals are kept while another form is sent; None if no form has residuals."""
        return next((form.codec for form in reversed(self.choices) if form.codec is not None), None)

    @property
    def density(self) -> float:  # type: ignore[override]
        """That of the lossiest codec: the engine compares it with 1."""
        return min((form.codec.density for form in self.choices if form.codec is not None), default=1.0)  # type: ignore[type-var, return-value]

    def described(self) -> dict[str, Any]:
        """Return the options by name as plain values, so that the ranks can compare them."""
        forms = [form if isinstance(form, str) else [form.name, form.described()] for form in self.forms]
        return {**super().described(), "forms": forms}


def from_text(text: str, codecs: Mapping[str, type]) -> AnyOf | None:
    """Read a choice from one word of a command line; None if the word is another one.

    Args:
        text: "auto", or forms as "auto:dense|fp16|quantized:4".
        codecs: the classes of codecs, by name.
    """
    name, _, rest = text.partition(":")
    if name != AnyOf.name:
        return None
    forms: list[Any] = []
    for word in rest.split("|") if rest else []:
        codec, _, options = word.partition(":")
        forms.append(codecs[codec].from_text(options) if codec in codecs else word)
    return AnyOf(tuple(forms)) if forms else AnyOf()
