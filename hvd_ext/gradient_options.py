"""The options of a reduction of gradients: one frozen value for optimizers, tapes and commands.

Horovod's keywords are taken by their names. What a value would change silently elsewhere is refused here in words.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ext import pairs
from hvd_ext.errors import InvalidError
from hvd_ext.options import Average, Compression, Options, ReduceOp, Sum, check_compression

if TYPE_CHECKING:
    from hvd_ext.process_sets import ProcessSet

# Horovod's keywords that change nothing here, with any value.
_TAKEN = ("device_dense", "device_sparse", "use_locking")


@dataclasses.dataclass(frozen=True, eq=False)
class GradientOptions:
    """How gradients become one over the ranks; the same on all ranks, which is compared when a channel is opened.

    Args:
        op: `Average` or `Sum` of the ranks' gradients.
        algorithm: "auto" or an allreduce algorithm's name; None for that of `init`.
        bucket_nbytes: gradients travel together in buckets of about so many bytes; None for the one of `init`.
        compression: how float32 gradients travel; None for that of `init`.
        sparse_as_dense: make `tf.IndexedSlices` dense before they travel.
        gradient_predivide_factor: f: gradients are divided by f before the sum, and the sum by size/f; with `Average`.
        backward_passes_per_step: so many gradients are added up on each rank before one reduction and one update.
        average_aggregated_gradients: divide what was added up by backward_passes_per_step; False: leave the sum.
        groups: a number of buckets, or lists of variables that travel together; None and 0: buckets of bucket_nbytes.
        process_set: the ranks that reduce among themselves; None for all.
        scale_local_gradients: divide the gradients of local variables, which are not reduced, by the number of ranks.

    Raises:
        InvalidError: a value breaks its rule, or two of them exclude each other; the message says what to do.
        PlanError: there is no algorithm of this name.
    """

    op: ReduceOp = Average
    algorithm: str | None = None
    bucket_nbytes: int | None = None
    compression: Compression | None = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet | None = None
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        compression = None if self.compression is None else check_compression(self.compression)
        object.__setattr__(self, "compression", compression)
        Options().replace(op=self.op, algorithm=self.algorithm, bucket_nbytes=self.bucket_nbytes)
        if self.algorithm not in (None, "auto"):
            from hvd_ext.planning import registry

            registry.get(self.algorithm)
        for field in ("sparse_as_dense", "average_aggregated_gradients", "scale_local_gradients"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidError(f"{field} ({getattr(self, field)!r}): must be True or False")
        factor = self.gradient_predivide_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise InvalidError(f"gradient_predivide_factor ({factor!r}): must be a number above 0")
        if factor != 1 and self.op == Sum:
            raise InvalidError(pairs.words("predivide", "op=Sum"))
        passes = self.backward_passes_per_step
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise InvalidError(f"backward_passes_per_step ({passes!r}): must be a whole number from 1")
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        object.__setattr__(self, "process_set", _checked_set(self.process_set))

    @classmethod
    def from_keywords(
        cls, where: str, keywords: Mapping[str, Any], without: Mapping[str, str] | None = None
    ) -> GradientOptions:
        """Read the keywords of an optimizer or a tape, Horovod's and ours.

        Args:
            where: whose they are, for messages ("DistributedOptimizer").
            keywords: as the user gave them.
            without: fields that this face does not have, each with the words that refuse a value other than the
                default.

        Returns:
            The options.

        Raises:
            TypeError: a keyword that neither hvd_ext nor Horovod knows; the nearest known one is named.
            InvalidError: a value that breaks its rule.
            PlanError: there is no algorithm of this name.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        known = [*defaults, "num_groups", *_TAKEN]
        fields: dict[str, Any] = {}
        for name, value in keywords.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
                raise TypeError(f"{where} has no keyword {name!r}{hint}")
            if without and name in without and value != defaults[name]:
                raise InvalidError(f"{name} ({value!r}): {without[name]}")
            if name in defaults:
                fields[name] = value
        if keywords.get("num_groups"):
            warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=3)
            if fields.get("groups") is None:
                fields["groups"] = keywords["num_groups"]
        return cls(**fields)

    @classmethod
    def from_texts(cls, where: str, texts: Mapping[str, str]) -> GradientOptions:
        """Read the options from a command line.

        Args:
            where: whose they are, for messages ("bench training").
            texts: by name; numbers, "true" and "false" as YAML reads them, op and compression by their names.

        Returns:
            The options.

        Raises:
            InvalidError: an option that there is not, or a value that breaks its rule.
            PlanError: there is no algorithm of this name.
        """
        import yaml

        named = {"op": {"average": Average, "sum": Sum}, "compression": {one.name: one for one in Compression}}
        values = {
            name: named[name].get(text.lower(), text) if name in named else yaml.safe_load(text)
            for name, text in texts.items()
        }
        try:
            return cls.from_keywords(where, values)
        except TypeError as error:
            raise InvalidError(str(error)) from None

    def for_channel(self, job: Options) -> Options:
        """Give the options of a channel.

        Args:
            job: those of `init`, which hold where these say nothing.
        """
        return job.replace(
            op=self.op, algorithm=self.algorithm, bucket_nbytes=self.bucket_nbytes, compression=self.compression
        )

    def keywords(self) -> dict[str, Any]:
        """Give the keywords that make these options."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def described(self) -> dict[str, Any]:
        """Give what must be the same on all ranks besides the options of the channel and the groups."""
        names = (
            "sparse_as_dense",
            "gradient_predivide_factor",
            "backward_passes_per_step",
            "average_aggregated_gradients",
            "scale_local_gradients",
        )
        return {name: getattr(self, name) for name in names}


def _checked_groups(groups: Any) -> int | tuple[tuple[Any, ...], ...] | None:
    rule = "must be a number of groups, or a list of lists of variables"
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool)):
        if groups is not None and groups < 0:
            raise InvalidError(f"groups ({groups}): {rule}; a number is not negative")
        return groups or None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidError(f"groups ({groups!r}): {rule}")
    if not all(hasattr(variable, "shape") for group in groups for variable in group):
        raise InvalidError(f"groups ({groups!r}): {rule}; one of them holds something that is no variable")
    seen: set[int] = set()
    for variable in (variable for group in groups for variable in group):
        if id(variable) in seen:
            raise InvalidError(f"groups: each variable may be there once; {_name(variable)!r} is there again")
        seen.add(id(variable))
    return tuple(tuple(group) for group in groups if group) or None


def _checked_set(process_set: Any) -> ProcessSet | None:
    # Horovod's own global set has the number 0 as well
    if process_set is None or getattr(process_set, "process_set_id", None) == 0:
        return None
    from hvd_ext.process_sets import ProcessSet

    if not isinstance(process_set, ProcessSet):
        raise InvalidError(
            f"process_set ({process_set!r}): must be a hvd_ext.ProcessSet that was added, or None for all ranks; the "
            "sets of Horovod are its own"
        )
    return process_set


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
