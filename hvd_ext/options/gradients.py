"""The options of a reduction of gradients: one frozen value for optimizers, tapes and commands.

Horovod's keywords keep their names. A value that would be ignored or misread in silence is refused with an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hvd_ext.compression import AnyOf, Codec, LowRank, from_text
from hvd_ext.compression.codec import is_whole
from hvd_ext.errors import InvalidError
from hvd_ext.options import (
    SYNCS,
    Average,
    Compression,
    Options,
    SetOfRanks,
    Sum,
    check_compression,
    compatibility,
    is_file,
)
from hvd_ext.options.local_steps import LocalSteps
from hvd_ext.options.reduction import OPTIONS, ReductionOptions, compared

if TYPE_CHECKING:
    from hvd_ext.job.process_sets import ProcessSet


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientOptions(ReductionOptions):
    """How gradients are reduced over the ranks; equal on all ranks, which compare their options in the first step.

    Raises:
        InvalidError: a value breaks its rule, or two values exclude each other; the message says what to do.
        PlanError: no algorithm has this name.
    """

    def __post_init__(self) -> None:
        if self.compression == "auto":
            object.__setattr__(self, "compression", AnyOf())
        if self.compression is not None and not isinstance(self.compression, (Codec, LowRank)):
            object.__setattr__(self, "compression", _checked_compression(self.compression))
        _defaults().replace(**{**self._of_channel(), "algorithm": self.algorithm})
        _check_algorithm(self.algorithm, self.codec)
        for field in OPTIONS:
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise InvalidError(f"{field.name} ({getattr(self, field.name)!r}): must be True or False")
        factor = self.gradient_predivide_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise InvalidError(f"gradient_predivide_factor ({factor!r}): must be a number above 0")
        passes = self.backward_passes_per_step
        if not is_whole(passes) or passes < 1:
            raise InvalidError(f"backward_passes_per_step ({passes!r}): must be a whole number from 1")
        if not is_whole(self.check_every) or self.check_every < 0:
            raise InvalidError(f"check_every ({self.check_every!r}): must be a whole number of steps, 0 for never")
        _check_sync(self)
        _check_local_steps(self)
        if refused := compatibility.refused(self.features):
            raise InvalidError(refused)
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        object.__setattr__(self, "process_set", _checked_set(self.process_set))

    @classmethod
    def from_texts(cls, where: str, texts: Mapping[str, str]) -> GradientOptions:
        """Read the options from a command line.

        Args:
            where: the command, for messages ("bench training").
            texts: each option's text by name. Numbers, "true" and "false" are read as YAML; op and compression are
                names, or a codec as "topk:0.01", "topk:density=0.01,wire=bf16" or "sign"
                (`hvd_ext.compression.from_text`).

        Returns:
            The options.

        Raises:
            InvalidError: an option does not exist, or a value breaks its rule.
            PlanError: no algorithm has this name.
        """
        import yaml

        known = [field.name for field in OPTIONS]
        for name in texts:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise InvalidError(f"{where} has no option {name!r}; {hint}")
        named: dict[str, dict[str, Any]] = {
            "op": {"average": Average, "sum": Sum},
            "compression": {compression.name: compression for compression in Compression},
        }
        values = {
            name: named[name].get(text.lower(), text) if name in named else yaml.safe_load(text)
            for name, text in texts.items()
        }
        if isinstance(values.get("local_steps"), (str, int)):
            values["local_steps"] = LocalSteps.from_text(texts["local_steps"])
        codec = from_text(texts.get("compression", ""))
        if codec is not None:
            values["compression"] = codec
        return cls(**values)

    @property
    def codec(self) -> Codec | None:
        """The codec with error feedback; None if all elements are sent."""
        return self.compression if isinstance(self.compression, Codec) else None

    @property
    def low_rank(self) -> LowRank | None:
        """How gradients are factorised; None if they are not."""
        return self.compression if isinstance(self.compression, LowRank) else None

    @property
    def keeps_residuals(self) -> bool:
        """Whether what a step does not send enters later ones."""
        return self.codec is not None or self.low_rank is not None

    @property
    def features(self) -> frozenset[str]:
        """The keys of `compatibility.FEATURES` that these options ask for."""
        asking = [field for field in OPTIONS if field.metadata["feature"]]
        features = {
            field.metadata["feature"]
            for field in asking
            if getattr(self, field.name) not in (field.default, Compression.none)
        }
        if self.low_rank is not None:
            return frozenset(features - {"compression"} | {LowRank.feature})
        if self.codec is None:
            return frozenset(features)
        return frozenset(features - {"compression"} | {Codec.feature, self.codec.feature})

    def for_channel(self, job: Options) -> Options:
        """Return the options of a channel.

        Args:
            job: the options of `init`, which apply where these options are None.
        """
        return job.replace(**self._of_channel())

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments that make these options."""
        return {field.name: getattr(self, field.name) for field in OPTIONS}

    def changed(self) -> tuple[str, ...]:
        """Return the names of the options that are not at their defaults."""
        return self.differing(GradientOptions())

    def differing(self, other: GradientOptions) -> tuple[str, ...]:
        """Return the names of the options in which two values differ.

        Args:
            other: the options to compare with; two groups are equal if they hold the same variables.
        """

        def comparable(options: GradientOptions) -> dict[str, Any]:
            groups: Any = options.groups
            if isinstance(groups, tuple):
                groups = [[id(variable) for variable in group] for group in groups]
            return {**options.keywords(), "groups": groups}

        own, others = comparable(self), comparable(other)
        return tuple(name for name in own if own[name] != others[name])

    def described(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks besides the options of the channel and the groups."""
        values = {name: getattr(self, name) for name in compared("value")}
        if self.codec is not None:
            values["sparse algorithm"] = self.sparse_algorithm
        if isinstance(self.compression, (Codec, LowRank)):
            of_class = type(self.compression).__name__
            values |= {f"{of_class}'s {name}": value for name, value in self.compression.described().items()}
        if self.local_steps is not None:
            values |= {f"LocalSteps' {name}": value for name, value in self.local_steps.described().items()}
        return values

    def within(self, group: ProcessSet | None) -> GradientOptions:
        """Return the options of the gradients of local steps, which are sent whole.

        Args:
            group: the ranks that reduce in each step; None: all.
        """
        buckets = None if self.buckets is not None and is_file(self.buckets) else self.buckets
        return dataclasses.replace(
            self, process_set=group, compression=Compression.none, algorithm=None, buckets=buckets
        )

    @property
    def of_outer_steps(self) -> GradientOptions:
        """The options of the changes of weights in outer steps of local steps."""
        kept = ("op", "algorithm", "bucket_nbytes", "buckets", "compression", "process_set")
        return GradientOptions(**{name: getattr(self, name) for name in kept})

    @property
    def before_local_steps(self) -> GradientOptions:
        """The options of the gradients of the first steps, before local steps start: they are sent whole."""
        return self.of_outer_steps.within(self.process_set)

    @property
    def partial(self) -> bool:
        """Whether steps do not wait for all ranks."""
        return self.sync != "full"

    @property
    def waits_for_all(self) -> bool:
        """Whether each step has the gradients of all ranks."""
        return not self.partial and self.local_steps is None

    @property
    def sparse_algorithm(self) -> str:
        """The algorithm for top-k gradients."""
        return self.algorithm or "hitopk"

    def _of_channel(self) -> dict[str, Any]:
        # what TopK and LowRank do not take, and factors, are reduced with the job's algorithm and compression
        of_job = {"algorithm": self.codec is not None, "compression": self.keeps_residuals}
        return {name: getattr(self, name) for name in compared("channel") if not of_job.get(name)}


@functools.cache
def _defaults() -> Options:
    return Options()


def _checked_compression(compression: Any) -> Compression:
    try:
        return check_compression(compression)
    except InvalidError as error:
        raise InvalidError(f"{error}, or hvd_ext.TopK(...) or another codec") from None


def _check_algorithm(algorithm: str | None, sparse: Codec | None) -> None:
    from hvd_ext.planning import registry

    sparse_names = registry.sparse_names()
    if sparse is not None:
        if algorithm not in (None, *sparse_names):
            raise InvalidError(
                f"algorithm ({algorithm!r}): with compression=hvd_ext.TopK(...) or another codec it must be one of "
                f"{', '.join(sparse_names)}, or None; gradients that are sent whole use the "
                "algorithm of init"
            )
    elif algorithm in sparse_names:
        raise InvalidError(
            f"algorithm ({algorithm!r}): sends only a part of the gradients, which compression must select; give "
            "compression=hvd_ext.TopK(density=0.01) too"
        )
    elif algorithm not in (None, "auto"):
        registry.get(algorithm)


def _check_sync(options: GradientOptions) -> None:
    sync, quorum, staleness, delay = options.sync, options.quorum, options.staleness, options.delay
    if sync not in SYNCS:
        raise InvalidError(f"sync ({sync!r}): must be one of {', '.join(map(repr, SYNCS))}")
    if sync == "quorum" and (not is_whole(quorum) or quorum < 1):
        raise InvalidError(
            f"quorum ({quorum!r}): with sync='quorum' it must be a number of ranks, from 1 to the number of all"
        )
    if sync != "quorum" and quorum is not None:
        raise InvalidError(f"quorum ({quorum!r}): only sync='quorum' has one; sync is {sync!r}")
    if not is_whole(staleness) or staleness < 0:
        raise InvalidError(f"staleness ({staleness!r}): must be a whole number of steps from 0")
    if delay not in (0, 1) or isinstance(delay, bool):
        raise InvalidError(f"delay ({delay!r}): must be 0 or 1")


def _check_local_steps(options: GradientOptions) -> None:
    local, codec = options.local_steps, options.codec
    if local is None:
        return
    if not isinstance(local, LocalSteps):
        raise InvalidError(f"local_steps ({local!r}): must be a hvd_ext.LocalSteps, or None")
    if not options.check_start:
        raise InvalidError(
            "check_start (False): with local_steps it must be True, because hosts that begin with different weights "
            "would never have the same ones"
        )
    if codec is not None and (codec.momentum_correction is True or codec.clip is not None):
        raise InvalidError(
            f"local_steps: with it {type(codec).__name__} can have no momentum_correction and no clip, because it "
            "sends changes of weights and no gradients; leave them out; Keras' clipnorm clips the gradients of a host"
        )


def _checked_groups(groups: Any) -> int | tuple[tuple[Any, ...], ...] | None:
    rule = "must be a number of groups, or a list of lists of variables"
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool)):
        if groups is not None and groups < 0:
            raise InvalidError(f"groups ({groups}): {rule}; a number must not be negative")
        return groups or None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidError(f"groups ({groups!r}): {rule}")
    if not all(hasattr(variable, "shape") for group in groups for variable in group):
        raise InvalidError(f"groups ({groups!r}): {rule}; one of them holds something that is not a variable")
    seen: set[int] = set()
    for variable in (variable for group in groups for variable in group):
        if id(variable) in seen:
            raise InvalidError(f"groups: each variable may be listed only once; {_name(variable)!r} is listed again")
        seen.add(id(variable))
    return tuple(tuple(group) for group in groups if group) or None


def _checked_set(process_set: Any) -> ProcessSet | None:
    # Horovod's own global set has the id 0 as well.
    if process_set is None or getattr(process_set, "process_set_id", None) == 0:
        return None
    if not isinstance(process_set, SetOfRanks):
        raise InvalidError(
            f"process_set ({process_set!r}): must be a hvd_ext.ProcessSet that was added, or None for all ranks; "
            "Horovod's own process sets cannot be used"
        )
    return cast("ProcessSet", process_set)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
