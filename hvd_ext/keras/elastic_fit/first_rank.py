"""Callbacks that write files or to the screen, in a job in which another rank may become rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_ext.job import membership
from hvd_ext.job.process import rank
from hvd_ext.keras import base

_HOOKS = (
    *(f"on_{what}_{when}" for what in ("epoch", "test", "predict", "batch") for when in ("begin", "end")),
    *(f"on_{what}_batch_{when}" for what in ("train", "test", "predict") for when in ("begin", "end")),
    "on_train_end",
)


class OnFirstRank(base.Callback):
    """Lets a callback work where this rank is rank 0 of its world.

    Attributes:
        on_first_rank: the callback.
    """

    works_on_batches = True

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.on_first_rank = callback
        self._works = False

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Take the parameters of `fit`."""
        super().set_params(params)
        self.on_first_rank.set_params(params)

    def set_model(self, model: Any) -> None:
        """Take the model."""
        super().set_model(model)
        self.on_first_rank.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin on rank 0; a file that an earlier world has written is continued."""
        self._works = rank() == 0
        session = membership.session()
        if hasattr(self.on_first_rank, "append") and session is not None and session.world > 0:
            self.on_first_rank.append = True  # CSVLogger
        if self._works:
            self.on_first_rank.on_train_begin(logs)


def _forwarding(name: str) -> Callable[..., None]:
    def hook(self: OnFirstRank, *arguments: Any, **keywords: Any) -> None:
        if self._works:
            getattr(self.on_first_rank, name)(*arguments, **keywords)

    hook.__name__, hook.__doc__ = name, "Forward."
    return hook


for _name in _HOOKS:
    setattr(OnFirstRank, _name, _forwarding(_name))
