"""Which metrics keep sums: those of Keras, and classes of the user's own that only add to their variables."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvd_ext.keras.callbacks import additive


class Counter(keras.metrics.Metric):
    """Adds, in both ways that Keras' pages show."""

    def __init__(self) -> None:
        super().__init__(name="counter")
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.inner = keras.metrics.Mean()
        self.limit = 0.5

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        above = keras.ops.cast(y_pred > self.limit, self.dtype)
        self.hits.assign(self.hits + keras.ops.sum(above))
        self.rows.assign_add(keras.ops.sum(keras.ops.ones_like(above)))
        self.inner.update_state(above, sample_weight)

    def result(self) -> Any:
        return self.hits / self.rows


class Rounded(keras.metrics.MeanAbsoluteError):
    """Leaves the state to Keras."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.round(y_true), y_pred, sample_weight)


class OnlyResult(keras.metrics.Mean):
    def result(self) -> Any:
        return keras.ops.sqrt(super().result())


class Largest(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.hits.assign(keras.ops.maximum(self.hits, keras.ops.max(y_pred)))


class Decaying(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.hits.assign_add(0.1 * (keras.ops.mean(y_pred) - self.hits))


class Doubling(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.hits.assign(self.hits + self.hits)


class Aliased(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = self.hits
        hits.assign(keras.ops.max(y_pred))


class Elsewhere(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self._set(y_pred)

    def _set(self, y_pred: Any) -> None:
        self.hits.assign(keras.ops.max(y_pred))


class Handing(Counter):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        setattr(self, "limit", 1.0)  # noqa: B010
        self.hits.assign_add(keras.ops.sum(y_pred))


class OfLargest(Largest):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, y_pred, sample_weight)


class FromOne(keras.metrics.Mean):
    """A class that overrides only __init__, and has a variable that Keras does not set to 0."""

    def __init__(self) -> None:
        super().__init__(name="from_one")
        self.scale = self.add_weight(name="scale", initializer="ones")


class Running(Counter):
    def reset_state(self) -> None:
        pass


@pytest.mark.parametrize("kind", [keras.metrics.Mean, keras.metrics.AUC, Counter, Rounded, OnlyResult])
def test_sums_are_recognized(kind: Any) -> None:
    assert additive.why_not(kind()) == ""


@pytest.mark.parametrize("kind", [Largest, Decaying, Doubling, Aliased, Elsewhere, Handing, OfLargest])
def test_what_may_do_more_than_add_is_named(kind: Any) -> None:
    assert "update_state does more than add to its variables" in additive.why_not(kind())


@pytest.mark.parametrize("kind", [FromOne, Running])
def test_state_that_does_not_begin_at_zero_is_named_and_kept(kind: Any) -> None:
    metric = kind()
    metric.variables[0].assign(3.0)
    before = [np.asarray(variable).copy() for variable in metric.variables]
    assert additive.why_not(metric) == f"{kind.__name__}.reset_state does not set its variables to 0"
    np.testing.assert_array_equal([np.asarray(variable) for variable in metric.variables], before)


def test_a_class_without_source_is_not_taken_for_a_sum() -> None:
    scope: dict[str, Any] = {"keras": keras}
    exec(  # as in an interactive session
        "class Typed(keras.metrics.Mean):\n    def update_state(self, *a):\n        super().update_state(*a)\n", scope
    )
    assert "its source cannot be read" in additive.why_not(scope["Typed"]())
