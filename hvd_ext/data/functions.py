"""The Python functions of a data set, which are freed with the data set.

TensorFlow keeps the function of a `tf.numpy_function` as long as the outermost graph, which in eager mode is as long as
the process. Such a function may have the arrays of a data set, and an elastic job makes a data set in each world.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_ext.data.cursor import MARK
from hvd_ext.errors import InvalidError


class Functions:
    """The Python functions of a data set that is being made; its graph refers to them weakly."""

    def __init__(self) -> None:
        self._functions: list[Callable[..., Any]] = []
        self._eager = tf.executing_eagerly()

    def weak(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what `tf.numpy_function` takes in place of a function of the data set.

        In a graph it is the function: nothing else lives as long as a graph of the user's own.
        """
        if not self._eager:
            return function
        self._functions.append(function)
        reference = weakref.ref(function)

        def call(*values: Any) -> Any:
            referred = reference()
            if referred is None:
                raise InvalidError(
                    "data set: it was freed, and an iterator still reads from it; keep a reference to it"
                )
            return referred(*values)

        return call

    def keep_with(self, *datasets: tf.data.Dataset) -> None:
        """Keep the functions as long as the tensor of one of these data sets, or a data set that is made of them."""
        for dataset in datasets if self._eager else ():
            setattr(tf.data.experimental.to_variant(dataset), MARK, self)
