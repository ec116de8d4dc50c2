"""One progress bar for a job: `fit` is silent on all ranks but 0."""

from __future__ import annotations

from typing import Any, Literal

from hvd_ext.job.process import rank

Verbosity = Literal["auto", 0, 1, 2]

# The values of `verbose` with which `fit` shows a bar: the default, and the one that asks for it.
_BARS = ("auto", 1)


def verbose(level: Verbosity = "auto") -> Verbosity:
    """Give `fit`, `evaluate` and `predict` their `verbose`: the level on rank 0, and silence on all others.

    Args:
        level: "auto", 0, 1 (a bar) or 2 (a line an epoch), as in Keras.

    Returns:
        The level on rank 0, 0 elsewhere.

    Raises:
        NotInitializedError: before `init()`.
    """
    return level if rank() == 0 else 0


def one_bar(params: dict[str, Any] | None) -> None:
    """Silence Keras' bar on all ranks but 0, from `set_params` of a callback in the list of `fit`.

    Keras hands one dictionary to all callbacks of a list. Its own bar is the last of them, and takes `verbose` from
    that dictionary. verbose=2 is not changed: it is never a default.
    """
    if params and params.get("verbose") in _BARS and rank() != 0:
        params["verbose"] = 0
