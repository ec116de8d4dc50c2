"""What a lossy codec with error feedback tells the planner, the policies and the engine."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeGuard, cast

from hvd_ext.compression.density import Schedule
from hvd_ext.errors import InvalidError

Where = Literal["everywhere", "needed"]


class Described:
    """Options that are a frozen dataclass, and can be read from a command line.

    Attributes:
        name: on command lines.
        feature: the key of `options.compatibility.FEATURES` by which options ask for it.
        refuses: other features -> the error message that refuses them together with `feature`.
    """

    name: ClassVar[str]
    feature: ClassVar[str]
    refuses: ClassVar[Mapping[str, str]]

    @property
    def label(self) -> str:
        """The class with its first option, for messages."""
        first = dataclasses.fields(self)[0].name  # type: ignore[arg-type]
        return f"{type(self).__name__}({first}={getattr(self, first)!r})"

    def described(self) -> dict[str, Any]:
        """Return the options by name as plain values, so that the ranks can compare them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def _check_whole(self, **least: int) -> None:
        """Raise `InvalidError` if an option, by name, is no whole number from this one on."""
        for field, first in least.items():
            value = getattr(self, field)
            if not is_whole(value) or value < first:
                raise InvalidError(f"{type(self).__name__}, {field} ({value!r}): must be a whole number from {first}")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read options from a command line.

        Args:
            text: a value of the first field, or "density=0.01,wire=bf16" with fields by name. Values are read as YAML.

        Raises:
            InvalidError: there is no such field, or a value breaks its rule.
        """
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for index, part in enumerate(text.split(",") if text else []):
            field, equals, value = part.partition("=")
            if not equals and index == 0:
                field, value = known[0], part
            if field not in known:
                raise InvalidError(
                    f"compression ({f'{cls.name}:{text}'!r}): {cls.__name__} has no field {field!r}; its fields are "
                    f"{', '.join(known)}"
                )
            values[field] = cls._parsed(field, value)
        return cls(**values)

    @classmethod
    def _parsed(cls, field: str, value: str) -> Any:
        import yaml

        return yaml.safe_load(value)


class Codec(Described, abc.ABC):
    """Options of a user that make a gradient smaller before it leaves a host, and keep the rest in a residual.

    A codec is a frozen dataclass of the values below, the ones that users may set as its fields; its file names it
    as `CODEC`. A file `tf_ops/engine/codec_NAME.cc` writes its messages, where NAME is its `name`. The density of a
    step is the share of the bytes that it sends, in entries of `entry_nbytes`; a step of density 1 is dense.
    """

    # of PACK, TAKE, MERGE and RESELECT (tf_ops/plan/ir.def), what its vectors can go through besides being added
    rows: ClassVar[frozenset[str]] = frozenset()
    # a codec that other features refuse, too, has a feature of its own besides this one
    feature: ClassVar[str] = "top-k"
    refuses: ClassVar[Mapping[str, str]] = {
        "compression": (
            "must be one of Compression.none, Compression.fp16, Compression.bf16, or hvd_ext.TopK(...) or another codec"
        ),
        "Keras 2": (
            "compression=hvd_ext.TopK(...) or another codec works with optimizers of Keras 3, and with a tape; use "
            "keras.optimizers, or a hvd_ext.DistributedGradientTape with the plain optimizer of tf_keras"
        ),
        "partial rounds": (
            "sync: with compression=hvd_ext.TopK(...) or another codec it must be 'full', because a rank sends from "
            "its residual and its gradient of the same step; leave one of the two out"
        ),
        "delay": (
            "delay (1): with compression=hvd_ext.TopK(...) or another codec it must be 0, because a step that is "
            "skipped must leave the residuals as they were before it, and the next step has used them already"
        ),
    }

    density: float | Literal["auto"]
    height: int | None  # the levels of the topology in which whole gradients are added up first; None for the fastest
    min_elements: int  # tensors with fewer elements stay dense
    vectors: bool  # whether tensors of rank 1 and 0 are compressed
    clip: float | None  # the norm to which the gradients of all ranks together are clipped
    where: Where = "everywhere"
    until: int | None = None  # the update step from which gradients are sent whole
    momentum_correction: bool | Literal["auto"] = False

    @property
    @abc.abstractmethod
    def schedule(self) -> Schedule:
        """The density of each step."""

    @property
    @abc.abstractmethod
    def entry_nbytes(self) -> float:
        """The mean number of bytes of a value and its index, as sent."""

    def selection(self) -> dict[str, Any]:
        """Return the fields of `planning.bucket_layout.Selection` whose values are not those of the options."""
        return {}

    def takes(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether a gradient may be compressed.

        Args:
            shape: the shape of the gradient.
            dtype: NumPy's name of its dtype; only float32 may be compressed.
        """
        elements = math.prod(shape)
        return dtype == "float32" and elements >= max(1, self.min_elements) and (self.vectors or len(shape) > 1)

    def _check_common(self) -> None:
        """Check the options that all codecs have."""
        name = type(self).__name__
        if not isinstance(self.vectors, bool):
            raise InvalidError(f"{name}, vectors ({self.vectors!r}): must be True or False")
        if not is_whole(self.min_elements) or self.min_elements < 0:
            raise InvalidError(f"{name}, min_elements ({self.min_elements!r}): must be a whole number from 0")
        if self.height is not None and (not is_whole(self.height) or self.height < 1):
            raise InvalidError(f"{name}, height ({self.height!r}): must be a whole number from 1, or None")
        if self.clip is not None and (not is_number(self.clip) or not self.clip > 0):
            raise InvalidError(f"{name}, clip ({self.clip!r}): must be a number above 0, or None")


class DenseFirst(Codec):
    """A codec that sends the same share of the bytes in all steps but the first ones, which may be dense."""

    entry_nbytes: ClassVar[float] = 4.0  # an entry is one of float32: the density is that of the bytes

    dense_steps: int  # the number of first update steps that send whole gradients

    @property
    def schedule(self) -> Schedule:
        """Dense steps first, and then those of the codec's density."""
        density = cast(float, self.density)
        return Schedule((0, self.dense_steps), (1.0, density)) if self.dense_steps else Schedule((0,), (density,))

    def __post_init__(self) -> None:
        if not is_whole(self.dense_steps) or self.dense_steps < 0:
            raise InvalidError(
                f"{type(self).__name__}, dense_steps ({self.dense_steps!r}): must be a whole number of steps from 0"
            )
        self._check_common()


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
