"""The options of local steps: ranks of a host reduce in each step, and all ranks exchange every so many steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hvd_ext.compression.codec import Described
from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    import keras

# what the members of a group share
WITHIN = ("host", "rank")


@dataclasses.dataclass(frozen=True)
class LocalSteps(Described):
    """Let each host train by itself, and join the hosts every so many steps.

    Pass it to `hvd_ext.DistributedOptimizer` as `local_steps` (DiLoCo, Douillard et al. 2023; post-local SGD, Lin et
    al. 2020). A step reduces gradients over the ranks of a host. After `every` update steps comes an *outer step*: all
    ranks reduce the change of their weights since the last outer step, and the optimizer `outer` applies its average to
    the *global weights*, from which all hosts continue. The `compression` of the wrapped optimizer is that of the
    changes, whose steps are outer steps; inside a host gradients are sent whole. The optimizer's own state (momentum)
    stays with the host.

    Evaluation, prediction, saved models and `get_weights` have the global weights; see `hvd_ext.local_weights`.

    Args:
        every: the number of update steps between two outer steps, at least 1.
        outer: the optimizer of outer steps, of Keras 3; its gradient is the old global weights less the mean of the
            new local ones. It is copied, one for each list of variables. "nesterov" is DiLoCo's,
            `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`. None: the mean becomes the global weights.
        start: the number of first update steps whose gradients are reduced over all ranks.
        within: which ranks reduce in each step: those of a "host"; with "rank" each rank trains alone.
        fragments: the number of parts of the weights, of about equal size, whose outer steps come at different times,
            evenly spread (Streaming DiLoCo, Douillard et al. 2025).
        overlap: the number of update steps that are made while an outer step is under way; less than `every`. What
            they change is added to the new global weights.

    Raises:
        InvalidError: a value breaks its rule.
    """

    name: ClassVar[str] = "localsteps"
    feature: ClassVar[str] = "local steps"
    refuses: ClassVar[Mapping[str, str]] = {
        "op=Sum": (
            "local_steps: the changes of the hosts are averaged, and with op=Sum a host would add up the gradients of "
            "its own ranks only; use op=Average and a larger learning rate"
        ),
        "Keras 2": (
            "local_steps: only optimizers of Keras 3 have it; use keras.optimizers, and compile a model of Keras 3"
        ),
        "tape": (
            "local_steps: a tape does not see the weights, whose changes the hosts exchange; give it to "
            "hvd_ext.DistributedOptimizer"
        ),
        "partial rounds": (
            "local_steps: only with sync='full'; a host does not wait for other hosts between two outer steps anyway"
        ),
        "delay": (
            "local_steps: delay must be 0, because sums inside a host are soon there; LocalSteps(overlap=...) hides an "
            "outer step"
        ),
        "EMA": (
            "local_steps: use_ema keeps an average of each host's own weights, and Keras overwrites the weights with "
            "it; leave one of the two out"
        ),
        "SyncBatchNormalization": (
            "local_steps: the model has a hvd_ext.SyncBatchNormalization, which waits for all ranks in each forward "
            "pass, so that steps would wait for other hosts too; use keras.layers.BatchNormalization"
        ),
    }

    every: int
    outer: keras.optimizers.Optimizer | Literal["nesterov"] | None = "nesterov"
    start: int = 0
    within: Literal["host", "rank"] = "host"
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        self._check_whole(every=1, start=0, fragments=1, overlap=0)
        if self.fragments > self.every:
            raise InvalidError(
                f"LocalSteps, fragments ({self.fragments}): must be at most `every` ({self.every}), so that each has a "
                "step of its own"
            )
        if self.overlap >= self.every:
            raise InvalidError(
                f"LocalSteps, overlap ({self.overlap}): must be less than `every` ({self.every}), so that an outer "
                "step has ended before the next one"
            )
        if self.within not in WITHIN:
            raise InvalidError(f"LocalSteps, within ({self.within!r}): must be one of {', '.join(map(repr, WITHIN))}")
        if self.outer not in (None, "nesterov") and not hasattr(self.outer, "get_config"):
            raise InvalidError(
                f"LocalSteps, outer ({self.outer!r}): must be an optimizer of Keras 3, 'nesterov' or None"
            )
        if hasattr(self.outer, "_hvd_ext"):
            raise InvalidError(
                f"LocalSteps, outer ({self.outer!r}): must be a plain optimizer; its gradients are reduced already"
            )

    def described(self) -> dict[str, Any]:
        """Return the options by name as plain values, so that the ranks can compare them."""
        outer = self.outer
        if outer is not None and not isinstance(outer, str):
            config = {**outer.get_config(), "name": ""}  # Keras numbers names, and each rank may have another number
            text = json.dumps(config, sort_keys=True, default=lambda one: type(one).__name__)
            outer = f"{type(outer).__name__} {text}"
        return {**super().described(), "outer": outer}

    def offset(self, fragment: int, fragments: int) -> int:
        """Give the number of local steps, modulo `every`, after which the outer step of a fragment begins.

        Args:
            fragment: its number, from 0.
            fragments: how many there are; the last one's is 0.
        """
        return (fragment + 1) * self.every // fragments % self.every
