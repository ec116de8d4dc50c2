"""The learning rate for many ranks, whose joined batches are one large batch."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args, overload

from hvd_ext.errors import InvalidError
from hvd_ext.job.process import size

Rule = Literal["linear", "sqrt"]
Optimizer = TypeVar("Optimizer")


@overload
def scale_learning_rate(optimizer_or_lr: float, rule: Rule = ..., ranks: int | None = ...) -> float: ...
@overload
def scale_learning_rate(optimizer_or_lr: Optimizer, rule: Rule = ..., ranks: int | None = ...) -> Optimizer: ...
def scale_learning_rate(optimizer_or_lr: Any, rule: Rule = "linear", ranks: int | None = None) -> Any:
    """Scale a learning rate that was tuned on one rank to the joined batch of all ranks.

    Args:
        optimizer_or_lr: a rate; or an optimizer of Keras, whose rate is then set.
        rule: "linear" multiplies by the number of ranks (Goyal et al. 2017, section 2.1; with a warm-up, see
            `hvd_ext.callbacks.LearningRateWarmupCallback`); "sqrt" by its square root (Krizhevsky 2014, section 5;
            usual for Adam and its kin).
        ranks: the number of ranks; None: of this job.

    Returns:
        The scaled rate; or the same optimizer.

    Raises:
        InvalidError: there is no such rule or number of ranks, or the rate comes from a schedule.
        NotInitializedError: before `init()`, with ranks=None.
    """
    if rule not in get_args(Rule):
        raise InvalidError(f"rule ({rule!r}): must be one of {', '.join(get_args(Rule))}")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise InvalidError(f"ranks ({ranks!r}): must be a number of ranks, a whole number from 1")
    number = size() if ranks is None else ranks
    factor = number if rule == "linear" else number**0.5
    if hasattr(optimizer_or_lr, "apply_gradients"):
        check_settable("scale_learning_rate", optimizer_or_lr)
        optimizer_or_lr.learning_rate = float(optimizer_or_lr.learning_rate) * factor
        return optimizer_or_lr
    if callable(optimizer_or_lr) or isinstance(optimizer_or_lr, str):
        raise InvalidError(
            f"scale_learning_rate ({optimizer_or_lr!r}): must be a number or an optimizer; of a schedule, scale the "
            "numbers that it is made from"
        )
    return float(optimizer_or_lr) * factor


def check_settable(where: str, optimizer: Any) -> Any:
    """Return the (inner) optimizer whose rate can be set; `InvalidError` for none, several rates, or a schedule."""
    if optimizer is None:
        raise InvalidError(f"{where}: the model has no compiled optimizer, so there is no learning rate to set")
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    if getattr(inner, "optimizers", None):
        raise InvalidError(
            f"{where}: optimizer {optimizer.name!r} has several optimizers, each with a learning rate of its own; set "
            "them in a callback of your own"
        )
    if callable(getattr(inner, "_learning_rate", None)):
        raise InvalidError(
            f"{where}: the learning rate of optimizer {optimizer.name!r} comes from a schedule and cannot be set; give "
            "the optimizer a number, or put the warm-up into the schedule"
        )
    return inner
