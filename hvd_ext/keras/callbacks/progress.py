"""One progress bar for a job: the other ranks' `fit` is silent."""

from __future__ import annotations

from typing import Any, Literal

from hvd_ext.job.process import rank

Verbosity = Literal["auto", 0, 1, 2]

# What `fit` prints by itself, from every rank alike: the default, and a bar that somebody asked for.
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
    """Silence Keras' bar on all ranks but 0; for `set_params` of a callback in the list of `fit`.

    Keras hands one dictionary to all callbacks of a list, and its own bar, which is the last of them, looks into it for
    `verbose`. verbose=2 is left alone: nobody gets it without asking.

    Args:
        params: what Keras gives to `set_params`; it is changed.
    """
    if params and params.get("verbose") in _BARS and rank() != 0:
        params["verbose"] = 0
